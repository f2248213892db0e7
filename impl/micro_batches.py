"""The loop over micro-batches, for libraries that leave it to the caller. Pipelines own theirs."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from impl.collate import Inputs

Loss = Callable[[int, torch.Tensor], torch.Tensor]  # (index of the micro-batch, its log-probs) -> scalar


class StepwiseStrategy(Protocol):
    """What the loop calls, in this order, for each micro-batch."""

    def start_micro_batch(self, index: int, count: int) -> None:
        """Clear gradients before the first of ``count``, decide when to reduce."""
        ...

    def forward(self, inputs: Inputs) -> torch.Tensor:
        """Log-probs (rows, length) of ``inputs.labels``, see Strategy.forward_backward."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """After the last micro-batch, the gradient is that of the sum of ``loss`` over data ranks and micro-batches."""
        ...


def one_after_another(strategy: StepwiseStrategy, inputs: Sequence[Inputs], loss: Loss) -> list[torch.Tensor]:
    """Strategy.forward_backward for a strategy with these three methods."""
    logprobs = []
    for index, micro_batch in enumerate(inputs):
        strategy.start_micro_batch(index, len(inputs))
        logp = strategy.forward(micro_batch)
        strategy.backward(loss(index, logp))
        logprobs.append(logp.detach())
    return logprobs
