"""Decides by its meaning what a key of a ``config.json`` does that the reference does not read.

A key is inert if its value switches a feature off, repeats another key or equals the default of transformers' class. A
key that changes the training, such as multi-token prediction, is named in the verdict as not judged. Quantized weights,
dropout and keys of unknown meaning are refused.
"""

import contextlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from conformance.core.errors import shown

# Keys that describe a folder, its tokenizer, kernels, or how ranks share the work, and values that weights replace.
INERT = re.compile(
    r"_?name_or_path|architectures|auto_map|model_type|(torch_)?dtype|.*_?version|tokenizer_class|model_name|ep_size|"
    r"(model_)?max_position_embeddings|model_max_length|max_sequence_length|seq_length|.*_token_ids?|id2label|label2id|"
    r".*attn_impl(ementation)?.*|.*flash_att.*|use_sdpa|use_cache|(.*_)?initializer(_.*)?|(.*_)?init(_.*)?|unsloth_.*|transformers\..*"
)
RANDOM = re.compile(r"dropout|pdrop|layer_?drop|drop_(path|rate|prob)|_drop$|jitter")
OF_CLASSIFIERS = re.compile(r"(classifier|summary)_")  # starts of names that only classification heads read
QUANTIZED = re.compile(r"^_?quantiz(e|ed|ation)(_config)?$|^quant_(config|method)$|^compression_config$")
QUANTIZED_ADVICE = (
    "quantized weights cannot be trained; convert them to bfloat16 (with dequantize=True of transformers' "
    "FineGrainedFP8Config or Mxfp4Config, for example), save the model, and remove the key"
)
# Features of trainings that neither the oracle nor transformers computes. Verdicts mention them.
NOT_JUDGED = {
    "multi-token prediction": re.compile(r"nextn|multi_token|(^|_)mtp(_|$)"),
    "balancing of experts": re.compile(r"aux_(loss|free)|seq_aux|balanc|bias_update|z_loss|capacity"),
}
# Features of every decoder that the oracle computes: true says so, false contradicts it.
COMPUTED = re.compile(
    r"(use_|apply_|is_|has_)?(rope|rotary(_pos)?(_emb(eddings?)?)?|causal(_(mask|attention))?|decoder|gated(_mlp)?|glu)|"
    r"scale_attn(_weights)?"
)
# 0 switches off a number of parts. It does not switch off a factor, for which 1 is neutral, or a size.
FACTORS = re.compile(r"scal|multiplier|factor|ratio|percent|pct|temperature|theta|base|eps|alpha|size|dim|window")
# Factors for which 1 is neutral. A factor of attention scores is not among them: it replaces 1 / sqrt(head_dim).
NEUTRAL_AT_1 = re.compile(
    r"(embedding|residual|logits?|lm_head|interpolat\w*|mup|width|rope)s?_(multiplier|scal\w*|factor)"
)
PARTS = {"decoder", "generator", "text_config", "text_encoder"}  # transformers takes the model's configuration there
ALIASES = (
    {"hidden_act", "hidden_activation", "activation_function"},
    {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"},
    {"num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_k", "moe_topk"},
    {"num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num"},
    {"num_hidden_layers", "num_layers", "n_layers", "n_layer"},
    {"num_attention_heads", "n_heads", "n_head"},
    {"hidden_size", "n_embd", "d_model"},
    {"intermediate_size", "ffn_hidden_size"},
    {"head_dim", "kv_channels", "attention_head_dim"},
    {"rms_norm_eps", "norm_eps", "layer_norm_eps", "layernorm_epsilon"},
)

Kind = Literal["inert", "not judged", "random", "quantized", "contradicts", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """Holds what a key does. why: for verdicts and messages, without the key and its value."""

    kind: Kind
    why: str = ""


_INERT = Meaning(kind="inert")


def meaning_of(key: str, values: Mapping[str, Any], *, read: Collection[str]) -> Meaning:
    """Returns what a ``key`` of the configuration ``values`` does that the reference does not read.

    ``read``: the keys that it reads.
    """
    value = values[key]
    if key in PARTS and value is not None:
        return Meaning(kind="unknown", why="transformers takes it for the configuration of a part of the model")
    if found := changes_training(key, value):
        return found
    if INERT.fullmatch(key) or (COMPUTED.fullmatch(key) and value is True) or key in _of_generation():
        return _INERT
    kind = values.get("model_type")
    for other in sorted(_aliases(key, kind)):
        if other in read and values.get(other) is not None and value is not None:
            if values[other] == value:
                return _INERT
            return Meaning(kind="contradicts", why=f"it is another name of {other}, which is {shown(values[other])}")
    if NEUTRAL_AT_1.fullmatch(key) and type(value) in (int, float) and value == 1:
        return _INERT
    declared = declared_by_class(kind)
    if value is None or (key in declared and value == declared[key]):
        return _INERT
    off = is_off(value) and not COMPUTED.fullmatch(key) and not (_is_zero(value) and FACTORS.search(key))
    if off and is_off(declared.get(key)):
        return _INERT
    return Meaning(kind="unknown", why=f"transformers' default is {shown(declared[key])}" if key in declared else "")


def changes_training(key: str, value: Any) -> Meaning | None:
    """Returns what a key does to a training, by its name; None if the name says nothing."""
    feature = next((name for name, pattern in NOT_JUDGED.items() if pattern.search(key)), "")
    is_random = RANDOM.search(key) and not OF_CLASSIFIERS.match(key)
    quantized = QUANTIZED.search(key)
    if not (feature or is_random or quantized):
        return None
    if is_off(value):
        return _INERT
    if quantized:
        return Meaning(kind="quantized")
    return Meaning(kind="random") if is_random else Meaning(kind="not judged", why=feature)


def is_off(value: Any) -> bool:
    """Tells whether a value switches a feature off: null, false, 0, or empty at all depths."""
    if isinstance(value, Mapping):
        return all(map(is_off, value.values()))
    return value is None or value is False or value == "" or value == [] or _is_zero(value)


def _is_zero(value: Any) -> bool:
    return type(value) in (int, float) and value == 0


# transformers is imported only for a key that is read nowhere, because the import takes seconds.


def _aliases(key: str, model_type: object) -> set[str]:
    """Returns the other names of a key: those of transformers' class of the model, and those of ALIASES."""
    of_class = map(set, getattr(config_class(model_type), "attribute_map", {}).items())
    return {name for group in (*ALIASES, *of_class) if key in group for name in group} - {key}


@cache
def declared_by_class(model_type: object) -> Mapping[str, Any]:
    """Returns the defaults of transformers' configuration class for ``model_type``, or of its base class.

    ``is_decoder`` is added, which files of older transformers have.
    """
    from transformers import PretrainedConfig

    found = config_class(model_type) or PretrainedConfig
    with contextlib.suppress(Exception):  # a few classes refuse their own defaults
        return {"is_decoder": False, **found().to_dict()}
    return {}


def known_keys(model_type: object) -> Collection[str]:
    """Returns the keys that transformers' configuration class for ``model_type`` knows; empty without a class."""
    found = config_class(model_type)
    return () if found is None else {*declared_by_class(model_type), *found.attribute_map, "rope_theta", "rope_scaling"}


@cache
def _of_generation() -> Collection[str]:
    from transformers import GenerationConfig

    return frozenset(GenerationConfig().to_dict())


def config_class(model_type: object) -> Any:
    """Returns transformers' configuration class for ``model_type``; None if it has none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type] if isinstance(model_type, str) and model_type in CONFIG_MAPPING else None
