"""Translates a Hugging Face ``config.json`` to what a decoder computes, one function per family.

Another family is a function that returns an Architecture, and a line in FAMILIES (docs/guides/adding-a-model.md).
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from conformance.core.errors import UsageError, shown
from conformance.core.io import read_json
from conformance.models.components import POST, Architecture, ClampedMlp, Norm, Projection
from conformance.models.declarations import (
    EVERY,
    attention_of,
    decoder_of,
    deepseek_of,
    delta_net_of,
    eps_of,
    gemma_attention_of,
    gemma_of,
    head_dim_of,
    mixture_of,
    mlp_of,
    qwen_windows,
    router_loss_of,
    windows_of,
    with_experts,
    with_mtp,
)
from conformance.models.folder_checks import code_remarks
from conformance.models.hf_config import FULL, LINEAR, SLIDING, Config, rotary_by_kind


def read_architecture(
    model: Path, *, disable_dropout: bool = False, assume_inert: Collection[str] = (), mtp_layers: int = 0
) -> Architecture:
    """Returns what the model in the Hugging Face folder ``model`` computes, for an objective with ``disable_dropout``.

    ``assume_inert``: keys that the user says change nothing. ``mtp_layers``: the number of modules for multi-token
    prediction that the objective trains. Raises UsageError for an unreadable file, an unknown
    model_type, a missing key, an impossible size, and any setting that is not implemented.
    """
    config = _config(model, disable_dropout=disable_dropout, assume_inert=assume_inert)
    architecture = FAMILIES[config.model_type](config)
    if mtp_layers:
        architecture = with_mtp(config, architecture, mtp_layers)
    config.finish()
    remarks = (*config.not_judged, *code_remarks(model), *_updates_of_others(architecture))
    return replace(architecture, not_judged=remarks)


def numbers_read(model: Path) -> dict[str, int | float]:
    """Returns the sizes (int) and other numbers (float) that are read of a model's configuration. Raises UsageError."""
    config = _config(model, disable_dropout=True, assume_inert=())
    FAMILIES[config.model_type](config)
    return config.numbers


def has_routers(model: Path) -> bool:
    """Tells whether the model in a folder has a mixture of experts. Raises UsageError, but not for unknown keys."""
    config = _config(model, disable_dropout=True, assume_inert=())
    return bool(FAMILIES[config.model_type](config).routers)


def _config(model: Path, *, disable_dropout: bool, assume_inert: Collection[str]) -> Config:
    """Opens the configuration of a family that the oracle knows. Raises UsageError."""
    file = model / "config.json"
    try:
        values = read_json(file)
    except FileNotFoundError:
        raise UsageError(f"{model} holds no config.json; give the folder of a Hugging Face model") from None
    config = Config(values, str(file), disable_dropout=disable_dropout, assume_inert=assume_inert)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise config.error(
            f"has model_type {shown(kind)}; the oracle knows {', '.join(FAMILIES)} (to add one, see "
            f"docs/guides/adding-a-model.md)"
        )
    return config


UPDATES_OF_BIASES = "updates of the routers' correction bias from the load of experts"


def _updates_of_others(architecture: Architecture) -> tuple[str, ...]:
    """Names what trainings change outside of the optimizer, which nothing here does."""
    if not any(mixture.corrected for mixture in architecture.routers):
        return ()
    return (UPDATES_OF_BIASES,)


def _llama(config: Config) -> Architecture:
    """Llama: arXiv 2302.13971 section 2.2; grouped-query attention: arXiv 2307.09288 appendix A.2."""
    config.must_be("pretraining_tp", 1)
    attention = attention_of(config, biases=EVERY if config.flag("attention_bias", False) else ())
    return decoder_of(config, attention, mlp_of(config, bias=config.flag("mlp_bias", False)))


def _pangu(config: Config) -> Architecture:
    """openPangu-Embedded, arXiv 2505.22375: Llama with biases on q, k, v and o and none in the MLP."""
    config.demand("num_key_value_heads", "pad_token_id")
    attention = attention_of(config, biases=EVERY if config.flag("bias") else (), rope_types=("default",))
    return decoder_of(config, attention, mlp_of(config))


