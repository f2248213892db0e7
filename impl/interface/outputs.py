"""Declares the outputs of a forward pass and the evaluation of an objective, for one micro-batch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from impl.interface.collate import MicroBatch

OutputName = Literal["logprobs", "entropy", "values", "targets"]
Wanted = frozenset[OutputName]


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Holds the requested outputs of a micro-batch; None for others.

    Most are (rows, length) in float32 or wider. All ranks that share the micro-batch have the same numbers.

    logprobs: log p of the label of each position, at the requested temperature; 0 where there is no target.
    entropy: -sum p log p of the distribution at each position, in nats; temperature and zeros as for logprobs.
    values: the value head's number at each position; 0 in padding.
    targets: 1 at each label that is trained on, else 0. It is taken from the tokens that went through the model, after
        padding and sharding, so its sum is the number of targets that the loss really covers.
    routing, probabilities: (rows, length, routers, experts), for a mixture of experts, whatever was requested: the
        weight of each expert's output, 0 where the expert is not chosen, and the router's softmax.
    squares: (rows, length, routers), for a mixture of experts: log(sum exp(logits))^2 of each router.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    targets: Tensor | None = None
    routing: Tensor | None = None
    probabilities: Tensor | None = None
    squares: Tensor | None = None

    def each(self, function: Callable[[Tensor], Tensor]) -> "Outputs":
        """Returns a copy with ``function`` applied to each output that is not None."""
        return Outputs(**{name: None if tensor is None else function(tensor) for name, tensor in vars(self).items()})

    def detach(self) -> "Outputs":
        return self.each(Tensor.detach)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Holds the loss and the recorded numbers of one micro-batch and one model; dictionaries are keyed by observable.

    loss: scalar, this micro-batch's share of the model's loss. The step's loss is the sum over data ranks and
        micro-batches. None for a frozen model.
    values: scalars that are summed over data ranks and micro-batches.
    highest: scalars that are reduced to their maximum over all ranks and micro-batches.
    rows: tensors (rows, length); their numbers at the targets are recorded.
    """

    loss: Tensor | None
    values: dict[str, Tensor] = field(default_factory=dict)
    highest: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)


Loss = Callable[[int, Outputs], Tensor]  # (index of the micro-batch, its outputs) -> scalar


class RouterTerms(Protocol):
    """Declares the terms that the routers of a mixture of experts add to the loss of an optimizer step."""

    def of_micro_batch(self, inputs: MicroBatch, outputs: Outputs) -> Tensor:
        """Returns the routers' terms for a whole micro-batch, with a gradient."""
        ...

    def share(self, weights: Tensor, probabilities: Tensor, squares: Tensor) -> Tensor:
        """Returns the terms of some routers for N real tokens, with a gradient.

        weights, probabilities: (N, routers, X); the probabilities have a gradient.
        squares: (N, routers), with a gradient.
        """
        ...
