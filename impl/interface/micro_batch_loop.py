"""The loop over the micro-batches of a step, for libraries that leave it to the caller; pipeline schedules do not."""

from collections.abc import Sequence
from typing import Protocol

import torch

from impl.interface.collate import MicroBatch
from impl.interface.outputs import Loss, Outputs, Wanted


class StepwiseTrainable(Protocol):
    """The methods that the loop calls for each micro-batch, in this order."""

    def start_micro_batch(self, index: int, count: int) -> None:
        """Prepare for micro-batch ``index`` of ``count``: clear gradients before the first, choose when to reduce."""
        ...

    def forward(self, inputs: MicroBatch, *, want: Wanted, temperature: float) -> Outputs:
        """Run the forward pass and return the outputs that ``want`` names; see Trainable.forward_backward."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of ``loss``, a scalar.

        After the last micro-batch, the gradient is that of the sum of ``loss`` over data ranks and micro-batches.
        """
        ...


def set_mode(module: torch.nn.Module, *, training: bool) -> None:
    """Put a module and all inside of it into training or evaluation mode; nothing is done if it is in that mode.

    All inside of it has to be in the same mode: to go through the hundreds of modules of a model takes milliseconds.
    """
    if module.training != training:
        module.train(training)


def one_after_another(
    trainable: StepwiseTrainable, inputs: Sequence[MicroBatch], *, want: Wanted, temperature: float, loss: Loss | None
) -> list[Outputs]:
    """Implement Trainable.forward_backward with the methods of StepwiseTrainable, one micro-batch after another."""
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
