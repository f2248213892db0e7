"""Roll-outs: what a trainer computes before the first update of each, and remembers for the updates that follow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

from torch import Tensor

from conformance.batch import Batch
from conformance.objective import Objective
from conformance.validation import UsageError
from impl.objectives import functions_of
from impl.outputs import Wanted
from impl.strategy import Context, Trainable
from impl.trainer import step_inputs, target_rows


class RolloutFunctions(Protocol):
    """What an objective that reads roll-outs has besides impl.objectives.ObjectiveFunctions."""

    temperature: float

    def looks(self, model: str) -> Wanted:
        """The one output that is needed of a model, if any."""
        ...

    def annotate(self, batches: Sequence[Batch], found: Mapping[str, Mapping[tuple[int, int], Tensor]]) -> list[Batch]:
        """The mini-batches with all columns. ``found[model][b, r]``: (targets,) of row r of mini-batch b."""
        ...


@dataclass
class Rollouts:
    """The annotated mini-batches of the roll-out that is being trained on; ``first`` is its first step."""

    context: Context
    models: Mapping[str, Trainable]
    objective: Objective
    known: list[Batch] = field(default_factory=list)
    first: int = 0

    def annotated(self, batch: Batch) -> Batch:
        """The batch of a step with all its columns. Collective where a roll-out begins.

        Raises UsageError where training begins in the middle of one.
        """
        if batch.rollout:
            self.known, self.first = look_ahead(self.context, self.models, self.objective, batch.rollout), batch.step
        if not self.known:
            raise UsageError(
                f"step {batch.step} is in the middle of a roll-out, whose first update needs what was computed before "
                f"it; let every leg begin with a roll-out: steps in multiples of mini_batches x ppo_epochs"
            )
        return replace(batch, rows=self.known[(batch.step - self.first) % len(self.known)].rows)


def look_ahead(
    context: Context, models: Mapping[str, Trainable], objective: Objective, batches: Sequence[Batch]
) -> list[Batch]:
    """Forward passes over a whole roll-out, and its mini-batches with the columns that follow from them."""
    functions = cast(RolloutFunctions, functions_of(objective))
    found: dict[str, dict[tuple[int, int], Tensor]] = {}
    for role in objective.roles:
        if want := functions.looks(role.name):
            own: dict[tuple[int, int], Tensor] = {}
            for number, batch in enumerate(batches):
                rows = look(context, models[role.name], batch, want, functions.temperature)
                own |= {(number, index): numbers for index, numbers in rows.items()}
            # A controller has those of all ranks.
            found[role.name] = {key: numbers for of_rank in context.all_gather(own) for key, numbers in of_rank.items()}
    return functions.annotate(batches, found)


def look(context: Context, trainable: Trainable, batch: Batch, want: Wanted, temperature: float) -> dict[int, Tensor]:
    """What this rank finds of its rows of one mini-batch, by the row's index."""
    micro_batches, inputs = step_inputs(context, batch)
    found = trainable.forward_backward(inputs, want=want, temperature=temperature, loss=None)
    (name,) = want
    rows: dict[int, Tensor] = {}
    for micro_batch, mine, outputs in zip(micro_batches, inputs, found, strict=True):
        rows |= target_rows(micro_batch, mine, getattr(outputs, name))
    return rows
