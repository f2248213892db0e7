"""Checks that the oracle rejects unknown models, reads every spelling of a known configuration, and computes optional
features as transformers does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from conformance.core.host import FIXTURES
from conformance.models.components import Attention, GatedMlp, Rotary, parameter_shapes
from conformance.models.families import read_architecture
from conformance.models.folders import prepare_model
from conformance.models.hf_config import FULL, SLIDING
from conformance.numerics.float64_tier import exact_tier
from conformance.oracle.decoder import forward, load_weights
from conformance.oracle.primitives import Weights
from conformance.oracle.run import POLICIES
from conformance.spec.observables import Role
from conformance.spec.scenario import OptimizerConfig, Scenario
from impl.models.loading import load_model

FAMILIES = ("pangu", "llama", "qwen3", "gemma3")
TOKENS = torch.randint(3, 260, (40,), generator=torch.Generator().manual_seed(0))  # more than gemma3's window


def folder(family: str) -> Path:
    return FIXTURES / "models" / family


def edited(family: str, tmp_path: Path, *, nulls: tuple[str, ...] = (), **changes: Any) -> Path:
    """A copy of a fixture's config.json with ``changes``; None removes a key, those of ``nulls`` are null."""
    values = json.loads((folder(family) / "config.json").read_text(encoding="utf-8")) | changes
    kept = {key: value for key, value in values.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept | dict.fromkeys(nulls)), encoding="utf-8")
    return tmp_path


def value_model(family: str, tmp_path: Path) -> Path:
    optimizer = OptimizerConfig(name="sgd", lr=0.1)
    scenario = Scenario(name="any", model=f"models/{family}", precision="exact", optimizer=optimizer)
    return prepare_model(scenario, Role(name="critic", head="value"), tmp_path / "critic")


