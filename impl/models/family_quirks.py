"""What the Hugging Face code of a family asks of whoever cuts its matrices or replaces its attention; without torch.

The families that have a tensor-parallel plan of this project (tensor_parallel.py), for questions without torch.
"""

import json
from pathlib import Path

# Model types whose code wants a projection's whole output -> these projections, and those that take it cut again.
# Phi-3 cuts fused outputs into q, k and v, and into gate and up; OLMo 2 normalises q and k over all heads together.
WHOLE_OUTPUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "phi3": (("self_attn.qkv_proj", "mlp.gate_up_proj"), ("self_attn.o_proj", "mlp.down_proj")),
    "olmo2": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",)),
}


# Model types whose attention is latent: values have heads of another size than queries and keys, and no plan cuts it.
LATENT = ("deepseek_v2", "deepseek_v3")


SINKS = "attention sinks"


def has_biased_experts(folder: Path) -> bool:
    """Whether the experts of a model have biases, as those of gpt-oss do."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return bool(config.get("model_type") == "gpt_oss")


def needs_loop(folder: Path) -> bool:
    """Whether transformers' kernels for groups of experts are not for a model: they sum gradients of biases token by
    token (docs/findings/experts-bias-gradient.md), and in half precision they want rows of whole 16 bytes, under tp2,
    too."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size = config.get("moe_intermediate_size") or config.get("intermediate_size") or 0
    return has_biased_experts(folder) or bool(size % 16 or config.get("hidden_size", 0) % 8)


def beyond_kernels(folder: Path) -> str:
    """What a model's attention does that the kernels of torch and of flash-attn do not; empty for most.

    Gemma 2 soft-caps scores, and gpt-oss has sinks, which the default ring adds
    (impl/context_parallel/ring_attention.py).
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = config.get("model_type")
    if kind == "gemma2" and config.get("attn_logit_softcapping", 50.0):
        return "soft-capping of scores"
    return SINKS if kind == "gpt_oss" else ""


# Model types that have an explicit plan -> the norms on their residual stream.
_LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
_GEMMA_NORMS = (*_LLAMA_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
LAYER_NORMS = {
    "llama": _LLAMA_NORMS,
    "PanguEmbedded": _LLAMA_NORMS,
    "mistral": _LLAMA_NORMS,
    "qwen2": _LLAMA_NORMS,
    "qwen3": _LLAMA_NORMS,
    "phi3": _LLAMA_NORMS,
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gpt_oss": _LLAMA_NORMS,
    "gemma2": _GEMMA_NORMS,
    "gemma3_text": _GEMMA_NORMS,
}
