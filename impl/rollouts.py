"""Roll-outs: the numbers that are computed before the first update of a roll-out and kept for all its updates."""

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
    """The functions that an objective on roll-outs has in addition to impl.objectives.ObjectiveFunctions."""

    temperature: float

    def looks(self, model: str) -> Wanted:
        """The one output of ``model`` that is needed before the first update; empty if none is."""
        ...

    def annotate(self, batches: Sequence[Batch], found: Mapping[str, Mapping[tuple[int, int], Tensor]]) -> list[Batch]:
        """The mini-batches with the columns that ``evaluate`` reads.

        ``found[model][b, r]``: that output at the targets of row r of mini-batch b, (targets,).
        """
        ...


@dataclass
class Rollouts:
    """Keeps the annotated mini-batches of the current roll-out (``known``), which began at step ``first``."""

    context: Context
    models: Mapping[str, Trainable]
    objective: Objective
    known: list[Batch] = field(default_factory=list)
    first: int = 0

    def annotated(self, batch: Batch) -> Batch:
        """``batch`` with all the columns that its objective reads. Collective at the first step of a roll-out.

        Raises UsageError if training begins in the middle of a roll-out.
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
    """Run forward passes over a whole roll-out, and return its mini-batches with the columns computed from them."""
    functions = cast(RolloutFunctions, functions_of(objective))
    found: dict[str, dict[tuple[int, int], Tensor]] = {}
    for role in objective.roles:
        if want := functions.looks(role.name):
            own: dict[tuple[int, int], Tensor] = {}
            for number, batch in enumerate(batches):
                rows = look(context, models[role.name], batch, want, functions.temperature)
                own |= {(number, index): numbers for index, numbers in rows.items()}
            # Columns are computed from the rows of all ranks.
            found[role.name] = {key: numbers for of_rank in context.all_gather(own) for key, numbers in of_rank.items()}
    return functions.annotate(batches, found)


def look(context: Context, trainable: Trainable, batch: Batch, want: Wanted, temperature: float) -> dict[int, Tensor]:
    """The output ``want`` at the targets of this rank's rows of one mini-batch, by row index: (targets,)."""
    micro_batches, inputs = step_inputs(context, batch)
    found = trainable.forward_backward(inputs, want=want, temperature=temperature, loss=None)
    (name,) = want
    rows: dict[int, Tensor] = {}
    for micro_batch, mine, outputs in zip(micro_batches, inputs, found, strict=True):
        rows |= target_rows(micro_batch, mine, getattr(outputs, name))
    return rows
