"""A forward pass over a ring, for the backends that run a Hugging Face model."""

from typing import Protocol

from impl.collate import MicroBatch
from impl.outputs import Outputs
from impl.ring.attention import Ring, RingAttention


class ModelOutputs(Protocol):
    """The outputs of the tokens in ``inputs``; ``options`` are keyword arguments for the model."""

    def __call__(self, inputs: MicroBatch, **options: Ring) -> Outputs: ...


def forward_over_ring(ring: RingAttention | None, inputs: MicroBatch, outputs: ModelOutputs) -> Outputs:
    """The outputs of a whole micro-batch on all ranks of the ring; ``outputs`` is called with this rank's part."""
    if ring is None:
        return outputs(inputs)
    own, placed = ring.shard(inputs)
    rows, length = inputs.labels.shape
    return outputs(own, ring=placed).each(lambda tensor: ring.restore(tensor, placed, rows=rows, length=length))
