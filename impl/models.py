"""Loading a Hugging Face folder the way trainers do: by AutoConfig, ``auto_map`` and the declared architecture."""

from pathlib import Path
from typing import Any

import torch
import transformers


def load_model(path: Path, *, dtype: torch.dtype, attention: str) -> transformers.PreTrainedModel:
    """Whole model on the CPU in ``dtype``, with remote code trusted, in training mode.

    A causal language model if the folder declares one, else image-text-to-text, else the bare AutoModel.
    """
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=True)
    model = _auto_class(config).from_pretrained(
        path, config=config, dtype=dtype, attn_implementation=attention, trust_remote_code=True
    )
    model.config.use_cache = False
    return model.train()


def _auto_class(config: transformers.PretrainedConfig) -> Any:
    """The auto class that fits: remote code names its own in ``auto_map``, other models are known by architecture."""
    auto_map = getattr(config, "auto_map", None) or {}
    vision = next(
        (name for name in ("AutoModelForImageTextToText", "AutoModelForVision2Seq") if name in auto_map), None
    )
    if "AutoModelForCausalLM" in auto_map or type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    if vision:
        return getattr(transformers, vision, transformers.AutoModelForImageTextToText)
    if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModel
