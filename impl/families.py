"""What the Hugging Face code of a family asks of whoever cuts its matrices or replaces its attention; without torch."""

import json
from pathlib import Path

# Model types whose code wants a projection's whole output -> these projections, and those that take it cut again.
# Phi-3 cuts fused outputs into q, k and v, and into gate and up; OLMo 2 normalises q and k over all heads together.
WHOLE_OUTPUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "phi3": (("self_attn.qkv_proj", "mlp.gate_up_proj"), ("self_attn.o_proj", "mlp.down_proj")),
    "olmo2": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",)),
}


def soft_caps_scores(folder: Path) -> bool:
    """Whether the model in a Hugging Face folder soft-caps the scores of its attention, as Gemma 2 does."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config.get("model_type") == "gemma2" and bool(config.get("attn_logit_softcapping", 50.0))
