"""Checkpoints with the names of torchtitan, Megatron and DeepSpeed have Hugging Face's numbers, or are refused."""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from impl.convert.convert import convert, open_checkpoint, open_state, read

MODELS = FIXTURES / "models"
Weights = dict[str, torch.Tensor]
OF_TITAN = {
    **{f"self_attn.{x}_proj": f"attention.w{x}" for x in "qkvo"},
    **{f"self_attn.{x}_norm": f"attention.{x}_norm" for x in "qk"},
    **{f"mlp.{x}_proj": f"feed_forward.w{i}" for i, x in enumerate(("gate", "down", "up"), start=1)},
    **{"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"},
    **{"model.": "", "embed_tokens": "tok_embeddings"},
}


def weights_of(family: str) -> Weights:
    return dict(load_file(MODELS / family / "model.safetensors"))


def config_of(family: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((MODELS / family / "config.json").read_text())
    return config


def titan(weights: Weights, family: str = "llama", *, recent: bool = False) -> Weights:
    """The state dict of torchtitan's model, by the rules of its state_dict_adapter."""
    found, config = {}, config_of(family)
    for name, tensor in weights.items():
        key, own = name, tensor
        for part, other in OF_TITAN.items():
            key = key.replace(part, other)
        for x, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            if key.endswith(f"w{x}.weight") and family == "llama":
                own = own.view(config[heads], 2, -1, own.shape[1]).transpose(1, 2).reshape(own.shape)
        if recent:
            key = key.replace("attention.w", "attention.qkv_linear.w").replace("qkv_linear.wo", "wo")
        found[key if recent else key.replace("lm_head", "output")] = own.contiguous()
    return found


def megatron(weights: Weights, *, stacked: bool = True) -> Weights:
    """The state dict of Megatron's GPTModel, whose vocabulary is padded."""
    config = config_of("llama")
    layers = []
    for number in range(config["num_hidden_layers"]):
        own = {n.removeprefix(p): w for n, w in weights.items() if n.startswith(p := f"model.layers.{number}.")}
        own = {name.removesuffix(".weight"): weight for name, weight in own.items()}
        q, k, v = (own[f"self_attn.{x}_proj"].unflatten(0, (config["num_key_value_heads"], -1)) for x in "qkv")
        layers.append(
            {
                "self_attention.linear_qkv.layer_norm_weight": own["input_layernorm"],
                "self_attention.linear_qkv.weight": torch.cat([q, k, v], dim=1).flatten(0, 1),
                "self_attention.linear_proj.weight": own["self_attn.o_proj"],
                "mlp.linear_fc1.layer_norm_weight": own["post_attention_layernorm"],
                "mlp.linear_fc1.weight": torch.cat([own["mlp.gate_proj"], own["mlp.up_proj"]]),
                "mlp.linear_fc2.weight": own["mlp.down_proj"],
            }
        )
    names = {"embedding.word_embeddings": "model.embed_tokens", "output_layer": "lm_head"}
    padded = {f"{key}.weight": weights[f"{name}.weight"] for key, name in names.items() if f"{name}.weight" in weights}
    found = {key: torch.nn.functional.pad(weight, (0, 0, 0, 112)) for key, weight in padded.items()}
    if "model.norm.weight" in weights:
        found["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
    for name in layers[0]:
        if stacked:
            found[f"decoder.layers.{name}"] = torch.stack([layer[name] for layer in layers])
        else:
            found |= {f"decoder.layers.{i}.{name}": layer[name] for i, layer in enumerate(layers)}
    return found


def save_megatron(folder: Path, weights: Weights, **more: Any) -> None:
    dcp.save(megatron(weights) | more, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))


def save_deepspeed(folder: Path, weights: Weights) -> None:
    folder.mkdir()
    model = {"module": weights, "ds_config": {}, "global_steps": 1}
    torch.save(model, folder / "mp_rank_00_model_states.pt")


KINDS: dict[str, Callable[[Path, Weights], Any]] = {
    "DCP": lambda folder, weights: dcp.save({"model": weights}, checkpoint_id=folder, no_dist=True),
    "torchtitan": lambda folder, weights: dcp.save(titan(weights), checkpoint_id=folder, no_dist=True),
    "Megatron": save_megatron,
    "DeepSpeed": save_deepspeed,
}


def to_hf(folder: Path, family: str = "llama") -> Weights:
    new = folder.with_name("new")
    convert(folder, new, to="hf", model=MODELS / family, report=lambda *_: None)
    return dict(load_file(new / "model.safetensors"))


def assert_equal(found: Weights, wanted: Weights) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name, weight in wanted.items() if not torch.equal(found[name], weight)] == []


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("recent", [False, True], ids=["2025", "2026"])
def test_torchtitan_has_the_numbers_of_hugging_face(tmp_path: Path, family: str, recent: bool) -> None:
    own = titan(weights_of(family), family, recent=recent)
    state = {name: {"exp_avg": 2 * w, "exp_avg_sq": 3 * w, "step": torch.tensor(7.0)} for name, w in own.items()}
    others = {"optimizer": {"state": state}, "lr_scheduler": {"last_epoch": 7}, "train_state": {"step": 7}}
    dcp.save(own | others, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    assert set(open_checkpoint(tmp_path / "ckpt").kinds()) == {"weight", "exp_avg", "exp_avg_sq", "step"}
    assert_equal(to_hf(tmp_path / "ckpt", family), weights_of(family))
    convert(tmp_path / "ckpt", tmp_path / "state", to="state", model=MODELS / family, report=lambda *_: None)
    found = open_state(tmp_path / "state")
    assert_equal(
        {one.name: read(one) for one in found.of_kind("exp_avg")}, {n: 2 * w for n, w in weights_of(family).items()}
    )
    assert (found.progress, found.facts["step"]) == ({"schedule": 7}, 7)


def test_rows_of_torchtitan_give_the_same_scores() -> None:
    """Rotations of adjacent pairs, as torchtitan's ComplexRoPE, against transformers' rotations of halves."""
    config, weights = config_of("llama"), weights_of("llama")
    torch.manual_seed(0)
    hidden, name = torch.randn(9, config["hidden_size"], dtype=torch.float64), "layers.0.attention.w{}.weight"
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}

    def projected(key: str, own: Weights, count: int) -> torch.Tensor:
        split: torch.Tensor = (hidden @ own[key].double().T).unflatten(1, (count, -1))
        return split.transpose(0, 1)

    q, k = (projected(f"model.layers.0.self_attn.{x}_proj.weight", weights, heads[x]) for x in "qk")
    angles = torch.outer(torch.arange(9.0), 10_000.0 ** -torch.linspace(0, 0.9, q.shape[-1] // 2)).double()
    q, k = apply_rotary_pos_emb(
        q[None], k[None], torch.cat([angles, angles], dim=1).cos()[None], torch.cat([angles, angles], dim=1).sin()[None]
    )
    pairs = {
        x: torch.view_as_complex(projected(name.format(x), titan(weights), n).unflatten(2, (-1, 2)).contiguous())
        * torch.polar(torch.ones_like(angles), angles)
        for x, n in heads.items()
    }
    for head in range(heads["k"]):
        scores = (pairs["q"][head * heads["q"] // heads["k"]] @ pairs["k"][head].conj().T).real
        torch.testing.assert_close(scores, q[0, head * heads["q"] // heads["k"]] @ k[0, head].T)


@pytest.mark.parametrize(
    ("family", "more"), [("mistral", {}), ("llama", {"layers.0.moe.router.gate.weight": torch.ones(2, 2)})]
)
def test_other_models_of_torchtitan_name_its_script(tmp_path: Path, family: str, more: Weights) -> None:
    folder = tmp_path / "ckpt"
    dcp.save(titan(weights_of("llama")) | more, checkpoint_id=folder, no_dist=True)
    command = (
        f"run first torchtitan's python scripts/checkpoint_conversion/convert_to_hf.py {folder} NEW "
        "--hf_assets_path MODEL --model_name NAME --model_flavor FLAVOR"
    )
    for model in (MODELS / family, None):
        with pytest.raises(UsageError) as error:
            convert(folder, tmp_path / "new", to="state", model=model, report=lambda *_: None)
        assert command in str(error.value)
    assert [*tmp_path.iterdir()] == [folder]


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "apart"])
@pytest.mark.parametrize("common", ["common.pt", "entry"])
def test_megatron_has_the_numbers_of_hugging_face(tmp_path: Path, stacked: bool, common: str) -> None:
    own = megatron(weights_of("llama"), stacked=stacked)
    own |= {f"optimizer.state.{kind}.{n}": 2 * w for n, w in own.items() for kind in ("exp_avg", "exp_avg_sq")}
    shared = {"optimizer": {"param_groups": [{"step": 7}]}, "opt_param_scheduler": {"num_steps": 7}}
    shared["args"] = argparse.Namespace(num_layers=2)
    entry: Any = {"common_state/shard_0_1": [shared]} if common == "entry" else {}
    flat = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(own | entry, checkpoint_id=tmp_path / "ckpt", planner=flat, no_dist=True)
    (tmp_path / "ckpt" / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    if not entry:
        torch.save(shared, tmp_path / "ckpt" / common)
    assert open_checkpoint(tmp_path / "ckpt").facts["step"] == 7
    assert_equal(to_hf(tmp_path / "ckpt"), weights_of("llama"))
    convert(tmp_path / "ckpt", tmp_path / "state", to="state", model=MODELS / "llama", report=lambda *_: None)
    found = open_state(tmp_path / "state")
    moments = {one.name: read(one) for one in found.of_kind("exp_avg")}
    assert_equal(moments, {name: 2 * weight for name, weight in weights_of("llama").items()})
    assert (found.progress, found.facts["step"]) == ({"schedule": 7}, 7)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decoder.layers.2.mlp.linear_fc2.weight": torch.ones(2)}, "has tensors that .* lacks: decoder.layers.2"),
        ({"decoder.layers.mlp.linear_fc1.weight": torch.ones(2, 128, 64)}, "has shape"),
        ({"decoder.layers.mlp.linear_fc2.weight": torch.ones(2, 64, 64)}, "has shape"),
        ({"decoder.layers.mlp.linear_fc2.weight": torch.ones(3, 64, 56)}, "has shape"),
        ({"embedding.word_embeddings.weight": torch.ones(500, 32)}, "has shape"),
    ],
)
def test_megatron_of_another_shape_is_refused(tmp_path: Path, change: Weights, words: str) -> None:
    save_megatron(tmp_path / "ckpt", weights_of("llama"), **change)
    with pytest.raises(UsageError, match=f"{tmp_path}.*{words}.*give its own --model"):
        to_hf(tmp_path / "ckpt")


def missing(weights: Weights) -> None:
    del weights["model.norm.weight"]


def cut_tensor(weights: Weights) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()


def integers(weights: Weights) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"].long()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [missing, cut_tensor, integers])
def test_tensor_that_does_not_fit_is_named(tmp_path: Path, kind: str, change: Callable[[Weights], None]) -> None:
    weights = weights_of("llama")
    change(weights)
    KINDS[kind](tmp_path / "ckpt", weights)
    with pytest.raises(UsageError, match=r"ckpt.*(model\.norm|norm|final_layernorm)\.weight"):
        to_hf(tmp_path / "ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 9 // 10)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink, make_folder])
def test_damage_of_any_kind_gives_no_wrong_numbers(tmp_path: Path, kind: str, damage: Callable[[Path], None]) -> None:
    KINDS[kind](tmp_path / "ckpt", weights_of("llama"))
    file = max((tmp_path / "ckpt").iterdir(), key=lambda path: path.stat().st_size)
    damage(file)
    with pytest.raises(UsageError, match=r"/ckpt.*(damaged|cannot be read|rejected|not a checkpoint|is a folder)"):
        to_hf(tmp_path / "ckpt")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("damage", [cut, flip, lambda path: os.truncate(path, 2**41)])
def test_damaged_training_state_is_refused(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    save_deepspeed(tmp_path / "ckpt", weights_of("llama"))
    state = tmp_path / "state"
    convert(tmp_path / "ckpt", state, to="state", model=None, report=lambda *_: None)
    assert open_state(state).tensors
    damage(state / "weight" / "model.safetensors")
    with pytest.raises(UsageError, match=r"weight/model\.safetensors is damaged: its bytes have changed"):
        to_hf(state)
    (state / "weight" / "model.safetensors").rename(state / "weight" / "other.safetensors")
    with pytest.raises(UsageError, match=r"training_state\.json does not list the files of the folder"):
        to_hf(state)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_is_kept_where_it_was(tmp_path: Path, kind: str) -> None:
    weights = weights_of("llama")
    weights["model.layers.1.self_attn.k_proj.weight"][3, 5] = torch.nan
    KINDS[kind](tmp_path / "ckpt", weights)
    found = to_hf(tmp_path / "ckpt")
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=0, equal_nan=True)