def _mistral(config: Config) -> Architecture:
    """Mistral: arXiv 2310.06825 section 2: Llama with a sliding window in every layer, where the file sets one."""
    config.demand("num_key_value_heads", "sliding_window")
    attention = attention_of(config, window=config.size("sliding_window", None))
    return decoder_of(config, attention, mlp_of(config))


def _qwen2(config: Config) -> Architecture:
    """Qwen2 and Qwen2.5: arXiv 2407.10671 section 2.2.1: Llama with biases on q, k and v; windows in later layers."""
    config.demand("num_key_value_heads")
    attention = attention_of(config, biases=("q", "k", "v"))
    return decoder_of(config, attention, mlp_of(config), windows=qwen_windows(config))


def _qwen3(config: Config) -> Architecture:
    """Qwen3: arXiv 2505.09388 section 2: no QKV bias, RMSNorm on each head of q and k."""
    config.demand("num_key_value_heads", "head_dim")
    biases = EVERY if config.flag("attention_bias", False) else ()
    attention = replace(attention_of(config, biases=biases), qk_norm="head")
    return decoder_of(config, attention, mlp_of(config), windows=qwen_windows(config))


def _mixtral(config: Config) -> Architecture:
    """Mixtral: arXiv 2401.04088 section 2.1: Mistral with a mixture of experts in every layer."""
    config.demand("num_key_value_heads", "num_local_experts", "num_experts_per_tok", "sliding_window")
    if config.take("router_jitter_noise", 0.0) != 0.0:
        raise config.error("sets router_jitter_noise, which is random; set it to 0.0")
    config.must_be("norm_topk_prob", True)
    attention = attention_of(config, window=config.size("sliding_window", None))
    moe = mixture_of(config, "num_local_experts", mlp_of(config), normalised=True)
    return replace(decoder_of(config, attention, moe), router_loss=router_loss_of(config))


def _qwen2_moe(config: Config) -> Architecture:
    """Qwen2-MoE: arXiv 2407.10671 section 2.2.2: routed experts and a shared one, which has a gate of its own."""
    config.demand("num_key_value_heads", "shared_expert_intermediate_size")
    config.must_be("use_sliding_window", False)
    config.take("sliding_window", None)  # unused without the switch
    config.take("max_window_layers", None)
    windows_of(config, config.texts("layer_types", [FULL] * config.size("num_hidden_layers")), None)
    attention = attention_of(config, biases=("q", "k", "v") if config.flag("qkv_bias", True) else ())
    shared = replace(mlp_of(config), size=config.size("shared_expert_intermediate_size"))
    return with_experts(config, attention, shared=shared)


def _qwen3_moe(config: Config) -> Architecture:
    """Qwen3-MoE: arXiv 2505.09388 section 2: Qwen3 with routed experts and no shared one."""
    config.demand("num_key_value_heads", "head_dim")
    config.must_be("use_sliding_window", False)
    config.take("sliding_window", None)  # unused without the switch
    config.take("max_window_layers", None)
    biases = EVERY if config.flag("attention_bias", False) else ()
    return with_experts(config, replace(attention_of(config, biases=biases), qk_norm="head"))


