"""Conversion between Hugging Face and Megatron, and pipeline stages: arithmetic, without ranks or megatron-core."""

import dataclasses
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from impl.interface.sharded_safetensors import SliceReader, TensorWriter
from impl.megatron.hf_mapping import HEAD, all_parameters, check_weights, is_cut, parts
from impl.megatron.model_config import Adapters, Latent, ModelShape, read_shape, stages
from impl.megatron.moe_config import Mixture
from impl.megatron.spans import Part, Rank, copy_to_full, load_part

BASE = ModelShape(
    layers=2,
    hidden=16,
    heads=8,
    kv_heads=4,
    head_dim=6,  # not hidden / heads
    ffn=24,
    vocab=261,
    eps=1e-5,
    rope_theta=1e6,
    qkv_bias=False,
    output_bias=False,
    qk_norm=False,
    tied=False,
    max_positions=64,
)
MIXTURE = Mixture(layers=(1,), experts=3, chosen=2, size=8, normalised=True, shared=12, loss_factor=0.0)
CORRECTED = dataclasses.replace(MIXTURE, sigmoid=True, shared_gate=False)
LATENT = Latent(q_rank=10, kv_rank=6, plain=4, turned=4, value=5, neighbours=True, yarn=None)
ADAPTERS = Adapters(
    rank=3,
    scale=0.5,
    targets=(
        *(f"model.layers.0.self_attn.{x}_proj" for x in "qvo"),
        *(f"model.layers.1.mlp.{x}_proj" for x in ("gate", "up", "down")),
    ),
)
SHAPES = {
    "plain": BASE,
    "pangu": dataclasses.replace(BASE, qkv_bias=True, output_bias=True),
    "qwen2": dataclasses.replace(BASE, qkv_bias=True),
    "qwen3": dataclasses.replace(BASE, qk_norm=True, tied=True),
    "multi-head": dataclasses.replace(BASE, kv_heads=8),
    "fused": dataclasses.replace(BASE, fused=True),
    "gpt-oss": dataclasses.replace(
        BASE,
        qkv_bias=True,
        output_bias=True,
        sinks=True,
        mixture=dataclasses.replace(MIXTURE, shared=None, clamped=True),
    ),
    "divisible": dataclasses.replace(BASE, vocab=512),
    "value": dataclasses.replace(BASE, head="value"),
    "mixture": dataclasses.replace(BASE, mixture=MIXTURE),
    "adapters": dataclasses.replace(BASE, adapters=ADAPTERS),
    "latent": dataclasses.replace(BASE, latent=LATENT, head_dim=8, qkv_bias=True, output_bias=True),
    "latent with whole queries": dataclasses.replace(
        BASE, latent=dataclasses.replace(LATENT, q_rank=None), head_dim=8, mixture=CORRECTED
    ),
}


def hugging_face(shape: ModelShape) -> dict[str, torch.Tensor]:
    """Every tensor of a model, each number once in all of them."""
    names = {part.name: part.shape for name in all_parameters(shape) for part in parts(name, shape, ONE)}
    sizes = [torch.Size(size).numel() for size in names.values()]
    numbers = torch.randperm(sum(sizes)).float().split(sizes)
    return {name: n.view(size) for (name, size), n in zip(names.items(), numbers, strict=True)}


ONE = Rank(rank=0, size=1)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}


def own(name: str, shape: ModelShape, tp: Rank, full: dict[str, torch.Tensor]) -> torch.Tensor:
    """A rank's parameter, filled from whole tensors."""
    rows = {
        "embedding.word_embeddings.weight": shape.padded_vocab(tp.size) // tp.size,
        "output_layer.weight": 1 if shape.head == "value" else shape.padded_vocab(tp.size) // tp.size,
    }
    first = parts(name, shape, tp)[0]
    taken = sum(span.length for part in parts(name, shape, tp) for span in part.spans)
    size = list(first.matrix(full[first.name]).shape)
    if first.spans:
        size[first.dim] = taken
    if name in rows:
        size[0] = rows[name]
    tensor = torch.zeros(size)
    for part in parts(name, shape, tp):
        load_part(part, tensor, lambda part, start, stop: rows_of(part, full, start, stop))
    return tensor


