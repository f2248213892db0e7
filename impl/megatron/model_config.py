"""Reads the shape of a model from its Hugging Face configuration, and distributes its layers over pipeline stages.

A *chunk* is a part of the model that one rank runs without a send in between; each rank has ``vpp`` chunks. Chunk c of
rank r is number ``c * pp + r`` of the model (interleaved schedule, arXiv 2104.04473 section 2.2). If the layers do not
divide evenly, embedding and head count as a layer each, and may even have a chunk for themselves.

This module does not import Megatron.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from conformance.core.errors import UsageError
from conformance.core.io import read_json
from conformance.spec.conventions import BLOCK
from conformance.spec.layout import Layout
from conformance.spec.observables import Head
from impl.megatron.moe_config import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GPT_OSS,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    Keys,
    Mixture,
    mixture_of,
)


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Assigns layers to chunks.

    ``chunks[i]``: the layers of chunk i; the first chunk also has the embedding, the last the head.
    """

    pp: int
    vpp: int
    chunks: tuple[range, ...]

    def owner(self, layer: int) -> tuple[int, int]:
        """Returns pipeline rank and chunk number of a layer; modules for multi-token prediction follow the last one."""
        index = next((i for i, chunk in enumerate(self.chunks) if layer in chunk), len(self.chunks) - 1)
        return index % self.pp, index // self.pp

    @property
    def layout(self) -> list[list[str]]:
        """Returns the chunks as megatron-core's ``pipeline_model_parallel_layout``."""
        names = [["decoder"] * len(chunk) for chunk in self.chunks]
        names[0].insert(0, "embedding")
        names[-1].append("loss")
        return names


