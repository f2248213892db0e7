"""Ulysses (Jacobs et al., arXiv 2309.14509): ranks hold slices of the sequence, and trade them for heads in attention.

DeepSpeed's own module does the exchange. What attends in between is the ring layer, on a ring of one where the layout
has none: unlike ``sdpa`` it knows documents and windows without a mask, and Ulysses throws masks away
(docs/findings/deepspeed-ulysses-sdpa.md).
"""

from typing import Any

import torch.distributed as dist
import transformers
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from impl.ring.attention import NAME

ROWS = 1  # of a rank's part of a micro-batch: its documents are laid end to end


def exchange_heads(model: transformers.PreTrainedModel, *, size: int, tp: int, group: dist.ProcessGroup) -> Any:
    """Put the exchange around the attention of ``model``; returns the ``mpu`` for ``deepspeed.initialize``.

    With tensor parallelism there is none, because AutoTP takes its place; every rank is a data rank for ZeRO then.
    ``withdraw`` undoes it.
    """
    if tp == 1:
        return UlyssesSPAttentionHF.register_with_transformers(
            model, core_attn_implementation=NAME, sequence_parallel_size=size, micro_batch_size=ROWS
        )
    config = model.config.get_text_config()
    attention = UlyssesSPAttentionHF(
        attn=ALL_ATTENTION_FUNCTIONS[NAME],
        batch_size=ROWS,
        attn_head_count=config.num_attention_heads // tp,
        attn_head_size=getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
        kv_head_count=config.num_key_value_heads // tp,
        num_hidden_layers=config.num_hidden_layers,
        process_group=group,
        seq_length_is_variable=True,
    )
    ALL_ATTENTION_FUNCTIONS[NAME] = attention
    return None


def withdraw() -> None:
    """Attention as transformers knew it before."""
    if NAME in ALL_ATTENTION_FUNCTIONS._local_mapping:
        del ALL_ATTENTION_FUNCTIONS[NAME]
