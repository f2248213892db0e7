"""Objectives of the reference backends: losses of micro-batches, whatever the backend and the layout.

FUNCTIONS holds them by the kind of the scenario's objective; conformance/oracle/objectives.py has its own, written
apart from these.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from conformance.batch import Row
from conformance.objective import Objective, known_kinds
from impl.collate import MicroBatch
from impl.outputs import Outputs, Wanted


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an objective says of one micro-batch and one model.

    loss: scalar, this micro-batch's part of the model's loss: gradients are those of the sum over data ranks and
        micro-batches. None for a frozen model.
    values: scalars by the key of an observable, to be summed over data ranks and micro-batches.
    rows: (rows, length) by the key of an observable; what stands at the targets is recorded.
    """

    loss: Tensor | None
    values: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)


class ObjectiveFunctions(Protocol):
    """``temperature``: by which logits are divided."""

    temperature: float

    def wants(self, model: str) -> Wanted:
        """Outputs that are needed of a model."""
        ...

    def totals(self, rows: Sequence[Row]) -> dict[str, float]:
        """Sums over some rows; added up over the whole step they are the denominators of the losses.

        They are recorded, but for those that ``evaluate`` counts itself under the same key.
        """
        ...

    def evaluate(
        self,
        model: str,
        outputs: Outputs,
        inputs: MicroBatch,
        *,
        totals: Mapping[str, float],
        others: Mapping[str, Outputs],
    ) -> Evaluation:
        """``others``: outputs of the models that went before in this step, of the same micro-batch, detached."""
        ...


class SftFunctions:
    """The mean of -log p over the target tokens of the step, on all ranks together."""

    temperature = 1.0

    def __init__(self, objective: Any) -> None:
        pass

    def wants(self, model: str) -> Wanted:
        return frozenset({"logprobs", "targets"})

    def totals(self, rows: Sequence[Row]) -> dict[str, float]:
        return {"token_count": sum(row.target_count for row in rows)}

    def evaluate(
        self,
        model: str,
        outputs: Outputs,
        inputs: MicroBatch,
        *,
        totals: Mapping[str, float],
        others: Mapping[str, Outputs],
    ) -> Evaluation:
        assert outputs.logprobs is not None
        assert outputs.targets is not None
        loss = -outputs.logprobs.sum() / totals["token_count"]
        # The count of what was trained on: the batch's own would be right even if targets were lost on the way.
        values = {"loss": loss, "token_count": outputs.targets.sum()}
        return Evaluation(loss=loss, values=values, rows={"logprob": outputs.logprobs})


FUNCTIONS: dict[str, Callable[[Any], ObjectiveFunctions]] = {"sft": SftFunctions}


def functions_of(objective: Objective) -> ObjectiveFunctions:
    """The functions of a scenario's objective. Raises UsageError for a kind that is not in FUNCTIONS."""
    known_kinds(FUNCTIONS, objective, who="impl/objectives.py")
    return FUNCTIONS[objective.kind](objective)