def rows_of(part: Part, full: dict[str, torch.Tensor], start: int, stop: int) -> torch.Tensor:
    return part.matrix(full[part.name]).narrow(part.dim, start, stop - start)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_round_trip_gives_every_bit_back(shape: ModelShape, tp: int) -> None:
    full = hugging_face(shape)
    back = {name: torch.full_like(tensor, torch.nan) for name, tensor in full.items()}
    for name, rank in itertools.product(all_parameters(shape), range(tp)):
        place = Rank(rank=rank, size=tp)
        tensor = own(name, shape, place, full)
        for part in parts(name, shape, place):
            copy_to_full(part, tensor, back[part.name])
    assert all(torch.equal(back[name], full[name]) for name in full)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_ranks_hold_each_number_of_a_cut_tensor_once(shape: ModelShape, tp: int) -> None:
    full = hugging_face(shape)
    for name in all_parameters(shape):
        held = [own(name, shape, Rank(rank=rank, size=tp), full) for rank in range(tp)]
        wanted = torch.cat([part.matrix(full[part.name]).flatten() for part in parts(name, shape, ONE)])
        if not is_cut(name, shape):
            assert Counter(held[0].flatten().tolist()) == Counter(wanted.tolist())
            assert all(torch.equal(tensor, held[0]) for tensor in held)
            continue
        found = Counter(torch.cat([tensor.flatten() for tensor in held]).tolist())
        padding = sum(tensor.numel() for tensor in held) - wanted.numel()
        assert found - Counter(wanted.tolist()) == Counter({0.0: padding} if padding else {})


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [4, 8])
def test_query_key_and_value_lie_together_for_each_key_value_head(kv_heads: int, tp: int) -> None:
    shape = dataclasses.replace(BASE, qkv_bias=True, output_bias=True, kv_heads=kv_heads)
    full = hugging_face(shape)
    for kind in ("weight", "bias"):
        prefix, group = "model.layers.1.self_attn.", shape.heads // kv_heads
        q, k, v = (full[f"{prefix}{x}_proj.{kind}"] for x in "qkv")
        # megatron-core's own order, written another way than in the code: by reshaping.
        fused = torch.cat(
            [x.reshape(kv_heads, -1, *x.shape[1:]) for x in (q, k, v)],
            dim=1,
        ).flatten(0, 1)
        assert fused.shape[0] == kv_heads * (group + 2) * shape.head_dim
        for rank, piece in enumerate(fused.chunk(tp)):
            name = f"decoder.layers.1.self_attention.linear_qkv.{kind}"
            assert torch.equal(own(name, shape, Rank(rank=rank, size=tp), full), piece)


def test_convert_gpt_oss_experts_transposes_and_alternates() -> None:
    shape = SHAPES["gpt-oss"]
    full, prefix, ours = (
        hugging_face(shape),
        "model.layers.1.mlp.experts.",
        "decoder.layers.1.mlp.experts.local_experts.2.",
    )
    for rank in range(2):  # both whole
        found = {
            name: own(f"{ours}linear_fc{name}", shape, Rank(rank=rank, size=2), full)
            for name in ("1.weight", "1.bias", "2.weight", "2.bias")
        }
        gate_up, bias = full[f"{prefix}gate_up_proj"][2], full[f"{prefix}gate_up_proj_bias"][2]
        assert torch.equal(found["1.weight"], torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], dim=1).T)
        assert torch.equal(found["1.bias"], torch.cat([bias[::2], bias[1::2]]))
        assert torch.equal(found["2.weight"], full[f"{prefix}down_proj"][2].T)
        assert torch.equal(found["2.bias"], full[f"{prefix}down_proj_bias"][2])


def test_convert_fused_matrices_interleaves_rows() -> None:
    fused, apart = SHAPES["fused"], SHAPES["plain"]
    full, prefix = hugging_face(fused), "model.layers.1."
    q, k, v = full[f"{prefix}self_attn.qkv_proj.weight"].split([48, 24, 24])
    gate, up = full[f"{prefix}mlp.gate_up_proj.weight"].chunk(2)
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    divergence = {f"{prefix}{name}.weight": part for name, part in zip(names, (q, k, v, gate, up), strict=True)}
    for name in ("self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"):
        for rank in range(2):
            place = Rank(rank=rank, size=2)
            found = own(f"decoder.layers.1.{name}", fused, place, full)
            assert torch.equal(found, own(f"decoder.layers.1.{name}", apart, place, divergence))


def test_gate_and_up_are_cut_before_they_are_put_together() -> None:
    full = hugging_face(BASE)
    gate, up = (full[f"model.layers.0.mlp.{x}_proj.weight"].chunk(2) for x in ("gate", "up"))
    for rank in range(2):
        found = own("decoder.layers.0.mlp.linear_fc1.weight", BASE, Rank(rank=rank, size=2), full)
        assert torch.equal(found, torch.cat([gate[rank], up[rank]]))


def test_the_vocabulary_is_padded_at_its_end() -> None:
    full = hugging_face(BASE)
    held = [own(HEAD, BASE, Rank(rank=rank, size=4), full) for rank in range(4)]
    assert [len(piece) for piece in held] == [128] * 4
    whole = torch.cat(held)
    assert torch.equal(whole[:261], full["lm_head.weight"])
    assert not whole[261:].any()


