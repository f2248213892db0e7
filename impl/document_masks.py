"""Masks that keep packed documents apart, for code in transformers that makes its masks without their positions.

gpt-oss' and AFMoE's are (docs/findings/gpt-oss-packed-positions.md). Their models take masks that are made already.
"""

from typing import Any

import torch
import transformers
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

KINDS = ("gpt_oss", "afmoe")  # model types of such code


def keep_documents_apart(model: transformers.PreTrainedModel) -> None:
    """Let ``model`` be given the masks of the positions in ``position_ids``, where no masks come with its inputs."""
    if model.config.model_type in KINDS:
        model.base_model.register_forward_pre_hook(_with_masks, with_kwargs=True)


def _with_masks(module: Any, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The mask has the dtype of the embeddings, so these are looked up here."""
    positions = options.get("position_ids")
    given = any(options.get(name) is not None for name in ("attention_mask", "past_key_values", "inputs_embeds"))
    if positions is None or given or options.get("use_cache", True):
        return arguments, options
    embeddings: torch.Tensor = module.embed_tokens(options["input_ids"])
    wanted = {"config": module.config, "inputs_embeds": embeddings, "attention_mask": None, "past_key_values": None}
    wanted["position_ids"] = positions
    masks = {
        "full_attention": create_causal_mask(**wanted),
        "sliding_attention": create_sliding_window_causal_mask(**wanted),
    }
    return arguments, options | {"input_ids": None, "inputs_embeds": embeddings, "attention_mask": masks}
