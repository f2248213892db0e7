"""Configurations that describe no model are refused in words, with the file's name and the key."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data.inputs import prepare_inputs
from conformance.data.tokenizer import load_tokenizer
from conformance.models.components import parameter_shapes
from conformance.models.families import read_architecture
from conformance.models.folder_checks import runs_code
from conformance.models.hf_config import LARGEST
from conformance.numerics.float64_tier import exact_tier
from conformance.oracle.decoder import check_shapes, forward
from conformance.oracle.run import POLICIES
from conformance.spec.scenario import parse_scenario

MODELS = FIXTURES / "models"
VOCABULARY = read_architecture(MODELS / "llama").vocab_size
TOKENS = torch.randint(3, 260, (40,), generator=torch.Generator().manual_seed(0))  # more than gemma3's window
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")


def edited(family: str, folder: Path, **changes: Any) -> Path:
    values = json.loads((MODELS / family / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(values | changes), encoding="utf-8")
    return folder


@pytest.mark.parametrize("key", SIZES)
def test_a_size_is_a_whole_number_that_a_model_may_have(key: str, tmp_path: Path) -> None:
    values: tuple[Any, ...] = (0, -8, 1.5, 64.0, True, "64", [64], {}, float("nan"), LARGEST[key] + 1, 10**400)
    for value in values:
        with pytest.raises(UsageError, match=rf"config.json sets {key}=.*; it must be a whole number from 1 to"):
            read_architecture(edited("llama", tmp_path, **{key: value}))


@pytest.mark.parametrize(
    ("family", "key", "value", "message"),
    [
        ("llama", "num_key_value_heads", 0, "a whole number from 1"),
        ("llama", "rms_norm_eps", 0, "a number above 0 and at most 1"),
        ("llama", "rms_norm_eps", 2, "a number above 0 and at most 1"),
        ("llama", "rms_norm_eps", float("nan"), "a number above 0"),
        ("llama", "rms_norm_eps", "1e-5", "a number above 0"),
        ("llama", "attention_bias", [1], "true or false"),
        ("llama", "mlp_bias", 1, "true or false"),
        ("llama", "tie_word_embeddings", "../..", "true or false"),
        ("llama", "pad_token_id", "", "not a token of a vocabulary of"),
        ("llama", "pad_token_id", VOCABULARY, f"not a token of a vocabulary of {VOCABULARY}"),
        ("llama", "pad_token_id", -VOCABULARY - 1, f"not a token of a vocabulary of {VOCABULARY}"),
        ("llama", "architectures", "LlamaForCausalLM", "a list of texts"),
        ("llama", "architectures", [None], "a list of texts"),
        ("llama", "head_dim", 7, "rotates 7 of the 7 dimensions of a head; rotary positions need an even"),
        ("llama", "model_type", ["llama"], "the oracle knows llama"),
        ("llama", "rope_parameters", [], "it must be an object"),
        ("llama", "rope_parameters", {"rope_theta": -1.0}, "rope_theta=-1.0; it must be a number above 0"),
        ("llama", "rope_parameters", {"rope_theta": 1e300}, "at most 1e[+]12"),
        ("llama", "rope_parameters", {"rope_theta": [1]}, "a number above 0"),
        ("pangu", "rope_theta", float("inf"), "a number above 0"),
        ("pangu", "bias", "yes", "true or false"),
        ("qwen3", "layer_types", [["full_attention"], 2], "a list of texts"),
        ("qwen3", "max_window_layers", -1, "a whole number from 0"),
        ("gemma3", "sliding_window", 0, "a whole number from 1"),
        ("gemma3", "sliding_window_pattern", 0, "a whole number from 1"),
        ("gemma3", "query_pre_attn_scalar", 0, "a number above 0"),
        ("gemma3", "query_pre_attn_scalar", -16, "a number above 0"),
        ("gemma3", "final_logit_softcapping", -1.0, "a number above 0"),
        ("gemma3", "rope_parameters", {"full_attention": 5}, "full_attention=5; it must be an object"),
    ],
)
def test_nonsense_is_named_with_its_key(family: str, key: str, value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"{tmp_path}/config.json[, ].*{message}"):
        read_architecture(edited(family, tmp_path, **{key: value}))


def test_a_padding_token_may_be_counted_from_the_end_of_the_vocabulary(tmp_path: Path) -> None:
    assert read_architecture(edited("llama", tmp_path, pad_token_id=-1)).padding_token == -1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 100}, r"model.embed_tokens.weight has shape \(\d+, 64\) instead of \(100, 64\)"),
        ({"num_hidden_layers": 3}, r"model.layers.2.self_attn.q_proj.weight is missing"),
        ({"num_hidden_layers": 1}, r"model.layers.1.self_attn.q_proj.weight is not expected"),
        ({"mlp_bias": True}, r"mlp.gate_proj.bias is missing"),
        ({"tie_word_embeddings": False}, None),
    ],
)
def test_sizes_that_the_weights_do_not_have_end_the_run_before_it_begins(
    change: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    for file in (MODELS / "llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    edited("llama", folder, **change)
    values = {"name": "any", "model": str(folder), "precision": "fp32", "optimizer": {"name": "sgd", "lr": 0.1}}
    scenario = parse_scenario({**values, "steps": 1, "data": {"rows": 2}})
    if message is None:
        prepare_inputs(scenario, tmp_path / "out")
    else:
        with pytest.raises(UsageError, match=f"llama do not fit its config.json: .*{message}"):
            prepare_inputs(scenario, tmp_path / "out")
        assert not list((tmp_path / "out").glob("inputs/llama*"))


def test_weights_of_integers_are_no_weights(tmp_path: Path) -> None:
    folder = edited("llama", tmp_path)
    tensors = load_file(MODELS / "llama" / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].long()
    save_file(tensors, folder / "model.safetensors")
    values = {"name": "any", "model": str(folder), "precision": "fp32", "optimizer": {"name": "sgd", "lr": 0.1}}
    with pytest.raises(UsageError, match=r"model.safetensors holds model.norm.weight as I64; weights must be one of"):
        prepare_inputs(parse_scenario(values), tmp_path.parent / f"{tmp_path.name}-out")
    assert set(tensors) == set(parameter_shapes(read_architecture(folder)))


@pytest.mark.parametrize(
    "absent",
    [True, pytest.param(False, marks=pytest.mark.exhaustive)],
    ids=lambda absent: "absent" if absent else "null",
)
@pytest.mark.parametrize(
    ("family", "key"),
    [
        (family, key)
        for family in ("pangu", "llama", "qwen3", "gemma3")
        for key in json.loads((MODELS / family / "config.json").read_text(encoding="utf-8"))
    ],
)
def test_what_a_configuration_leaves_out_is_what_transformers_fills_in_or_refused(
    family: str, key: str, absent: bool, tmp_path: Path
) -> None:
    shutil.copytree(MODELS / family, tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    values[key] = None
    if absent:
        del values[key]
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    try:
        architecture = read_architecture(tmp_path)
        load_tokenizer(tmp_path, trusted=True)  # has transformers read the configuration, in the controller
    except UsageError:
        return
    code = runs_code(tmp_path, trusted=True)
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=code)
    with exact_tier(), torch.no_grad():
        model = AutoModelForCausalLM.from_config(
            config, trust_remote_code=code, dtype=torch.float64, attn_implementation="eager"
        )
        weights = {name: parameter.data for name, parameter in model.named_parameters()}
        check_shapes({name: tuple(weight.shape) for name, weight in weights.items()}, architecture, "transformers")
        found = model(input_ids=TOKENS[None], use_cache=False).logits[0]
    expected = forward(TOKENS, weights, architecture, POLICIES["float64"])
    assert (found - expected).norm() < 1e-13 * expected.norm()
    assert model.get_input_embeddings().padding_idx == architecture.padding_token