def test_a_tied_head_is_the_embedding() -> None:
    shape = SHAPES["qwen3"]
    assert HEAD not in all_parameters(shape)
    assert parts(HEAD, shape, ONE)[0].name == "model.embed_tokens.weight"


CUTS = [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (2, 3), (4, 2)]


@pytest.mark.parametrize(
    ("layers", "pp", "vpp"), [(n, pp, vpp) for n in range(1, 9) for pp, vpp in CUTS if pp * vpp <= n + 2]
)
def test_stages_hold_each_layer_once_in_order(layers: int, pp: int, vpp: int) -> None:
    made = stages(layers=layers, pp=pp, vpp=vpp)
    assert [layer for chunk in made.chunks for layer in chunk] == list(range(layers))
    parts_of = [*made.layout]
    assert all(parts_of)
    assert (parts_of[0][0], parts_of[-1][-1]) == ("embedding", "loss")
    assert max(map(len, parts_of)) - min(map(len, parts_of)) <= 2
    for layer in range(layers):
        rank, number = made.owner(layer)
        assert layer in made.chunks[number * pp + rank]


def test_pipeline_uneven_layers_leave_fewer_at_both_ends() -> None:
    assert [len(chunk) for chunk in stages(layers=8, pp=4, vpp=1).chunks] == [2, 2, 2, 2]
    assert [len(chunk) for chunk in stages(layers=34, pp=4, vpp=1).chunks] == [8, 9, 9, 8]
    assert [len(chunk) for chunk in stages(layers=2, pp=2, vpp=2).chunks] == [0, 1, 1, 0]


@pytest.mark.parametrize("model", ["pangu", "llama", "qwen3", "qwen2", "mistral"])
def test_names_and_shapes_are_those_of_the_file(model: str) -> None:
    folder = FIXTURES / "models" / model
    shape = read_shape(folder)
    with SliceReader([folder / "model.safetensors"]) as read:
        for name in all_parameters(shape):
            for part in parts(name, shape, ONE):
                assert read(part.name, 0, 0, part.shape[0]).shape == part.shape
                assert len(part.shape) == 1 or read(part.name, 1, 1, 3).shape == (part.shape[0], 2)


@pytest.mark.parametrize("large", [False, True])
def test_a_folder_of_tensors_is_read_as_it_was_written(tmp_path: Path, large: bool) -> None:
    full = hugging_face(SHAPES["pangu"])
    with TensorWriter(tmp_path, **({"file_size": 1000} if large else {})) as writer:
        for name, tensor in full.items():
            writer.add(name, tensor)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1, (tmp_path / "model.safetensors.index.json").exists()) == (large, large)
    with SliceReader(files) as read:
        for name, tensor in full.items():
            assert torch.equal(read(name, 0, 0, len(tensor)), tensor)
        with pytest.raises(ValueError, match="no tensor 'other'"):
            read("other", 0, 0, 1)


def test_what_is_not_built_in_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="FalconForCausalLM is not among the architectures"):
        read_shape(changed(tmp_path, "llama", architectures=["FalconForCausalLM"]))
    text = (FIXTURES / "models" / "llama" / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        text.replace('"default"', '"longrope"').replace('bias": false', 'bias": true')
    )
    with pytest.raises(ValueError, match="scaled otherwise than by llama3 or yarn and biases in the MLP not built in"):
        read_shape(tmp_path)


def changed(folder: Path, model: str, **values: object) -> Path:
    """A folder whose configuration is a fixture's with other values; None takes one out."""
    config = json.loads((FIXTURES / "models" / model / "config.json").read_text()) | values
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


@pytest.mark.parametrize(
    ("model", "values", "advice"),
    [
        ("mistral", {"sliding_window": None}, "lacks the key sliding_window; add it"),
        (
            "llama",
            {"rope_parameters": {"type": "linear", "rope_theta": 1e4}},
            "scaled otherwise than by llama3 or yarn not built in",
        ),
        ("llama", {"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 1e4}, "lacks the key factor; add it"),
        ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.5}}, "yarn with attention_factor is not built in"),
        ("gpt-oss", {"quantization_config": {"quant_method": "mxfp4"}}, r"quantized weights .*dequantize=True"),
        ("gpt-oss", {"attention_bias": False}, "experts with biases beside attention without not built in"),
        ("gpt-oss", {"swiglu_limit": 5.0}, "experts need swiglu_alpha 1.702 and swiglu_limit 7.0"),
        ("llama", {"rms_norm_eps": None}, "lacks the key rms_norm_eps; add it"),
        ("phi3", {"resid_pdrop": 0.1}, r"dropout of embeddings and of blocks \(embd_pdrop, resid_pdrop\) not built in"),
        (
            "qwen3",
            {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 2},
            "a head with more than one value per token not built in",
        ),
    ],
)
def test_a_configuration_that_would_make_another_model_is_refused(
    tmp_path: Path, model: str, values: dict[str, object], advice: str
) -> None:
    with pytest.raises(ValueError, match=advice):
        read_shape(changed(tmp_path, model, **values))


