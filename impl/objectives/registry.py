"""The objectives of the reference backends: losses of micro-batches, the same for every backend and layout.

FUNCTIONS maps the kind of a scenario's objective to its functions. The oracle has its own functions, which were written
independently (conformance/oracle/objectives.py).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from conformance.spec.batch import Batch, Row
from conformance.spec.objectives import Objective, known_kinds
from impl.interface.collate import MicroBatch
from impl.interface.outputs import Evaluation, Outputs, Wanted
from impl.objectives.policy_gradient import PolicyGradientFunctions


class ObjectiveFunctions(Protocol):
    """The functions of an objective that the trainer calls; ``model`` is the name of a role."""

    @property
    def temperature(self) -> float:
        """The number that logits are divided by."""
        ...

    def wants(self, model: str) -> Wanted:
        """The outputs that are needed of ``model``; if none are, the model makes no forward pass."""
        ...

    def totals(self, rows: Sequence[Row]) -> dict[str, float]:
        """Sums over ``rows``, by observable; their totals over the whole step are the denominators of the losses.

        The totals are recorded, except for keys under which ``evaluate`` gives a value itself.
        """
        ...

    def summary(self, batch: Batch) -> dict[str, float]:
        """Numbers of the whole batch, by observable, that are recorded and need no forward pass of this step."""
        ...

    def evaluate(
        self,
        model: str,
        outputs: Outputs,
        inputs: MicroBatch,
        *,
        totals: Mapping[str, Tensor],
        others: Mapping[str, Outputs],
    ) -> Evaluation:
        """The loss and the recorded numbers of ``model`` for one micro-batch.

        ``totals``: sums over the whole step on all ranks, scalars on the device in the dtype of the outputs.
        ``others``: detached outputs for this micro-batch of the models that ran earlier in this step, by model.
        """
        ...


class SftFunctions:
    """Supervised fine-tuning: the mean of weight times -log p over the target tokens of the whole step, on all ranks
    together. Documents without a column ``weight`` have weight 1."""

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
        totals: Mapping[str, Tensor],
        others: Mapping[str, Outputs],
    ) -> Evaluation:
        assert outputs.logprobs is not None
        assert outputs.targets is not None
        loss = minimised = -outputs.logprobs.sum() / totals["token_count"]
        if "weight" in inputs.columns:
            minimised = -(inputs.columns["weight"] * outputs.logprobs).sum() / totals["token_count"]
        # Count the targets that were trained on: the batch's own count would be right even if some of them were lost.
        values = {"loss": loss, "token_count": outputs.targets.sum()}
        return Evaluation(loss=minimised, values=values, rows={"logprob": outputs.logprobs})


FUNCTIONS: dict[str, Callable[[Any], ObjectiveFunctions]] = {
    "sft": SftFunctions,
    "grpo": PolicyGradientFunctions,
    "ppo": PolicyGradientFunctions,
}


def functions_of(objective: Objective) -> ObjectiveFunctions:
    """The functions of a scenario's objective. Raises UsageError for a kind that is not in FUNCTIONS."""
    known_kinds(FUNCTIONS, objective, who="impl/objectives/registry.py")
    return FUNCTIONS[objective.kind](objective)
