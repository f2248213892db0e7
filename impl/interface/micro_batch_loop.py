"""Loops over the micro-batches of a step, for libraries that leave this to the caller (pipeline schedules do not)."""

from collections.abc import Sequence
from typing import Protocol

import torch

from impl.interface.collate import MicroBatch
from impl.interface.outputs import Loss, Outputs, Wanted


class StepwiseTrainable(Protocol):
    """Declares the methods that the loop calls for each micro-batch, in this order."""

    def start_micro_batch(self, index: int, count: int) -> None:
        """Prepares for micro-batch ``index`` of ``count``: clears gradients before the first, sets when to reduce."""
        ...

    def forward(self, inputs: MicroBatch, *, want: Wanted, temperature: float) -> Outputs:
        """Runs the forward pass and returns the outputs that ``want`` names; see Trainable.forward_backward."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulates the gradient of ``loss``, a scalar.

        After the last micro-batch, the gradient is that of the sum of ``loss`` over data ranks and micro-batches.
        """
        ...


def set_mode(module: torch.nn.Module, *, training: bool) -> None:
    """Puts a module and its submodules into training or evaluation mode, unless the module is in that mode already.

    All submodules must be in the same mode as the module: checking the hundreds of them takes milliseconds.
    """
    if module.training != training:
        module.train(training)


def run_micro_batches(
    trainable: StepwiseTrainable, inputs: Sequence[MicroBatch], *, want: Wanted, temperature: float, loss: Loss | None
) -> list[Outputs]:
    """Implements Trainable.forward_backward with the methods of StepwiseTrainable, one micro-batch after another."""
    results = []
    for index, micro_batch in enumerate(inputs):
        if loss is None:
            with torch.no_grad():
                results.append(trainable.forward(micro_batch, want=want, temperature=temperature))
            continue
        trainable.start_micro_batch(index, len(inputs))
        outputs = trainable.forward(micro_batch, want=want, temperature=temperature)
        trainable.backward(loss(index, outputs))
        results.append(outputs.detach())
    return results