def test_where_a_configuration_does_not_say_it_is_as_transformers_has_it(tmp_path: Path) -> None:
    pangu, llama = (
        read_shape(changed(tmp_path, "pangu", bias=None)),
        read_shape(changed(tmp_path, "llama", attention_bias=None)),
    )
    assert (pangu.qkv_bias, pangu.output_bias) == (True, True)  # openPangu's own default
    assert (llama.qkv_bias, llama.output_bias) == (False, False)


def test_read_shape_accepts_older_rope_scaling(tmp_path: Path) -> None:
    newer = json.loads((FIXTURES / "models" / "llama3" / "config.json").read_text())["rope_parameters"]
    scaling = {key: value for key, value in newer.items() if key != "rope_theta"}
    older = changed(tmp_path, "llama", rope_scaling=scaling, rope_theta=newer["rope_theta"])
    assert read_shape(older).llama3 == read_shape(FIXTURES / "models" / "llama3").llama3
    assert read_shape(older).rope_theta == newer["rope_theta"]
    with pytest.raises(ValueError, match="lacks the key rope_theta"):  # rope_parameters are not asked for it
        read_shape(changed(tmp_path, "llama", rope_scaling=scaling))


@pytest.mark.parametrize(
    ("model", "switch", "windows"),
    [
        ("mistral", {}, (12, 12)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, (None, 9)),
        ("qwen2", {"sliding_window": 9}, (None, None)),
        ("llama3", {}, (None, None)),
        ("gpt-oss", {}, (12, None)),
        ("gpt-oss", {"layer_types": None, "num_hidden_layers": 3}, (12, None, 12)),
        ("phi3", {}, (20, 20)),
    ],
)
def test_windows_are_those_of_the_layers_that_transformers_gives_one(
    tmp_path: Path, model: str, switch: dict[str, object], windows: tuple[int | None, ...]
) -> None:
    assert read_shape(changed(tmp_path, model, **switch)).windows == windows


def test_qwen2_has_biases_on_q_k_and_v_and_mistral_has_none() -> None:
    qwen2, mistral = (read_shape(FIXTURES / "models" / model) for model in ("qwen2", "mistral"))
    assert (qwen2.qkv_bias, qwen2.output_bias) == (True, False)
    assert (mistral.qkv_bias, mistral.output_bias) == (False, False)


@pytest.mark.parametrize(("model", "family"), [("pangu", "PanguEmbedded"), ("llama", "Llama"), ("qwen3", "Qwen3")])
def test_each_family_has_a_language_model_and_a_value_model(tmp_path: Path, model: str, family: str) -> None:
    folder = changed(tmp_path, model, architectures=[f"{family}ForSequenceClassification"], num_labels=1)
    value, causal = read_shape(folder), read_shape(FIXTURES / "models" / model)
    assert (value.head, causal.head) == ("value", "causal")
    assert {part.name for part in parts(HEAD, value, ONE)} == {"score.weight"}


def test_a_folder_that_is_written_again_holds_nothing_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size, fill in ((1000, 1.0), (10**9, 2.0)):  # several files and an index, then one file
        monkeypatch.setattr("impl.interface.sharded_safetensors.FILE_SIZE", size)
        with TensorWriter(tmp_path) as writer:
            for name in ("a", "b"):
                writer.add(name, torch.full((300,), fill))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"model.norm.weight": None}, "model.norm.weight is missing"),
        ("llama", {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, "q_proj.bias is not expected"),
        ("llama", {"model.norm.weight": torch.ones(65)}, r"model.norm.weight has shape \(65,\) instead of \(64,\)"),
        ("qwen3", {"lm_head.weight": torch.ones(400, 64)}, "ties lm_head.weight to .* but holds another tensor"),
        ("qwen3", {"lm_head.weight": "model.embed_tokens.weight"}, ""),
    ],
)
def test_a_file_with_other_tensors_than_the_model_is_refused(
    tmp_path: Path, family: str, change: dict[str, Any], message: str
) -> None:
    source = FIXTURES / "models" / family
    weights = load_file(source / "model.safetensors")
    for name, tensor in change.items():
        weights[name] = weights[tensor].clone() if isinstance(tensor, str) else tensor
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file({n: w for n, w in weights.items() if w is not None}, tmp_path / "model.safetensors")
    shape = read_shape(tmp_path)
    if message:
        with pytest.raises(UsageError, match=message):
            check_weights(tmp_path, shape)
    else:
        check_weights(tmp_path, shape)