def test_an_unknown_model_type_lists_the_known_ones(tmp_path: Path) -> None:
    message = r"'mamba'; the oracle knows .*gemma3_text \(to add one, see docs/guides/adding-a-model\.md"
    with pytest.raises(ValueError, match=message):
        read_architecture(edited("llama", tmp_path, model_type="mamba"))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"num_experts": 8}, "does not know for this model: num_experts"),
        ("llama", {"sliding_window": 8}, "does not know for this model: sliding_window"),
        ("llama", {"hidden_act": "relu"}, "activation 'relu'; known are silu"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp=2"),
        (
            "llama",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type 'dynamic'; the oracle computes default",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
            "in rope_parameters: has no 'low_freq_factor'",
        ),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "factor": 8.0}}, "does not know for this model: factor"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ("llama", {"rope_parameters": {FULL: {"rope_theta": 1e4}}}, "these layers share them"),
        ("pangu", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "the oracle computes default for this model"),
        ("gemma3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling="),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope'; the oracle computes"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop=0.1"),
        ("mistral", {"layer_types": [FULL, SLIDING]}, "does not know for this model: layer_types"),
        ("gemma2", {"attn_logit_softcapping": None}, "does not say 'attn_logit_softcapping'"),
        ("gemma2", {"final_logit_softcapping": None}, "does not say 'final_logit_softcapping'"),
        ("mistral", {"sliding_window": None}, "does not say 'sliding_window'"),
        ("gemma2", {"use_bidirectional_attention": True}, "only computes causal attention"),
        ("llama", {"rope_parameters": None}, "no rope_theta"),
        ("llama", {"num_key_value_heads": 3}, "8 heads, not a multiple of its 3"),
        ("llama", {"rms_norm_eps": None}, "has no 'rms_norm_eps'"),
        ("pangu", {"bias": None}, "has no 'bias'"),
        ("qwen3", {"layer_types": [FULL, SLIDING]}, "sets no sliding_window"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3", {"layer_types": [FULL]}, "1 layer_types for 3 layers"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
    ],
)
def test_a_key_that_changes_the_mathematics_is_never_ignored(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_architecture(edited(family, tmp_path, **changes))


@pytest.mark.parametrize(
    ("family", "older"),
    [
        ("llama", {"rope_parameters": None, "rope_theta": 500000.0, "rope_scaling": None}),
        ("gemma3", {"rope_parameters": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4}),
        (
            "llama3",  # as the published files say it
            {
                "rope_parameters": None,
                "rope_theta": 1e4,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 128,
                },
            },
        ),
        (
            "qwen2-yarn",
            {
                "rope_parameters": None,
                "rope_theta": 1e4,
                "rope_scaling": {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64},
            },
        ),
        ("qwen2-yarn", {"layer_types": None}),
        ("gemma2", {"layer_types": None}),
        ("phi3", {"rope_parameters": None, "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("pangu", {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 16e6}}),
    ],
)
def test_older_and_newer_spellings_mean_the_same(tmp_path: Path, family: str, older: dict[str, Any]) -> None:
    assert read_architecture(edited(family, tmp_path, **older)) == read_architecture(folder(family))


def test_published_openpangu_configurations_are_understood() -> None:
    large, small = (read_architecture(folder(f"openpangu-embedded-{size}")) for size in ("7b", "1b"))
    for architecture, kv_heads, tied, theta in ((large, 8, False, 16e6), (small, 6, True, 4e6)):
        attention = architecture.layers[0].attention
        assert isinstance(attention, Attention)
        assert (attention.head_dim, attention.kv_heads, architecture.tied) == (128, kv_heads, tied)
        assert attention.rotary == Rotary(theta, 128)
        assert attention.biases == ("q", "k", "v", "o")
        assert isinstance(architecture.layers[0].feed_forward, GatedMlp)
        assert not architecture.layers[0].feed_forward.bias


def test_optional_features_agree_with_transformers(tmp_path: Path) -> None:
    """What no fixture switches on: windows and biases in Qwen3, biases in Llama's MLP, Gemma's final soft-capping,
    positions that are scaled linearly, options of YaRN, a Mistral without a window."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    changes: list[tuple[str, dict[str, Any]]] = [
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": [SLIDING, FULL],
                "attention_bias": True,
            },
        ),
        ("llama", {"mlp_bias": True, "attention_bias": True, "rope_parameters": linear}),
        ("llama", {"rope_parameters": yarn | {"truncate": False, "beta_fast": 8.0, "attention_factor": 0.9}}),
        ("gemma3", {"final_logit_softcapping": 3.0, "attention_bias": True}),
        ("gemma3", {"rope_parameters": {FULL: linear, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}}),
        ("gemma2", {"nulls": ("attn_logit_softcapping", "final_logit_softcapping"), "rope_parameters": linear}),
        ("mistral", {"nulls": ("sliding_window",), "rope_parameters": yarn}),
        ("olmo2", {"attention_bias": True, "rope_parameters": yarn}),
    ]
    for family, change in changes:
        model_folder = edited(family, tmp_path, **change)
        architecture = read_architecture(model_folder)
        generator = torch.Generator().manual_seed(0)
        weights = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2
            for name, shape in parameter_shapes(architecture).items()
        }
        save_file(weights, model_folder / "model.safetensors", metadata={"format": "pt"})
        with exact_tier(), torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64, attn_implementation="eager")
            found = model(input_ids=TOKENS[None], use_cache=False).logits[0]
        expected = forward(TOKENS, weights, architecture, POLICIES["float64"])
        assert (found - expected).norm() < 1e-13 * expected.norm(), family


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_their_gradients_agree_with_transformers(tmp_path: Path, family: str) -> None:
    critic = value_model(family, tmp_path)
    architecture = read_architecture(critic)
    weights = {n: w.requires_grad_() for n, w in load_weights(critic, architecture, torch.float64).items()}
    expected = forward(TOKENS, weights, architecture, POLICIES["float64"])
    expected.square().mean().backward()
    with exact_tier():
        model = load_model(critic, dtype=torch.float64, attention="eager", head="value")
        found = model(input_ids=TOKENS[None], use_cache=False).logits[0]
        found.square().mean().backward()
    assert expected.shape == found.shape == (40, 1)
    assert expected.std() > 0.1
    assert (found - expected).norm() < 1e-13 * expected.norm()
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert theirs.keys() == weights.keys()
    for name, weight in weights.items():
        assert weight.grad is not None
        assert (theirs[name] - weight.grad).norm() < 1e-13 * weight.grad.norm(), name


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])  # pangu's own code has no such class
def test_a_value_model_is_what_transformers_calls_sequence_classification(tmp_path: Path, family: str) -> None:
    """It classifies a sequence by the number at its last token."""
    critic = value_model(family, tmp_path)
    architecture = read_architecture(critic)
    values = forward(TOKENS, load_weights(critic, architecture, torch.float64), architecture, POLICIES["float64"])
    with exact_tier(), torch.no_grad():
        model, found = AutoModelForSequenceClassification.from_pretrained(
            critic, dtype=torch.float64, attn_implementation="eager", output_loading_info=True
        )
        label = model(input_ids=TOKENS[None], use_cache=False).logits
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (label[0] - values[-1]).abs() < 1e-13 * values.abs().max()


@pytest.mark.parametrize("changes", [{"num_labels": 2}, {"num_labels": 0}])
def test_a_value_model_has_one_label(tmp_path: Path, changes: dict[str, Any]) -> None:
    classifier = {"architectures": ["LlamaForSequenceClassification"], **changes}
    with pytest.raises(ValueError, match=f"num_labels={changes['num_labels']}.*only computes num_labels=1"):
        read_architecture(edited("llama", tmp_path, **classifier))


def test_labels_mean_nothing_to_a_language_model_and_are_not_ignored(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not know for this model: num_labels"):
        read_architecture(edited("llama", tmp_path, num_labels=1))


def test_final_soft_capping_is_for_logits_and_not_for_values(tmp_path: Path) -> None:
    names = ["Gemma3ForSequenceClassification"]
    capped = edited("gemma3", tmp_path, final_logit_softcapping=0.01, architectures=names, tie_word_embeddings=False)
    architecture = read_architecture(capped)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2
        for name, shape in parameter_shapes(architecture).items()
    }
    assert forward(TOKENS, weights, architecture, POLICIES["float64"]).abs().max() > 0.1


def test_weights_in_several_files_are_read_and_checked(tmp_path: Path) -> None:
    architecture = read_architecture(folder("llama"))
    tensors = load_file(folder("llama") / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / shard)
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    loaded = load_weights(tmp_path, architecture, torch.float64)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name].double()) for name in names)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (lambda t: t.update({"model.extra": torch.zeros(1)}), r"model\.extra is not expected"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"has shape \(3,\) instead of \(64,\)"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(
    tmp_path: Path, damage: Callable[[Weights], object], message: str
) -> None:
    tensors = load_file(folder("llama") / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_weights(tmp_path, read_architecture(folder("llama")), torch.float64)
