"""The loop over micro-batches, for libraries that leave it to the caller. Pipelines own theirs."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from impl.collate import MicroBatch
from impl.outputs import Outputs, Wanted

Loss = Callable[[int, Outputs], torch.Tensor]  # (index of the micro-batch, what was asked for) -> scalar


class StepwiseTrainable(Protocol):
    """What the loop calls, in this order, for each micro-batch."""

    def start_micro_batch(self, index: int, count: int) -> None:
        """Clear gradients before the first of ``count``, decide when to reduce."""
        ...

    def forward(self, inputs: MicroBatch, *, want: Wanted, temperature: float) -> Outputs:
        """See Trainable.forward_backward."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """After the last micro-batch, the gradient is that of the sum of ``loss`` over data ranks and micro-batches."""
        ...


def one_after_another(
    trainable: StepwiseTrainable, inputs: Sequence[MicroBatch], *, want: Wanted, temperature: float, loss: Loss | None
) -> list[Outputs]:
    """Trainable.forward_backward for a trainable with these three methods."""
    found = []
    for index, micro_batch in enumerate(inputs):
        if loss is None:
            with torch.no_grad():
                found.append(trainable.forward(micro_batch, want=want, temperature=temperature))
            continue
        trainable.start_micro_batch(index, len(inputs))
        outputs = trainable.forward(micro_batch, want=want, temperature=temperature)
        trainable.backward(loss(index, outputs))
        found.append(outputs.detach())
    return found
