"""The families that have a tensor-parallel plan of this project (tensor_parallel.py), for questions without torch."""

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
