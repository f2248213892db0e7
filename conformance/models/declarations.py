"""Declares parts of architectures from the configuration keys that most families share."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from conformance.core.errors import shown
from conformance.models.components import (
    PRE,
    SANDWICH,
    Architecture,
    Attention,
    ClampedMlp,
    GatedDeltaNet,
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
from conformance.models.hf_config import FULL, SLIDING, Config, rotary

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
EVERY: tuple[Projection, ...] = ("q", "k", "v", "o")


def attention_of(
    config: Config,
    *,
    biases: tuple[Projection, ...] = (),
    window: int | None = None,
    rope_types: tuple[str, ...] | None = None,
    partial: float | None = None,
) -> Attention:
    """Declares Llama's attention, with scores times 1 / sqrt(head_dim)."""
    head_dim = head_dim_of(config)
    types = {} if rope_types is None else {"types": rope_types}
    positions = rotary(config, head_dim=head_dim, partial=partial, **types)
    return _grouped(config, positions, scale=head_dim**-0.5, biases=biases, window=window)


def latent_attention_of(config: Config) -> LatentAttention:
    """Declares DeepSeek's attention; transformers' epsilon of its latent norms does not depend on rms_norm_eps."""
    config.demand("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    config.check_dropout("attention_dropout")
    heads, rotated, plain = (config.size(k) for k in ("num_attention_heads", "qk_rope_head_dim", "qk_nope_head_dim"))
    for key, right in {"num_key_value_heads": heads, "head_dim": rotated, "qk_head_dim": rotated + plain}.items():
        config.must_be(key, right)
    positions = rotary(config, head_dim=rotated, types=("default", "yarn"))
    factor = positions.scaling.score_factor if isinstance(positions.scaling, Yarn) else 1.0
    return LatentAttention(
        heads=heads,
        q_rank=config.size("q_lora_rank", None),
        kv_rank=config.size("kv_lora_rank"),
        plain_dim=plain,
        value_dim=config.size("v_head_dim"),
        rotary=positions,
        scale=(plain + rotated) ** -0.5 * factor,
        norm=Norm(eps=1e-6),
        interleaved=config.flag("rope_interleave", True),
        bias=config.flag("attention_bias", False),
    )


def delta_net_of(config: Config) -> GatedDeltaNet:
    """Declares Qwen's linear attention."""
    heads, value_heads = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
    if value_heads % heads:
        raise config.error(f"has {value_heads} value heads, not a multiple of its {heads} key heads")
    return GatedDeltaNet(
        heads=heads,
        value_heads=value_heads,
        key_dim=config.size("linear_key_head_dim"),
        value_dim=config.size("linear_value_head_dim"),
        kernel=config.size("linear_conv_kernel_dim"),
        norm=Norm(eps=eps_of(config)),
    )


def gemma_attention_of(config: Config, positions: Rotary | None = None) -> Attention:
    return _grouped(
        config,
        positions or rotary(config, head_dim=head_dim_of(config)),
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
        head_dim=head_dim_of(config),
        rotary=positions,
        scale=scale,
        window=window,
        biases=biases,
    )


def mlp_of(config: Config, *, bias: bool = False) -> GatedMlp:
    return _gated(config, config.take("hidden_act"), bias=bias)


def _gated(config: Config, activation: Any, *, bias: bool = False) -> GatedMlp:
    if activation not in ACTIVATIONS:
        raise config.error(f"sets the activation {shown(activation)}; known are {', '.join(ACTIVATIONS)}")
    return GatedMlp(size=config.size("intermediate_size"), activation=activation, bias=bias)


def with_experts(config: Config, attention: Attention, *, shared: GatedMlp | None = None) -> Architecture:
    """Declares Qwen's layers: every ``decoder_sparse_step``-th has experts, except those in ``mlp_only_layers``."""
    config.demand("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    mlp, step = mlp_of(config), config.size("decoder_sparse_step", 1)
    dense = config.take("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(number) is int for number in dense):
        raise config.error(f"sets mlp_only_layers={shown(dense)}; it must be a list of layer numbers")
    expert = replace(mlp, size=config.size("moe_intermediate_size"))
    moe = mixture_of(config, "num_experts", expert, normalised=config.flag("norm_topk_prob"), shared=shared)
    whole = decoder_of(config, attention, mlp)
    layers = tuple(
        layer if number in dense or (number + 1) % step else replace(layer, feed_forward=moe)
        for number, layer in enumerate(whole.layers)
    )
    return replace(whole, layers=layers, router_loss=router_loss_of(config))


def mixture_of(
    config: Config, count: str, expert: GatedMlp | ClampedMlp, *, normalised: bool, shared: GatedMlp | None = None
) -> MixtureOfExperts:
    """Declares a mixture of experts. ``count``: the key of the number of experts."""
    experts, chosen = config.size(count), config.size("num_experts_per_tok")
    if chosen > experts:
        raise config.error(f"chooses {chosen} of {experts} experts; lower num_experts_per_tok")
    return MixtureOfExperts(experts=experts, chosen=chosen, expert=expert, normalised=normalised, shared=shared)


def deepseek_of(
    config: Config, *, normalised: bool, best: int = 0, corrected: bool = False, mlp_bias: bool = False
) -> Architecture:
    """Declares what DeepSeek-V2 and V3 share: latent attention, and after the first layers routed and shared experts.

    best: see Grouped; 0 for experts without groups.
    """
    config.demand("first_k_dense_replace", "moe_intermediate_size", "n_routed_experts", "n_shared_experts")
    config.demand("num_experts_per_tok", "routed_scaling_factor")
    config.must_be("pretraining_tp", 1)
    config.must_be("output_router_logits", False)
    config.must_be("moe_layer_freq", 1)
    mlp = mlp_of(config, bias=mlp_bias)
    expert = replace(mlp, size=config.size("moe_intermediate_size"), bias=False)
    moe = replace(
        mixture_of(config, "n_routed_experts", expert, normalised=normalised),
        router_stable=True,
        corrected=corrected,
        factor=config.number("routed_scaling_factor"),
        shared=replace(mlp, size=expert.size * config.size("n_shared_experts")),
        shared_gate=False,
    )
    if best:
        moe = replace(moe, grouped=_groups_of(config, moe, best))
    dense = config.size("first_k_dense_replace", least=0)
    whole = decoder_of(config, latent_attention_of(config), mlp)
    layers = (layer if n < dense else replace(layer, feed_forward=moe) for n, layer in enumerate(whole.layers))
    return replace(whole, layers=tuple(layers))


def with_mtp(config: Config, whole: Architecture, layers: int) -> Architecture:
    """Adds modules for multi-token prediction with the tensors of DeepSeek-V3, each with a layer like the last one.

    ``layers``: the number of modules that the objective trains.
    """
    count = config.size("num_nextn_predict_layers", 0, least=0)
    if config.model_type != "deepseek_v3" or whole.value_head:
        raise config.error("has no modules for multi-token prediction; the objective mtp needs those of deepseek_v3")
    if count != layers:
        raise config.error(
            f"has num_nextn_predict_layers={count}, and the objective mtp has mtp_num_layers={layers}; make them equal"
        )
    return replace(whole, mtp=whole.layers[-1:] * layers)


def _groups_of(config: Config, moe: MixtureOfExperts, best: int) -> Grouped:
    config.demand("n_group", "topk_group")
    grouped = Grouped(groups=config.size("n_group"), chosen=config.size("topk_group"), best=best)
    size, rest = divmod(moe.experts, grouped.groups)
    if rest or size < best or moe.chosen > size * grouped.chosen or grouped.chosen > grouped.groups:
        raise config.error(
            f"chooses {moe.chosen} of {moe.experts} experts in {grouped.chosen} of {grouped.groups} groups, which is "
            f"not possible; groups have equal sizes, and here at least {best} experts"
        )
    return grouped


def router_loss_of(config: Config) -> float:
    """Returns the factor of the load-balancing loss; 0 unless ``output_router_logits`` switches it on."""
    factor = config.take("router_aux_loss_coef", None)
    if not config.flag("output_router_logits", False):
        return 0.0
    config.demand("router_aux_loss_coef")
    return float(config.positive(factor, "router_aux_loss_coef"))


def gemma_of(config: Config, attentions: Sequence[Attention]) -> Architecture:
    """Declares what all Gemmas share (arXiv 2403.08295 section 2): tied, scaled embeddings, norms with 1 + weight."""
    mlp = _gated(config, config.take("hidden_activation", "gelu_pytorch_tanh"))
    return Architecture(
        **_outside(config, tied=True),
        layers=tuple(Layer(attention=attention, feed_forward=mlp, norms=SANDWICH) for attention in attentions),
        norm=Norm(eps=eps_of(config), plus_one=True, rounds_last=True),
        embedding_scale=config.size("hidden_size") ** 0.5,
        final_softcap=config.number("final_logit_softcapping", None),
    )


def decoder_of(
    config: Config,
    attention: Attention | LatentAttention,
    mlp: GatedMlp | MixtureOfExperts,
    *,
    windows: Sequence[int | None] | None = None,
    norm: Norm | None = None,
    norms: Placement = PRE,
) -> Architecture:
    """Declares a decoder whose layers differ at most in their ``windows``."""
    layers = [Layer(attention=attention, feed_forward=mlp, norms=norms)] * config.size("num_hidden_layers")
    if windows is not None:
        assert isinstance(attention, Attention)
        layers = [replace(layers[0], attention=replace(attention, window=window)) for window in windows]
    return Architecture(
        **_outside(config, tied=False),
        layers=tuple(layers),
        norm=norm or Norm(eps=eps_of(config)),
    )


def _outside(config: Config, *, tied: bool) -> dict[str, Any]:
    """Declares what is outside the layers, with the same keys in all families; ``tied`` is the family's default."""
    return {
        "vocab_size": config.size("vocab_size"),
        "hidden_size": config.size("hidden_size"),
        "tied": config.flag("tie_word_embeddings", tied),
        "padding_token": _padding_token(config),
        "value_head": _has_value_head(config),
    }


def _padding_token(config: Config) -> int | None:
    """Reads the padding token; a negative number counts from the end of the vocabulary, as torch's padding_idx does."""
    token, size = config.take("pad_token_id", None), config.size("vocab_size")
    if token is not None and (type(token) is not int or not -size <= token < size):
        raise config.error(f"sets pad_token_id={shown(token)}, which is not a token of a vocabulary of {size}")
    return token


def _has_value_head(config: Config) -> bool:
    """Tells whether the folder is a value model: sequence classification with one label, read at every token."""
    names = config.texts("architectures", [])
    if not any(name.endswith("ForSequenceClassification") for name in names):
        return False
    config.must_be("num_labels", 1)
    return True


def head_dim_of(config: Config) -> int:
    return int(config.size("head_dim", config.size("hidden_size") // config.size("num_attention_heads")))


def eps_of(config: Config) -> float:
    return float(config.number("rms_norm_eps"))


def qwen_windows(config: Config) -> list[int | None]:
    """Returns the window of each layer; without layer_types, layers from max_window_layers on have one if it is on."""
    count = config.size("num_hidden_layers")
    windowed = config.flag("use_sliding_window", False)
    window = config.size("sliding_window", None) if windowed else None
    config.take("sliding_window", None)  # unused without the switch
    first = config.size("max_window_layers", 28, least=0)  # transformers' default
    kinds = config.texts("layer_types", [SLIDING if windowed and i >= first else FULL for i in range(count)])
    return windows_of(config, kinds, window)


def windows_of(config: Config, kinds: list[str], window: int | None) -> list[int | None]:
    """Returns the window of each layer, by transformers' ``layer_types``."""
    if len(kinds) != (count := config.size("num_hidden_layers")):
        raise config.error(f"has {len(kinds)} layer_types for {count} layers")
    if unknown := set(kinds) - {FULL, SLIDING}:
        raise config.error(f"has layer_types {sorted(unknown)}; the oracle knows {FULL}, {SLIDING}")
    if SLIDING in kinds and window is None:
        raise config.error("has sliding_attention layers but sets no sliding_window; set it, or use full_attention")
    return [window if kind == SLIDING else None for kind in kinds]
