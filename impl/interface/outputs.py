"""Declares what a forward pass returns and what an objective makes of it, for one micro-batch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from impl.interface.collate import MicroBatch

OutputName = Literal["logprobs", "entropy", "values", "targets"]
Wanted = frozenset[OutputName]


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The requested outputs of a micro-batch, most of them (rows, length) in float32 or wider; None if not requested.

    All ranks that share the micro-batch have the same numbers.

    logprobs: log p of the label of each position, at the requested temperature; 0 where there is no target.
    entropy: -sum p log p of the distribution at each position, in nats; temperature and zeros as for logprobs.
    values: the value head's number at each position; 0 in padding.
    targets: 1 at each label that is trained on, else 0. It is taken from the tokens that went through the model, after
        padding and sharding, so its sum is the number of targets that the loss really covers.
    routing, probabilities: (rows, length, routers, experts), of a model with a mixture of experts, whatever was
        requested: the weight of each expert's output, 0 where it is not chosen, and the router's softmax.
    squares: (rows, length, routers), of such a model: the square of the log of the sum of exp(logits) of each router.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    targets: Tensor | None = None
    routing: Tensor | None = None
    probabilities: Tensor | None = None
    squares: Tensor | None = None

    def each(self, function: Callable[[Tensor], Tensor]) -> "Outputs":
        """A copy with ``function`` applied to each output that is not None."""
        return Outputs(**{name: None if tensor is None else function(tensor) for name, tensor in vars(self).items()})

    def detach(self) -> "Outputs":
        return self.each(Tensor.detach)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The loss and the recorded numbers of one micro-batch and one model; dictionaries are keyed by observable.

    loss: scalar, this micro-batch's share of the model's loss. The step's loss is the sum over data ranks and
        micro-batches. None for a frozen model.
    values: scalars that are summed over data ranks and micro-batches.
    highest: scalars of which the largest over all ranks and micro-batches is reported.
    rows: tensors (rows, length), of which the numbers at the targets are recorded.
    """

    loss: Tensor | None
    values: dict[str, Tensor] = field(default_factory=dict)
    highest: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)


Loss = Callable[[int, Outputs], Tensor]  # (index of the micro-batch, its outputs) -> scalar


class RouterTerms(Protocol):
    """The part of an optimizer step's loss that the routers of a mixture of experts add."""

    def of_micro_batch(self, inputs: MicroBatch, outputs: Outputs) -> Tensor:
        """Return what the routers add for a whole micro-batch, with a gradient."""
        ...

    def share(self, weights: Tensor, probabilities: Tensor, squares: Tensor) -> Tensor:
        """Return what some routers add for N real tokens, with a gradient.

        weights, probabilities: (N, routers, X), of which probabilities have a gradient. squares: (N, routers), with a
        gradient.
        """
        ...
