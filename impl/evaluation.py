"""Evaluation: what an objective says of one micro-batch and one model."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an objective says of one micro-batch and one model.

    loss: scalar, this micro-batch's part of the model's loss: gradients are those of the sum over data ranks and
        micro-batches. None for a frozen model.
    values: scalars by the key of an observable, to be summed over data ranks and micro-batches.
    highest: scalars of which the largest one on all ranks and in all micro-batches is reported.
    rows: (rows, length) by the key of an observable; what stands at the targets is recorded.
    """

    loss: Tensor | None
    values: dict[str, Tensor] = field(default_factory=dict)
    highest: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
