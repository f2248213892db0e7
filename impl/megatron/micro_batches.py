"""Shards the micro-batches of a step over context-parallel ranks, with documents and inputs of routers."""

from collections.abc import Sequence
from dataclasses import dataclass

from impl.context_parallel.ring_attention import RingAttention
from impl.interface.micro_batches import MicroBatch
from impl.interface.trainable import ContextConfig
from impl.megatron.attention import Documents
from impl.megatron.moe_config import Mixture
from impl.megatron.router import StepLoss, routed


@dataclass(frozen=True, kw_only=True)
class ShardedMicroBatch:
    """Holds one rank's part of a micro-batch.

    index: number in the step. whole: the micro-batch with all tokens. own: the tokens of this context-parallel rank.
    documents: the placement of these tokens.
    """

    index: int
    whole: MicroBatch
    own: MicroBatch
    documents: Documents


def sharded(
    inputs: Sequence[MicroBatch],
    ring: RingAttention,
    config: ContextConfig,
    *,
    mixture: Mixture | None = None,
    loss: StepLoss | None = None,
) -> list[ShardedMicroBatch]:
    """Returns this rank's part of each micro-batch.

    With a pipeline all parts are padded to one length, because stages receive tensors of one size.
    """
    parts = [ring.shard(whole) for whole in inputs]
    if config.layout.pp > 1:
        longest = max(own.tokens.shape[1] for own, _ in parts)
        parts = [ring.shard(whole, multiple=longest) for whole in inputs]
    sequence_parallel = "seqpar" in config.layout.options
    return [
        ShardedMicroBatch(
            index=index,
            whole=whole,
            own=own,
            documents=Documents(
                positions=own.positions,
                bound=max(whole.tokens.shape[1], ring.size * own.tokens.shape[1]),  # with the padding to one length
                ring=placement,
                routed=None
                if mixture is None
                else routed(own, mixture, sequence_parallel=sequence_parallel, loss=loss),
            ),
        )
        for index, (whole, (own, placement)) in enumerate(zip(inputs, parts, strict=True))
    ]
