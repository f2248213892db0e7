"""The result of evaluating an objective on one micro-batch with the outputs of one model."""

from dataclasses import dataclass, field

from torch import Tensor


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
