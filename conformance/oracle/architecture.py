"""From a Hugging Face ``config.json`` to what a decoder computes: each family is a declaration of its parts.

Another family is a function that returns an Architecture, and a line in FAMILIES; docs/adding-a-model.md has the way.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance.oracle.config import Config
from conformance.oracle.parts import (
    POST,
    PRE,
    SANDWICH,
    Architecture,
    Attention,
    ClampedMlp,
    GatedMlp,
    Grouped,
    LatentAttention,
    Layer,
    MixtureOfExperts,
    Norm,
    Placement,
    Projection,
    Rotary,
    Yarn,
)
from conformance.oracle.position_config import FULL, SLIDING, rotary, rotary_by_kind
from conformance.reading import read_json
from conformance.validation import UsageError, shown

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
EVERY: tuple[Projection, ...] = ("q", "k", "v", "o")


def read_architecture(model: Path, *, disable_dropout: bool = False) -> Architecture:
    """What the model in the Hugging Face folder ``model`` computes, for an objective with this ``disable_dropout``.

    Raises UsageError for a file that cannot be read, an unknown model_type, a missing key, a size that is none, and any
    setting that is not implemented.
    """
    file = model / "config.json"
    try:
        values = read_json(file)
    except FileNotFoundError:
        raise UsageError(f"{model} holds no config.json; give the folder of a Hugging Face model") from None
    config = Config(values, str(file), disable_dropout=disable_dropout)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise config.error(
            f"has model_type {shown(kind)}; the oracle knows {', '.join(FAMILIES)} (docs/adding-a-model.md says how "
            f"one is added)"
        )
    architecture = FAMILIES[kind](config)
    config.finish()
    return architecture


def _llama(config: Config) -> Architecture:
    """Llama: arXiv 2302.13971 section 2.2; grouped-query attention: arXiv 2307.09288 appendix A.2."""
    config.must_be("pretraining_tp", 1)
    attention = _attention(config, biases=EVERY if config.flag("attention_bias", False) else ())
    return _decoder(config, attention, _mlp(config, bias=config.flag("mlp_bias", False)))


def _pangu(config: Config) -> Architecture:
    """openPangu-Embedded, arXiv 2505.22375: Llama with biases on q, k, v and o and none in the MLP."""
    config.demand("num_key_value_heads", "pad_token_id")
    attention = _attention(config, biases=EVERY if config.flag("bias") else (), rope_types=("default",))
    return _decoder(config, attention, _mlp(config))


def _mistral(config: Config) -> Architecture:
    """Mistral: arXiv 2310.06825 section 2: Llama with a sliding window in every layer, where the file sets one."""
    config.demand("num_key_value_heads", "sliding_window")
    attention = _attention(config, window=config.size("sliding_window", None))
    return _decoder(config, attention, _mlp(config))


def _qwen2(config: Config) -> Architecture:
    """Qwen2 and Qwen2.5: arXiv 2407.10671 section 2.2.1: Llama with biases on q, k and v; windows in later layers."""
    config.demand("num_key_value_heads")
    attention = _attention(config, biases=("q", "k", "v"))
    return _decoder(config, attention, _mlp(config), windows=_qwen_windows(config))


def _qwen3(config: Config) -> Architecture:
    """Qwen3: arXiv 2505.09388 section 2: no QKV bias, RMSNorm on each head of q and k."""
    config.demand("num_key_value_heads", "head_dim")
    biases = EVERY if config.flag("attention_bias", False) else ()
    attention = replace(_attention(config, biases=biases), qk_norm="head")
    return _decoder(config, attention, _mlp(config), windows=_qwen_windows(config))


def _mixtral(config: Config) -> Architecture:
    """Mixtral: arXiv 2401.04088 section 2.1: Mistral with a mixture of experts in every layer."""
    config.demand("num_key_value_heads", "num_local_experts", "num_experts_per_tok", "sliding_window")
    if config.take("router_jitter_noise", 0.0) != 0.0:
        raise config.error("sets router_jitter_noise, which is random; set it to 0.0")
    attention = _attention(config, window=config.size("sliding_window", None))
    moe = _mixture(config, "num_local_experts", _mlp(config), normalised=True)
    return replace(_decoder(config, attention, moe), router_loss=_router_loss(config))


def _qwen2_moe(config: Config) -> Architecture:
    """Qwen2-MoE: arXiv 2407.10671 section 2.2.2: routed experts and a shared one, which has a gate of its own."""
    config.demand("num_key_value_heads", "shared_expert_intermediate_size")
    config.must_be("use_sliding_window", False)
    config.take("sliding_window", None)  # which is not used without the switch
    config.take("max_window_layers", None)
    _windows(config, config.texts("layer_types", [FULL] * config.size("num_hidden_layers")), None)
    attention = _attention(config, biases=("q", "k", "v") if config.flag("qkv_bias", True) else ())
    shared = replace(_mlp(config), size=config.size("shared_expert_intermediate_size"))
    return _with_experts(config, attention, shared=shared)


def _qwen3_moe(config: Config) -> Architecture:
    """Qwen3-MoE: arXiv 2505.09388 section 2: Qwen3 with routed experts and no shared one."""
    config.demand("num_key_value_heads", "head_dim")
    config.must_be("use_sliding_window", False)
    config.take("sliding_window", None)  # which is not used without the switch
    config.take("max_window_layers", None)
    biases = EVERY if config.flag("attention_bias", False) else ()
    return _with_experts(config, replace(_attention(config, biases=biases), qk_norm="head"))


def _gpt_oss(config: Config) -> Architecture:
    """gpt-oss: arXiv 2508.10925 section 2: attention with sinks, every second layer with a window; all biases.

    Before 5.18, transformers has the two numbers of the experts' activation in its code.
    """
    if config.take("quantization_config", None) is not None:
        raise config.error(
            "has quantized experts (MXFP4), which nobody trains; save it with Mxfp4Config(dequantize=True)"
        )
    config.demand("num_key_value_heads", "head_dim", "sliding_window")
    config.demand("num_local_experts", "num_experts_per_tok")
    config.must_be("hidden_act", "silu")
    config.must_be("swiglu_alpha", 1.702)
    config.must_be("swiglu_limit", 7.0)
    config.take("experts_per_token", None)  # as published, beside the keys that are read
    config.take("initial_context_length", None)
    every_second = [FULL if i % 2 else SLIDING for i in range(config.size("num_hidden_layers"))]
    windows = _windows(config, config.texts("layer_types", every_second), config.size("sliding_window", None))
    attention = replace(_attention(config, biases=EVERY if config.flag("attention_bias", True) else ()), sinks=True)
    expert = ClampedMlp(size=config.size("intermediate_size"), alpha=1.702, limit=7.0)
    moe = replace(_mixture(config, "num_local_experts", expert, normalised=True), router="router", router_bias=True)
    norm = Norm(eps=_eps(config), rounds_last=True)
    whole = _decoder(config, attention, moe, windows=windows, norm=norm)
    return replace(whole, router_loss=_router_loss(config))


def _deepseek_v3(config: Config) -> Architecture:
    """DeepSeek-V3: arXiv 2412.19437 section 2.1: latent attention, and experts in groups beside shared ones.

    Its layers for multi-token prediction and its sequence-wise loss are not in transformers' code.
    """
    config.demand("first_k_dense_replace", "moe_intermediate_size", "n_routed_experts", "n_shared_experts")
    config.demand("n_group", "topk_group", "num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor")
    config.must_be("pretraining_tp", 1)
    config.must_be("output_router_logits", False)
    config.must_be("moe_layer_freq", 1)
    config.must_be("topk_method", "noaux_tc")
    config.must_be("scoring_func", "sigmoid")
    for key in ("ep_size", "aux_loss_alpha", "seq_aux", "num_nextn_predict_layers"):
        config.take(key, None)
    if config.take("quantization_config", None) is not None:
        raise config.error("has quantized weights; convert them to bfloat16, and take the key out")
    mlp = _mlp(config)
    expert = replace(mlp, size=config.size("moe_intermediate_size"))
    grouped = Grouped(groups=config.size("n_group"), chosen=config.size("topk_group"))
    moe = replace(
        _mixture(config, "n_routed_experts", expert, normalised=config.flag("norm_topk_prob")),
        grouped=grouped,
        factor=config.number("routed_scaling_factor"),
        shared=replace(expert, size=expert.size * config.size("n_shared_experts")),
        shared_gate=False,
    )
    size = moe.experts // grouped.groups
    if (
        moe.experts % grouped.groups
        or size < 2
        or moe.chosen > size * grouped.chosen
        or grouped.chosen > grouped.groups
    ):
        raise config.error(
            f"chooses {moe.chosen} of {moe.experts} experts in {grouped.chosen} of {grouped.groups} groups, which is "
            f"not possible; groups are of one size, and of two experts at least"
        )
    dense = config.size("first_k_dense_replace", least=0)
    whole = _decoder(config, _latent_attention(config), mlp)
    layers = (layer if n < dense else replace(layer, feed_forward=moe) for n, layer in enumerate(whole.layers))
    return replace(whole, layers=tuple(layers))


def _phi3(config: Config) -> Architecture:
    """Phi-3: arXiv 2404.14219 section 2: Llama with fused matrices, a window, and positions on a part of each head.

    Its code has the rope_type longrope besides, whose frequencies depend on the length of the input; it is refused.
    """
    config.demand("num_key_value_heads", "pad_token_id")
    config.check_dropout("embd_pdrop")
    config.check_dropout("resid_pdrop")
    config.take("original_max_position_embeddings", None)  # of longrope
    attention = _attention(config, window=config.size("sliding_window", None), rope_types=("default",), partial=True)
    return _decoder(config, replace(attention, fused=True), replace(_mlp(config), fused=True))


def _olmo2(config: Config) -> Architecture:
    """OLMo 2: arXiv 2501.00656 section 3.2: norms after attention and MLP, and of q and k over all heads together."""
    config.demand("num_key_value_heads", "pad_token_id")
    biases = EVERY if config.flag("attention_bias", False) else ()
    attention = replace(_attention(config, biases=biases), qk_norm="width")
    return _decoder(config, attention, _mlp(config), norm=Norm(eps=_eps(config), rounds_last=True), norms=POST)


def _gemma2(config: Config) -> Architecture:
    """Gemma 2: arXiv 2408.00118 section 2: two kinds of layers, soft-capping, norms before and after each block."""
    every_second = [FULL if i % 2 else SLIDING for i in range(config.size("num_hidden_layers"))]
    config.demand("num_key_value_heads", "head_dim", "pad_token_id")
    config.demand("attn_logit_softcapping", "final_logit_softcapping")
    if config.take("use_bidirectional_attention", None):
        raise config.error("sets use_bidirectional_attention; the oracle only computes causal attention")
    attention = replace(_gemma_attention(config), softcap=config.number("attn_logit_softcapping", None))
    kinds = config.texts("layer_types", every_second)
    windows = _windows(config, kinds, config.size("sliding_window"))
    return _gemma(config, [replace(attention, window=window) for window in windows])


def _gemma3(config: Config) -> Architecture:
    """Gemma 3 text: arXiv 2503.19786 section 2: each kind of layer has positions of its own.

    attn_logit_softcapping is refused: transformers' Gemma 3 has the key and never applies it.
    """
    config.demand("num_key_value_heads", "head_dim", "pad_token_id")
    config.must_be("use_bidirectional_attention", False)
    config.must_be("attn_logit_softcapping", None)
    every = config.size("_sliding_window_pattern", config.size("sliding_window_pattern", 6))
    count = config.size("num_hidden_layers")
    kinds = config.texts("layer_types", [FULL if (i + 1) % every == 0 else SLIDING for i in range(count)])
    older = {FULL: config.take("rope_theta", None), SLIDING: config.take("rope_local_base_freq", None)}
    ropes = rotary_by_kind(config, head_dim=_head_dim(config), older=older)
    attention = replace(_gemma_attention(config, ropes[FULL]), qk_norm="head")
    windows = _windows(config, kinds, config.size("sliding_window"))
    layers = zip(kinds, windows, strict=True)
    return _gemma(config, [replace(attention, rotary=ropes[kind], window=window) for kind, window in layers])


FAMILIES: dict[str, Callable[[Config], Architecture]] = {
    "llama": _llama,
    "PanguEmbedded": _pangu,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}

# What the declarations share


def _attention(
    config: Config,
    *,
    biases: tuple[Projection, ...] = (),
    window: int | None = None,
    rope_types: tuple[str, ...] | None = None,
    partial: bool = False,
) -> Attention:
    """Llama's attention, with 1 / sqrt(head_dim) before the softmax."""
    head_dim = _head_dim(config)
    types = {} if rope_types is None else {"types": rope_types}
    positions = rotary(config, head_dim=head_dim, partial=partial, **types)
    return _grouped(config, positions, scale=head_dim**-0.5, biases=biases, window=window)


