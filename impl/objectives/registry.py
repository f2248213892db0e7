"""Maps each kind of objective to the loss functions that all reference backends share.

The oracle has its own functions, which were written independently (conformance/oracle/objectives.py).
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
    """Defines the functions of an objective that the trainer calls; ``model`` is the name of a role."""

    @property
    def temperature(self) -> float:
        """Returns the divisor of the logits."""
        ...

    def wants(self, model: str) -> Wanted:
        """Returns the outputs needed from ``model``; if there are none, the model runs no forward pass."""
        ...

    def totals(self, rows: Sequence[Row]) -> dict[str, float]:
        """Returns sums over ``rows``, by observable; totals over the whole step are the denominators of the losses.

        The totals are recorded, except for keys under which ``evaluate`` gives a value itself.
        """
        ...

    def summary(self, batch: Batch) -> dict[str, float]:
        """Returns recorded numbers of the whole batch, by observable, that need no forward pass of this step."""
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
        """Computes the loss and the recorded numbers of ``model`` for one micro-batch.

        ``totals``: sums over the whole step on all ranks, scalars on the device in the dtype of the outputs.
        ``others``: detached outputs for this micro-batch of the models that ran earlier in this step, by model.
        """
        ...


class SftFunctions:
    """Computes the SFT loss: the mean of weight times -log p over the target tokens of the whole step on all ranks.

    Documents without a column ``weight`` have weight 1.
    """

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
        # Trained targets are counted, because the batch's own count would hide lost ones.
        values = {"loss": loss, "token_count": outputs.targets.sum()}
        return Evaluation(loss=minimised, values=values, rows={"logprob": outputs.logprobs})


FUNCTIONS: dict[str, Callable[[Any], ObjectiveFunctions]] = {
    "sft": SftFunctions,
    "grpo": PolicyGradientFunctions,
    "ppo": PolicyGradientFunctions,
}


def functions_of(objective: Objective) -> ObjectiveFunctions:
    """Returns the functions of a scenario's objective. Raises UsageError for a kind that is not in FUNCTIONS."""
    known_kinds(FUNCTIONS, objective, who="impl/objectives/registry.py")
    return FUNCTIONS[objective.kind](objective)
