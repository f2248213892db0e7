"""Sets up Ulysses (Jacobs et al., arXiv 2309.14509): ranks exchange slices of the sequence for heads in attention.

DeepSpeed's own module does the exchange. The ring layer computes attention, on a ring of one rank if the layout has
none: unlike ``sdpa`` it needs no mask for documents and windows, and Ulysses drops masks
(docs/findings/deepspeed-ulysses-sdpa.md).
"""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import transformers
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from conformance.core.errors import UsageError
from impl.context_parallel.ring_attention import NAME
from impl.deepspeed import global_state

ROWS = 1  # rows of a rank's part of a micro-batch, in which documents are concatenated


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Holds the shape of an exchange: numbers of query and of key-value heads, and the size of a head."""

    query: int
    key_value: int
    size: int


# Shape and mpu of the exchange. A process has at most one, because transformers has one attention function for NAME.
_exchanging: tuple[Heads, Any] | None = None


def exchange_heads(model: transformers.PreTrainedModel, *, size: int, tp: int, group: dist.ProcessGroup) -> Any:
    """Wraps the attention of ``model`` in the exchange; returns the ``mpu`` for ``deepspeed.initialize``.

    With tensor parallelism the result is None, because AutoTP takes the place of the mpu; ZeRO then treats the Ulysses
    ranks as data ranks. Models with the same heads share the exchange until the last context leaves the process. Raises
    UsageError for a model with other heads.
    """
    global _exchanging
    config = model.config.get_text_config()
    if getattr(config, "num_key_value_heads", None) is None:  # DeepSpeed reads it, but some models do not group heads
        config.num_key_value_heads = config.num_attention_heads
    heads = Heads(
        query=config.num_attention_heads,
        key_value=config.num_key_value_heads,
        size=getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
    )
    if _exchanging is None:
        layers = config.num_hidden_layers
        if tp == 1:
            _exchanging = heads, _around_model(model, size)
        else:
            _around_shards(heads, layers=layers, tp=tp, group=group)
            _exchanging = heads, None
        global_state.when_left(_withdraw)
    known, mpu = _exchanging
    if heads != known:
        raise UsageError(
            f"Ulysses supports one shape of attention heads in a process: {known} is in use, but this model has "
            f"{heads}; use models with the same heads, or context parallelism (sp2) instead of ulysses2"
        )
    return mpu


def _around_model(model: transformers.PreTrainedModel, size: int) -> Any:
    return UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation=NAME, sequence_parallel_size=size, micro_batch_size=ROWS
    )


def _around_shards(heads: Heads, *, layers: int, tp: int, group: dist.ProcessGroup) -> None:
    """Sets up the exchange for the heads that AutoTP leaves to a rank."""
    ALL_ATTENTION_FUNCTIONS[NAME] = UlyssesSPAttentionHF(
        attn=ALL_ATTENTION_FUNCTIONS[NAME],
        batch_size=ROWS,
        attn_head_count=heads.query // tp,
        attn_head_size=heads.size,
        kv_head_count=heads.key_value // tp,
        num_hidden_layers=layers,
        process_group=group,
        seq_length_is_variable=True,
    )


def _withdraw() -> None:
    """Removes the exchange, which restores transformers' attention function for NAME."""
    global _exchanging
    _exchanging = None
    del ALL_ATTENTION_FUNCTIONS[NAME]
