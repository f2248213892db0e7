"""Objectives of the reference backends: losses of micro-batches, whatever the backend and the layout.

FUNCTIONS holds them by the kind of the scenario's objective; conformance/oracle/objectives.py has its own, written
apart from these.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from conformance.batch import Batch, Row
from conformance.objective import Objective, known_kinds
from impl.collate import MicroBatch
from impl.evaluation import Evaluation
from impl.outputs import Outputs, Wanted
from impl.rl.objective import PolicyGradientFunctions


class ObjectiveFunctions(Protocol):
    @property
    def temperature(self) -> float:
        """By which logits are divided."""
        ...

    def wants(self, model: str) -> Wanted:
        """Outputs that are needed of a model; of one of which nothing is, no forward pass is made."""
        ...

    def totals(self, rows: Sequence[Row]) -> dict[str, float]:
        """Sums over some rows; added up over the whole step they are the denominators of the losses.

        They are recorded, but for those that ``evaluate`` counts itself under the same key.
        """
        ...

    def summary(self, batch: Batch) -> dict[str, float]:
        """Numbers of the whole batch that need no forward pass of this step; they are recorded."""
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

    def summary(self, batch: Batch) -> dict[str, float]:
        return {}

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


FUNCTIONS: dict[str, Callable[[Any], ObjectiveFunctions]] = {
    "sft": SftFunctions,
    "grpo": PolicyGradientFunctions,
    "ppo": PolicyGradientFunctions,
}


def functions_of(objective: Objective) -> ObjectiveFunctions:
    """The functions of a scenario's objective. Raises UsageError for a kind that is not in FUNCTIONS."""
    known_kinds(FUNCTIONS, objective, who="impl/objectives.py")
    return FUNCTIONS[objective.kind](objective)
