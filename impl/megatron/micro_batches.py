"""The micro-batches of a step as a rank runs them: its part of each, with the documents and what routers are given."""

from collections.abc import Sequence
from dataclasses import dataclass

from impl.context_parallel.ring_attention import RingAttention
from impl.interface.collate import MicroBatch
from impl.interface.protocol import ContextConfig
from impl.megatron.attention import Documents
from impl.megatron.moe_config import Mixture
from impl.megatron.router import StepLoss, routed


@dataclass(frozen=True, kw_only=True)
class ShardedMicroBatch:
    """A micro-batch as one rank runs it.

    index: its number in the step. whole: the micro-batch with all tokens. own: the tokens that this rank of the ring
    holds. documents: the placement of these tokens.
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
    """This rank's part of each micro-batch; with a pipeline all have one length, as stages receive one size."""
    parts = [ring.shard(whole) for whole in inputs]
    if config.layout.pp > 1:
        longest = max(own.tokens.shape[1] for own, _ in parts)
        parts = [ring.shard(whole, multiple=longest) for whole in inputs]
    cut = "seqpar" in config.layout.options
    return [
        ShardedMicroBatch(
            index=index,
            whole=whole,
            own=own,
            documents=Documents(
                positions=own.positions,
                bound=max(whole.tokens.shape[1], ring.size * own.tokens.shape[1]),  # also of padding to one length
                ring=placed,
                routed=None if mixture is None else routed(own, mixture, sequence_parallel=cut, loss=loss),
            ),
        )
        for index, (whole, (own, placed)) in enumerate(zip(inputs, parts, strict=True))
    ]