def _latent_attention(config: Config) -> LatentAttention:
    """DeepSeek's; its norms of latent vectors have an epsilon of transformers' own, whatever rms_norm_eps is."""
    config.demand("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    config.check_dropout("attention_dropout")
    heads, turned, plain = (config.size(k) for k in ("num_attention_heads", "qk_rope_head_dim", "qk_nope_head_dim"))
    for key, right in {"num_key_value_heads": heads, "head_dim": turned, "qk_head_dim": turned + plain}.items():
        config.must_be(key, right)
    positions = rotary(config, head_dim=turned, types=("default", "yarn"))
    factor = positions.scaling.score_factor if isinstance(positions.scaling, Yarn) else 1.0
    return LatentAttention(
        heads=heads,
        q_rank=config.size("q_lora_rank", None),
        kv_rank=config.size("kv_lora_rank"),
        plain_dim=plain,
        value_dim=config.size("v_head_dim"),
        rotary=positions,
        scale=(plain + turned) ** -0.5 * factor,
        norm=Norm(eps=1e-6),
        interleaved=config.flag("rope_interleave", True),
        bias=config.flag("attention_bias", False),
    )


def _gemma_attention(config: Config, positions: Rotary | None = None) -> Attention:
    return _grouped(
        config,
        positions or rotary(config, head_dim=_head_dim(config)),
        scale=config.number("query_pre_attn_scalar") ** -0.5,
        biases=EVERY if config.flag("attention_bias", False) else (),
    )


def _grouped(
    config: Config,
    positions: Rotary,
    *,
    scale: float,
    biases: tuple[Projection, ...],
    window: int | None = None,
) -> Attention:
    config.check_dropout("attention_dropout")
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error(f"has {heads} heads, not a multiple of its {kv_heads} kv heads")
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(config),
        rotary=positions,
        scale=scale,
        window=window,
        biases=biases,
    )