def stages(*, layers: int, pp: int, vpp: int) -> Stages:
    """Distributes layers over pp x vpp chunks: evenly if they divide; else embedding and head count as a layer each."""
    count = pp * vpp
    if layers % count == 0:
        sizes = [layers // count] * count
    else:
        assert layers + 2 >= count, "Layout.validate rejects more chunks"
        each, more = divmod(layers + 2, count)
        sizes = [each + (1 <= position <= more) for position in range(count)]  # remaining layers go to the middle
        sizes[0] -= 1
        sizes[-1] -= 1
    starts = [sum(sizes[:i]) for i in range(count)]
    return Stages(pp=pp, vpp=vpp, chunks=tuple(range(s, s + n) for s, n in zip(starts, sizes, strict=True)))


EPS = 1e-6  # for the norms of latent vectors; transformers ignores rms_norm_eps there


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """Holds the numbers of YaRN's scaled positions (arXiv 2309.00071).

    size: factor of sines and cosines. all_dims: DeepSeek's ``mscale_all_dim``, from which a factor of the scores
    follows. truncate: whether the bounds of the ramp over frequencies are rounded to integers.
    """

    factor: float
    size: float
    all_dims: float
    beta_fast: float
    beta_slow: float
    original_positions: int
    truncate: bool


class Module(NamedTuple):
    """Describes a module of latent attention before the scores.

    name: in Hugging Face. size: shape of the weight. cut: whether tensor parallelism shards its rows.
    """

    name: str
    size: tuple[int, ...]
    cut: bool = False


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Holds the sizes of latent attention (arXiv 2405.04434, section 2.1).

    q_rank, kv_rank: widths of the latent vectors; q_rank is None if queries have none. plain, turned: widths of a
    query head without and with rotary positions. value: width of a value head. neighbours: rotary positions turn
    adjacent pairs, not the two halves. yarn: None without scaling.
    """

    q_rank: int | None
    kv_rank: int
    plain: int
    turned: int
    value: int
    neighbours: bool
    yarn: Yarn | None

    def modules(self, *, hidden: int, heads: int) -> dict[str, Module]:
        """Maps megatron-core's names to the modules."""
        queries = heads * (self.plain + self.turned)
        if self.q_rank is None:
            found = {"linear_q_proj": Module("q_proj", (queries, hidden), cut=True)}
        else:
            found = {
                "linear_q_down_proj": Module("q_a_proj", (self.q_rank, hidden)),
                "q_layernorm": Module("q_a_layernorm", (self.q_rank,)),
                "linear_q_up_proj": Module("q_b_proj", (queries, self.q_rank), cut=True),
            }
        return {
            **found,
            "linear_kv_down_proj": Module("kv_a_proj_with_mqa", (self.kv_rank + self.turned, hidden)),
            "kv_layernorm": Module("kv_a_layernorm", (self.kv_rank,)),
            "linear_kv_up_proj": Module("kv_b_proj", (heads * (self.plain + self.value), self.kv_rank), cut=True),
        }


def latent_of(config: dict[str, Any], rope: Mapping[str, Any], *, scaled: bool) -> Latent:
    """Reads latent attention from a configuration. ``rope``: see ``_rope``. Raises KeyError for a missing key."""
    return Latent(
        q_rank=config["q_lora_rank"],
        kv_rank=config["kv_lora_rank"],
        plain=config["qk_nope_head_dim"],
        turned=config["qk_rope_head_dim"],
        value=config["v_head_dim"],
        neighbours=bool(config.get("rope_interleave", True)),
        yarn=_latent_yarn(rope) if scaled else None,
    )


def _latent_yarn(rope: Mapping[str, Any]) -> Yarn:
    factor, own, all_dims = rope["factor"], rope.get("mscale"), rope.get("mscale_all_dim") or 0.0
    size = _magnitude(factor, own) / _magnitude(factor, all_dims) if own and all_dims else _magnitude(factor, 1.0)
    return Yarn(
        factor=float(factor),
        size=float(rope.get("attention_factor") or size),
        all_dims=float(all_dims),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        original_positions=rope["original_max_position_embeddings"],
        truncate=bool(rope.get("truncate", True)),
    )


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


class Family(NamedTuple):
    """Describes a family of models with RMSNorm before attention and before a SwiGLU MLP, rotary positions and GQA.

    bias: the configuration's key for biases on q, k, v and o, and its default; or which projections have one (q, k and
    v: unless ``qkv_bias`` is false). The MLP has none. qk_norm: q and k are normalised per head. windows: which layers
    have a sliding window. sinks: attention has a learned score per head, without a value. fused: Hugging Face fuses q,
    k and v, and gate and up. partial: rotary positions may cover a part of each head. mixture: the configuration's keys
    for experts. latent: attention is DeepSeek's; the projections to latent vectors have the biases of q, k and v.
    """

    bias: tuple[str, bool] | Literal["none", "qkv"]
    qk_norm: bool = False
    windows: Literal["none", "every layer", "every second layer", "switched on"] = "none"
    sinks: bool = False
    fused: bool = False
    partial: bool = False
    mixture: Keys | None = None
    latent: bool = False


FAMILIES = {
    "PanguEmbedded": Family(("bias", True)),
    "Llama": Family(("attention_bias", False)),
    "Mistral": Family("none", windows="every layer"),
    "Qwen2": Family("qkv", windows="switched on"),
    "GptOss": Family(("attention_bias", True), windows="every second layer", sinks=True, mixture=GPT_OSS),
    "Phi3": Family("none", windows="every layer", fused=True, partial=True),
    "Qwen3": Family(("attention_bias", False), qk_norm=True, windows="switched on"),
    "Mixtral": Family("none", windows="every layer", mixture=MIXTRAL),
    "Qwen2Moe": Family("qkv", windows="switched on", mixture=QWEN2_MOE),
    "Qwen3Moe": Family(("attention_bias", False), qk_norm=True, windows="switched on", mixture=QWEN3_MOE),
    "DeepseekV2": Family(("attention_bias", False), mixture=DEEPSEEK_V2, latent=True),
    "DeepseekV3": Family(("attention_bias", False), mixture=DEEPSEEK_V3, latent=True),
}
# Families with parts that megatron-core 0.16.1 lacks (source read; checked by
# tests/megatron_backend/test_megatron_lacks.py).
_AFTER = "norms of what attention and MLP give, before it is added"
_SCALED = "embeddings times the root of their width"
LACKING = {
    "Gemma2": ("soft-capped scores and logits", _AFTER, _SCALED),
    "Gemma3": ("positions of two bases", _AFTER, _SCALED),
    "Olmo2": ("norms of q and k over all heads", _AFTER),
}
HEADS: dict[str, Head] = {"ForCausalLM": "causal", "ForSequenceClassification": "value"}
ARCHITECTURES = {family + suffix: (family, head) for family in FAMILIES for suffix, head in HEADS.items()}
VOCABULARY_MULTIPLE = 128  # Megatron-LM's default: a rank's part of the vocabulary is a multiple of it
FLOAT8_MULTIPLE = 16  # of the sizes of matrices that TransformerEngine multiplies in float8, tokens among them


def float8_multiple(layout: Layout) -> int:
    """Returns the multiple of tokens to which a row, or with sequence parallelism a rank's part of it, is filled up."""
    if layout.float8 == "fp8block" and "seqpar" in layout.options:
        return BLOCK
    return FLOAT8_MULTIPLE if layout.float8 else 1


_SIZES = ("attention_factor", "mscale", "mscale_all_dim")  # keys that scale cos and sin under yarn
_DROPOUTS = ("embd_pdrop", "resid_pdrop")
VALUE_HEAD = "score.weight"  # (1, hidden), in place of the language head: transformers' name for a scalar head


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Holds the size of adapters, and the Hugging Face modules that have one."""

    rank: int
    scale: float
    targets: tuple[str, ...]

    def of_layer(self, layer: int) -> tuple[str, ...]:
        """Returns the names of a layer's projections that have an adapter, such as ``q_proj``."""
        prefix = f"model.layers.{layer}."
        return tuple(target.rpartition(".")[2] for target in self.targets if target.startswith(prefix))


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Holds the sizes and switches of a model.

    qkv_bias, output_bias: biases on q, k and v, and on o. windows: window per layer, None without. llama3: scaling of
    rotary frequencies, as arguments of megatron-core's own function; None without. yarn: YaRN's scaling, with the
    configuration's keys. head: logits over the vocabulary, or one value per token. padding_token: its embedding gets no
    gradient where the token is an input. fused, sinks: see Family. rotary_share: share of a head's numbers, from the
    first one on, that rotary positions turn. attention_dropout: probability; only 0 or switched-off dropout is
    supported. mixture: experts, None without. latent: latent attention, in which head_dim is the width of queries and
    keys; None for grouped queries. mtp: number of modules for multi-token prediction, which are numbered as layers
    behind the last one; 0 unless the objective trains them. adapters: LoRA, None without.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    rope_theta: float
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    tied: bool
    max_positions: int
    windows: tuple[int | None, ...] = ()
    llama3: Mapping[str, float] | None = None
    padding_token: int | None = None
    attention_dropout: float = 0.0
    fused: bool = False
    sinks: Literal[True] | None = None
    yarn: Mapping[str, float] | None = None
    rotary_share: float = 1.0
    head: Head = "causal"
    mixture: Mixture | None = None
    latent: Latent | None = None
    mtp: int = 0
    adapters: Adapters | None = None

    @property
    def attended(self) -> int:
        """Returns the width of o_proj's input."""
        return self.heads * (self.latent.value if self.latent else self.head_dim)

    def padded_vocab(self, tp: int) -> int:
        multiple = VOCABULARY_MULTIPLE * tp
        return -(-self.vocab // multiple) * multiple


def read_shape(folder: Path, *, multi_token: bool = False) -> ModelShape:
    """Reads the shape of the model in a Hugging Face folder. Raises UsageError for unsupported models.

    ``multi_token``: whether its modules for multi-token prediction are built.
    """
    config = read_json(folder / "config.json")
    name = next(iter(config.get("architectures") or ()), None)
    if parts := LACKING.get(str(name).partition("For")[0]):
        raise UsageError(f"{name} needs what megatron-core does not have: {', '.join(parts)}; use fsdp2 or deepspeed")
    if name not in ARCHITECTURES:
        raise UsageError(
            f"{name} is not among the architectures that are built here on megatron-core "
            f"({', '.join(FAMILIES)}); use fsdp2 or deepspeed, or add it (docs/guides/adding-a-model.md)"
        )
    family, head = ARCHITECTURES[name]
    several = head == "value" and config.get("num_labels", len(config.get("id2label") or ()) or 1) != 1
    known = ("default", "yarn") if FAMILIES[family].latent else ("default", "llama3", "yarn")
    unsupported = {
        f"rotary positions that are scaled otherwise than by {' or '.join(known[1:])}": _scaling(config) not in known,
        "quantized weights (save them with dequantize=True), which are": config.get("quantization_config"),
        "experts with biases beside attention without": name.startswith("GptOss")
        and not config.get("attention_bias", True),
        "a head with more than one value per token": several,
        "biases in the MLP": config.get("mlp_bias"),
        "dropout of embeddings and of blocks (embd_pdrop, resid_pdrop)": any(map(config.get, _DROPOUTS)),
        "an activation other than SiLU": config.get("hidden_act", "silu") != "silu",
    }
    if missing := [feature for feature, is_needed in unsupported.items() if is_needed]:
        raise UsageError(f"{' and '.join(missing)} not built in for megatron; use fsdp2 or deepspeed")
    try:
        shape = _shape(config, FAMILIES[family], head=head)
        return _with_modules(shape, config["num_nextn_predict_layers"]) if multi_token else shape
    except KeyError as error:
        raise UsageError(f"{folder}/config.json lacks the key {error.args[0]}; add it") from None


def _with_modules(shape: ModelShape, count: int) -> ModelShape:
    """Adds modules for multi-token prediction; each has a layer like the last one, and so experts if that one has."""
    mixture = shape.mixture
    if mixture and shape.layers - 1 in mixture.layers:
        further = range(shape.layers, shape.layers + count)
        mixture = replace(mixture, layers=(*mixture.layers, *further))
    return replace(shape, head="multi-token", mtp=count, mixture=mixture)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration's keys for rotary positions, in their newer or older spelling."""
    return {
        "rope_theta": config.get("rope_theta"),
        "partial_rotary_factor": config.get("partial_rotary_factor"),
        **(config.get("rope_scaling") or config.get("rope_parameters") or {}),
    }


def _scaling(config: dict[str, Any]) -> str:
    rope = _rope(config)
    return str(rope.get("rope_type", rope.get("type", "default")))


def _yarn(rope: dict[str, Any]) -> dict[str, float]:
    """Returns YaRN's numbers, with transformers' defaults for missing keys.

    Raises UsageError if a key sets another scale of cos and sin than the one that follows from the factor.
    """
    if own := [key for key in _SIZES if rope.get(key)]:
        raise UsageError(f"yarn with {', '.join(own)} is not built in for megatron; use fsdp2 or deepspeed")
    return {
        "factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32.0,
        "beta_slow": rope.get("beta_slow") or 1.0,
        "truncate": rope.get("truncate", True),
    }


def _windows(config: dict[str, Any], family: Family) -> tuple[int | None, ...]:
    count: int = config["num_hidden_layers"]
    if family.windows == "every layer":
        return (config["sliding_window"],) * count
    if family.windows == "every second layer":
        every_second = ["" if i % 2 else "sliding_attention" for i in range(count)]
        return _by_kind(config, config.get("layer_types") or every_second)
    if family.windows == "none" or not config.get("use_sliding_window"):
        return (None,) * count
    first = config.get("max_window_layers", 28)  # transformers' default
    return _by_kind(
        config, config.get("layer_types") or ["sliding_attention" if i >= first else "" for i in range(count)]
    )


def _by_kind(config: dict[str, Any], kinds: Sequence[str]) -> tuple[int | None, ...]:
    return tuple(config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds)


def _shape(config: dict[str, Any], family: Family, *, head: Head) -> ModelShape:
    heads, rope = config["num_attention_heads"], _rope(config)
    if rope["rope_theta"] is None:
        raise KeyError("rope_theta")
    bias = isinstance(family.bias, tuple) and bool(config.get(*family.bias))
    latent = latent_of(config, rope, scaled=_scaling(config) == "yarn") if family.latent else None
    llama3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return ModelShape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=(latent.plain + latent.turned if latent else config.get("head_dim") or config["hidden_size"] // heads),
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        eps=config["rms_norm_eps"],
        rope_theta=float(rope["rope_theta"]),
        qkv_bias=bias or (family.bias == "qkv" and bool(config.get("qkv_bias", True))),
        output_bias=bias,
        qk_norm=family.qk_norm,
        # A value head cannot be tied to the embedding.
        tied=bool(config.get("tie_word_embeddings")) and head == "causal",
        max_positions=config["max_position_embeddings"],
        windows=_windows(config, family),
        llama3={key: rope[key] for key in llama3} if _scaling(config) == "llama3" else None,
        padding_token=config.get("pad_token_id"),
        attention_dropout=float(config.get("attention_dropout") or 0.0),
        fused=family.fused,
        sinks=True if family.sinks else None,
        yarn=_yarn(rope) if _scaling(config) == "yarn" and not latent else None,
        rotary_share=float(rope["partial_rotary_factor"] or 1.0) if family.partial else 1.0,
        head=head,
        mixture=None if family.mixture is None else mixture_of(config, family.mixture),
        latent=latent,
    )
