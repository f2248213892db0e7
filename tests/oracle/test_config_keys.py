"""A key of a configuration that nobody reads is judged by its meaning: inert, not judged, or refused with advice."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_oracle import folder
from test_oracle_models import edited

from conformance.core.errors import UsageError
from conformance.models.families import has_routers, read_architecture
from conformance.oracle.role_model import read_decoder

INERT: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {"use_mrope": False}),
    ("phi3", {"attention_bias": False, "use_qk_norm": False}),
    ("llama", {"logits_multiplier": None, "num_extra_layers": 0, "stages": [], "extra": {"a": None, "b": {}}}),
    ("gemma2", {"hidden_act": "gelu_pytorch_tanh"}),
    ("qwen3-moe", {"n_routed_experts": 8, "moe_topk": 2}),
    ("gpt-oss", {"experts_per_token": 2}),
    ("llama", {"is_causal": True, "use_rope": True, "rotary_emb": True}),
    ("llama", {"chunk_size_feed_forward": 0, "return_dict": True, "is_decoder": False}),
    ("llama", {"temperature": 0.6, "top_k": 20, "do_sample": True}),
    ("llama", {"num_nextn_predict_layers": 0, "aux_loss_alpha": 0.0, "quantization_config": {}, "resid_pdrop": 0}),
    ("llama", {"id2label": {"0": "A"}, "embedding_init_std": 0.1, "_attn_implementation_autoset": True}),
    ("llama", {"classifier_dropout": None, "unsloth_version": "2026.1", "transformers.js_config": {"dtype": "q4"}}),
    ("gpt-oss", {"swiglu_beta": 0}),
    ("llama", {"embedding_multiplier": 1.0, "interpolate_factor": 1, "logits_scaling": 1}),
]


@pytest.mark.parametrize(("family", "keys"), INERT)
def test_inert_keys_change_nothing(tmp_path: Path, family: str, keys: dict[str, Any]) -> None:
    file = edited(family, tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    assert read_architecture(tmp_path) == read_architecture(folder(family))


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("llama", {"use_mrope": True}, "does not know for this model: use_mrope=True; any of them"),
        ("llama", {"use_mrope": True}, "add --assume-inert KEY, and the verdict will name it"),
        ("llama", {"use_rope": False}, "use_rope=False"),
        ("llama", {"is_causal": False}, "is_causal=False"),
        ("llama", {"residual_multiplier": 0}, "residual_multiplier=0"),
        ("llama", {"attention_multiplier": 1.0}, "attention_multiplier=1.0"),
        ("mixtral", {"norm_topk_prob": False}, "only computes norm_topk_prob=True"),
        ("gemma2", {"hidden_act": "silu"}, "sets hidden_act='silu', but it is another name of hidden_activation"),
        ("qwen3-moe", {"num_local_experts": 7}, "num_local_experts=7, but it is another name of num_experts"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantized weights cannot be trained; convert"),
        ("llama", {"resid_pdrop": 0.1}, "dropout is random, so each backend drops other values: set resid_pdrop"),
        ("llama", {"layerdrop": 0.1}, "set layerdrop to 0.0"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1]}}, r"mrope_section=\[1\]"),
        ("pangu", {"attention_window": 0}, "attention_window=0"),
        ("llama", {"text_config": 0}, "text_config=0"),
        ("llama", {"decoder": True}, "decoder=True"),
    ],
)
def test_other_keys_are_refused(tmp_path: Path, family: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_architecture(edited(family, tmp_path, **keys), disable_dropout=False)


@pytest.mark.parametrize(
    ("family", "keys", "remark"),
    [
        ("llama", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1 (multi-token prediction)"),
        ("qwen3", {"use_mtp": True}, "use_mtp=True (multi-token prediction)"),
        ("qwen3-moe", {"expert_bias_update_rate": 0.1}, "expert_bias_update_rate=0.1 (balancing of experts)"),
        ("deepseek-v3", {}, "updates of the routers' correction bias from the load of experts"),
    ],
)
def test_training_that_nothing_computes_is_named(
    tmp_path: Path, family: str, keys: dict[str, Any], remark: str
) -> None:
    assert remark in read_architecture(edited(family, tmp_path, **keys)).not_judged


def test_an_unknown_key_can_be_assumed_to_be_inert(tmp_path: Path) -> None:
    model = edited("llama", tmp_path, use_magic=3)
    decoder = read_decoder(model, assume_inert=("use_magic",))
    assert decoder.not_judged == ("use_magic=3 (assumed to be inert by --assume-inert)",)
    assert not has_routers(model)
    with pytest.raises(UsageError, match="hidden_act, which the oracle reads; leave out --assume-inert hidden_act"):
        read_decoder(model, assume_inert=("use_magic", "hidden_act"))
    with pytest.raises(UsageError, match="dropout is random"):
        read_decoder(edited("llama", tmp_path, resid_pdrop=0.1), assume_inert=("resid_pdrop",))