def _mlp(config: Config, *, bias: bool = False) -> GatedMlp:
    return _gated(config, config.take("hidden_act"), bias=bias)


def _gated(config: Config, activation: Any, *, bias: bool = False) -> GatedMlp:
    if activation not in ACTIVATIONS:
        raise config.error(f"sets the activation {shown(activation)}; known are {', '.join(ACTIVATIONS)}")
    return GatedMlp(size=config.size("intermediate_size"), activation=activation, bias=bias)


def _with_experts(config: Config, attention: Attention, *, shared: GatedMlp | None = None) -> Architecture:
    """Qwen's choice of layers: every ``decoder_sparse_step``-th has experts, except those in ``mlp_only_layers``."""
    config.demand("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    mlp, step = _mlp(config), config.size("decoder_sparse_step", 1)
    dense = config.take("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(number) is int for number in dense):
        raise config.error(f"sets mlp_only_layers={shown(dense)}; it has to be a list of numbers of layers")
    expert = replace(mlp, size=config.size("moe_intermediate_size"))
    moe = _mixture(config, "num_experts", expert, normalised=config.flag("norm_topk_prob"), shared=shared)
    whole = _decoder(config, attention, mlp)
    layers = tuple(
        layer if number in dense or (number + 1) % step else replace(layer, feed_forward=moe)
        for number, layer in enumerate(whole.layers)
    )
    return replace(whole, layers=layers, router_loss=_router_loss(config))


def _mixture(
    config: Config, count: str, expert: GatedMlp | ClampedMlp, *, normalised: bool, shared: GatedMlp | None = None
) -> MixtureOfExperts:
    """``count``: the key of the number of experts."""
    experts, chosen = config.size(count), config.size("num_experts_per_tok")
    if chosen > experts:
        raise config.error(f"chooses {chosen} of {experts} experts; lower num_experts_per_tok")
    return MixtureOfExperts(experts=experts, chosen=chosen, expert=expert, normalised=normalised, shared=shared)


def _router_loss(config: Config) -> float:
    """What the load-balancing loss is multiplied by; 0 where ``output_router_logits`` does not switch it on."""
    factor = config.take("router_aux_loss_coef", None)
    if not config.flag("output_router_logits", False):
        return 0.0
    config.demand("router_aux_loss_coef")
    return float(config.positive(factor, "router_aux_loss_coef"))


def _gemma(config: Config, attentions: Sequence[Attention]) -> Architecture:
    """What all Gemmas share (arXiv 2403.08295 section 2): tied, scaled embeddings, norms with 1 + weight."""
    mlp = _gated(config, config.take("hidden_activation", "gelu_pytorch_tanh"))
    return Architecture(
        **_outside(config, tied=True),
        layers=tuple(Layer(attention=attention, feed_forward=mlp, norms=SANDWICH) for attention in attentions),
        norm=Norm(eps=_eps(config), plus_one=True, rounds_last=True),
        embedding_scale=config.size("hidden_size") ** 0.5,
        final_softcap=config.number("final_logit_softcapping", None),
    )


def _decoder(
    config: Config,
    attention: Attention | LatentAttention,
    mlp: GatedMlp | MixtureOfExperts,
    *,
    windows: Sequence[int | None] | None = None,
    norm: Norm | None = None,
    norms: Placement = PRE,
) -> Architecture:
    """Layers that differ at most in their ``windows``."""
    layers = [Layer(attention=attention, feed_forward=mlp, norms=norms)] * config.size("num_hidden_layers")
    if windows is not None:
        assert isinstance(attention, Attention)
        layers = [replace(layers[0], attention=replace(attention, window=window)) for window in windows]
    return Architecture(
        **_outside(config, tied=False),
        layers=tuple(layers),
        norm=norm or Norm(eps=_eps(config)),
    )


def _outside(config: Config, *, tied: bool) -> dict[str, Any]:
    """What is outside of the layers, which all families spell alike; ``tied`` is the family's default."""
    return {
        "vocab_size": config.size("vocab_size"),
        "hidden_size": config.size("hidden_size"),
        "tied": config.flag("tie_word_embeddings", tied),
        "padding_token": _padding_token(config),
        "value_head": _has_value_head(config),
    }


def _padding_token(config: Config) -> int | None:
    """A token of the vocabulary; as of torch's padding_idx, a negative one counts from its end."""
    token, size = config.take("pad_token_id", None), config.size("vocab_size")
    if token is not None and (type(token) is not int or not -size <= token < size):
        raise config.error(f"sets pad_token_id={shown(token)}, which is no token of a vocabulary of {size}")
    return token


def _has_value_head(config: Config) -> bool:
    """Whether the folder is a value model: sequence classification with one label, read at every token."""
    names = config.texts("architectures", [])
    if not any(name.endswith("ForSequenceClassification") for name in names):
        return False
    config.must_be("num_labels", 1)
    return True


def _head_dim(config: Config) -> int:
    return int(config.size("head_dim", config.size("hidden_size") // config.size("num_attention_heads")))


def _eps(config: Config) -> float:
    return float(config.number("rms_norm_eps"))


def _qwen_windows(config: Config) -> list[int | None]:
    """The window of each layer: where it is switched on and no layer_types are given, from max_window_layers on."""
    count = config.size("num_hidden_layers")
    windowed = config.flag("use_sliding_window", False)
    window = config.size("sliding_window", None) if windowed else None
    config.take("sliding_window", None)  # which is not used without the switch
    first = config.size("max_window_layers", 28, least=0)  # transformers' default
    kinds = config.texts("layer_types", [SLIDING if windowed and i >= first else FULL for i in range(count)])
    return _windows(config, kinds, window)


def _windows(config: Config, kinds: list[str], window: int | None) -> list[int | None]:
    """The window of each layer, by transformers' ``layer_types``."""
    if len(kinds) != (count := config.size("num_hidden_layers")):
        raise config.error(f"has {len(kinds)} layer_types for {count} layers")
    if unknown := set(kinds) - {FULL, SLIDING}:
        raise config.error(f"has layer_types {sorted(unknown)}; the oracle knows {FULL}, {SLIDING}")
    if SLIDING in kinds and window is None:
        raise config.error("has sliding_attention layers but sets no sliding_window; set it, or use full_attention")
    return [window if kind == SLIDING else None for kind in kinds]