def _qwen3_next(config: Config) -> Architecture:
    """Qwen3-Next, its model card: Gated DeltaNet (arXiv 2412.06464), gated attention, experts as in Qwen2-MoE.

    Attention has output gates (arXiv 2505.06708) and positions on a part of each head; norms multiply by 1 + weight.
    """
    config.demand("num_key_value_heads", "head_dim", "shared_expert_intermediate_size", "hidden_act")
    config.demand("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    config.demand("linear_conv_kernel_dim")
    config.must_be("hidden_act", "silu")
    biases = EVERY if config.flag("attention_bias", False) else ()
    gated = replace(attention_of(config, biases=biases, partial=0.25), qk_norm="head", gated=True)
    whole = with_experts(
        config, gated, shared=replace(mlp_of(config), size=config.size("shared_expert_intermediate_size"))
    )
    every, count = config.size("full_attention_interval", 4), len(whole.layers)
    kinds = config.texts("layer_types", [LINEAR if (i + 1) % every else FULL for i in range(count)])
    if len(kinds) != count or {*kinds} - {LINEAR, FULL}:
        raise config.error(f"needs one of {LINEAR}, {FULL} in layer_types for each of its {count} layers")
    delta = delta_net_of(config)
    layers = (
        layer if kind == FULL else replace(layer, attention=delta)
        for layer, kind in zip(whole.layers, kinds, strict=True)
    )
    norm = Norm(eps=eps_of(config), plus_one=True, rounds_last=True)
    return replace(whole, layers=tuple(layers), norm=norm)


def _gpt_oss(config: Config) -> Architecture:
    """gpt-oss: arXiv 2508.10925 section 2: attention with sinks, a window in every second layer, biases everywhere.

    Before 5.18, transformers has the two constants of the experts' activation in its code.
    """
    config.demand("num_key_value_heads", "head_dim", "sliding_window")
    config.demand("num_local_experts", "num_experts_per_tok")
    config.must_be("hidden_act", "silu")
    config.must_be("norm_topk_prob", True)
    config.must_be("swiglu_alpha", 1.702)
    config.must_be("swiglu_limit", 7.0)
    config.take("initial_context_length", None)
    every_second = [FULL if i % 2 else SLIDING for i in range(config.size("num_hidden_layers"))]
    windows = windows_of(config, config.texts("layer_types", every_second), config.size("sliding_window", None))
    attention = replace(attention_of(config, biases=EVERY if config.flag("attention_bias", True) else ()), sinks=True)
    expert = ClampedMlp(size=config.size("intermediate_size"), alpha=1.702, limit=7.0)
    moe = replace(mixture_of(config, "num_local_experts", expert, normalised=True), router="router", router_bias=True)
    norm = Norm(eps=eps_of(config), rounds_last=True)
    whole = decoder_of(config, attention, moe, windows=windows, norm=norm)
    return replace(whole, router_loss=router_loss_of(config))


def _deepseek_v2(config: Config) -> Architecture:
    """DeepSeek-V2: arXiv 2405.04434 section 2: latent attention, routed experts (in groups or not), shared ones.

    transformers' code lacks its losses that balance experts, devices and communication.
    """
    config.demand("topk_method")
    config.must_be("norm_topk_prob", False)
    config.must_be("scoring_func", "softmax")
    config.must_be("rope_interleave", True)
    method, groups = config.take("topk_method"), ("n_group", "topk_group")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.error(f"sets topk_method={shown(method)}; known are greedy and group_limited_greedy")
    if method == "greedy":
        for key in groups:
            config.take(key, None)  # unused with this method
        return deepseek_of(config, normalised=False, mlp_bias=config.flag("mlp_bias", False))
    return deepseek_of(config, normalised=False, best=1, mlp_bias=config.flag("mlp_bias", False))


def _deepseek_v3(config: Config) -> Architecture:
    """DeepSeek-V3: arXiv 2412.19437 section 2.1: latent attention, routed experts in groups, and shared ones.

    transformers' code lacks its sequence-wise loss, and has its layers for multi-token prediction in no forward pass.
    """
    config.demand("norm_topk_prob")
    config.must_be("topk_method", "noaux_tc")
    config.must_be("scoring_func", "sigmoid")
    return deepseek_of(config, normalised=config.flag("norm_topk_prob"), best=2, corrected=True)


def _phi3(config: Config) -> Architecture:
    """Phi-3: arXiv 2404.14219 section 2: Llama with fused matrices, a window, and positions on a part of each head.

    The rope_type longrope is unsupported; its frequencies depend on the length of the input.
    """
    config.demand("num_key_value_heads", "pad_token_id")
    config.take("original_max_position_embeddings", None)  # read by longrope only
    attention = attention_of(config, window=config.size("sliding_window", None), rope_types=("default",), partial=1.0)
    return decoder_of(config, replace(attention, fused=True), replace(mlp_of(config), fused=True))


def _olmo2(config: Config) -> Architecture:
    """OLMo 2: arXiv 2501.00656 section 3.2: norms after attention and MLP, and of q and k over all heads together."""
    config.demand("num_key_value_heads", "pad_token_id")
    biases = EVERY if config.flag("attention_bias", False) else ()
    attention = replace(attention_of(config, biases=biases), qk_norm="width")
    return decoder_of(config, attention, mlp_of(config), norm=Norm(eps=eps_of(config), rounds_last=True), norms=POST)


def _seed_oss(config: Config) -> Architecture:
    """Seed-OSS, github.com/ByteDance-Seed/seed-oss: Llama with biases on q, k and v, and on o by a switch of its own.

    transformers drops parts of the residual stream by a number that no objective switches off.
    """
    config.demand("num_key_value_heads", "head_dim", "pad_token_id", "attention_dropout", "residual_dropout")
    config.must_be("residual_dropout", 0.0)
    config.must_be("pretraining_tp", 1)
    inputs: tuple[Projection, ...] = ("q", "k", "v") if config.flag("attention_bias", True) else ()
    output: tuple[Projection, ...] = ("o",) if config.flag("attention_out_bias", False) else ()
    attention = attention_of(config, biases=(*inputs, *output))
    return decoder_of(config, attention, mlp_of(config, bias=config.flag("mlp_bias", False)))


def _gemma2(config: Config) -> Architecture:
    """Gemma 2: arXiv 2408.00118 section 2: two kinds of layers, soft-capping, norms before and after each block."""
    every_second = [FULL if i % 2 else SLIDING for i in range(config.size("num_hidden_layers"))]
    config.demand("num_key_value_heads", "head_dim", "pad_token_id")
    config.demand("attn_logit_softcapping", "final_logit_softcapping")
    if config.take("use_bidirectional_attention", None):
        raise config.error("sets use_bidirectional_attention; the oracle only computes causal attention")
    attention = replace(gemma_attention_of(config), softcap=config.number("attn_logit_softcapping", None))
    kinds = config.texts("layer_types", every_second)
    windows = windows_of(config, kinds, config.size("sliding_window"))
    return gemma_of(config, [replace(attention, window=window) for window in windows])


def _gemma3(config: Config) -> Architecture:
    """Gemma 3 text: arXiv 2503.19786 section 2: each kind of layer has its own positions.

    attn_logit_softcapping is unsupported: transformers' Gemma 3 has the key and never applies it.
    """
    config.demand("num_key_value_heads", "head_dim", "pad_token_id")
    config.must_be("use_bidirectional_attention", False)
    config.must_be("attn_logit_softcapping", None)
    every = config.size("_sliding_window_pattern", config.size("sliding_window_pattern", 6))
    count = config.size("num_hidden_layers")
    kinds = config.texts("layer_types", [FULL if (i + 1) % every == 0 else SLIDING for i in range(count)])
    older = {FULL: config.take("rope_theta", None), SLIDING: config.take("rope_local_base_freq", None)}
    ropes = rotary_by_kind(config, head_dim=head_dim_of(config), older=older)
    attention = replace(gemma_attention_of(config, ropes[FULL]), qk_norm="head")
    windows = windows_of(config, kinds, config.size("sliding_window"))
    layers = zip(kinds, windows, strict=True)
    return gemma_of(config, [replace(attention, rotary=ropes[kind], window=window) for kind, window in layers])


FAMILIES: dict[str, Callable[[Config], Architecture]] = {
    "llama": _llama,
    "PanguEmbedded": _pangu,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "seed_oss": _seed_oss,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}


def is_written(folder: Path) -> bool:
    """Tells whether the oracle computes this model from the papers.

    Returns True also for a folder without a model, which ``read_architecture`` rejects.
    """
    try:
        values = read_json(folder / "config.json")
    except FileNotFoundError:
        return True
    kind = values.get("model_type")
    return not isinstance(kind, str) or kind in FAMILIES
