"""Roll-outs: the numbers that are computed before the first update of a roll-out and kept for all its updates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

from torch import Tensor

from conformance.core.errors import UsageError
from conformance.spec.batch import Batch, Row
from conformance.spec.objectives import Objective
from conformance.spec.observables import ROUTING, rollout_routing
from impl.engine.trainer import step_inputs, target_rows
from impl.interface.outputs import Wanted
from impl.interface.protocol import Context, Trainable
from impl.models.router import choices_for, routing_rows
from impl.objectives.registry import functions_of

Rows = dict[tuple[int, int], Tensor]  # by mini-batch and row


class RolloutFunctions(Protocol):
    """The functions that an objective on roll-outs has in addition to impl.objectives.registry.ObjectiveFunctions."""

    temperature: float

    def looks(self, model: str) -> Wanted:
        """The one output of ``model`` that is needed before the first update; empty if none is."""
        ...

    def annotate(self, batches: Sequence[Batch], found: Mapping[str, Mapping[tuple[int, int], Tensor]]) -> list[Batch]:
        """The mini-batches with the columns that ``evaluate`` reads.

        ``found[model][b, r]``: that output at the targets of row r of mini-batch b, (targets,).
        """
        ...


@dataclass(frozen=True)
class Looked:
    """What is known of a roll-out before its first update.

    batches: its mini-batches with the columns that ``annotate`` has added. routing: what routers did in the passes that
    these are made of, of this rank's rows: by the key of its observable, then by mini-batch and row.
    """

    batches: Sequence[Batch]
    routing: Mapping[str, Rows] = field(default_factory=dict)


@dataclass
class Rollouts:
    """Keeps what is known of the current roll-out, which began at step ``first``."""

    context: Context
    models: Mapping[str, Trainable]
    objective: Objective
    known: Looked = field(default_factory=lambda: Looked(()))
    first: int = 0

    def annotated(self, batch: Batch) -> Batch:
        """``batch`` with all the columns that its objective reads. Collective at the first step of a roll-out.

        Raises UsageError if training begins in the middle of a roll-out.
        """
        if batch.rollout:
            self.known, self.first = look_ahead(self.context, self.models, self.objective, batch.rollout), batch.step
        if not self.known.batches:
            raise UsageError(
                f"step {batch.step} is in the middle of a roll-out, whose first update needs what was computed before "
                f"it; let every leg begin with a roll-out: steps in multiples of mini_batches x ppo_epochs"
            )
        known = self.known.batches[self._mini_batch(batch)]
        pairs = zip(batch.rows, known.rows, strict=True)
        return replace(batch, rows=tuple(_with_columns(own, other) for own, other in pairs))

    def routing(self, batch: Batch) -> dict[str, dict[int, Tensor]]:
        """What routers did in the passes before the first update, of this rank's rows of ``batch``, by row."""
        number = self._mini_batch(batch)
        return {
            key: {row: weights for (of, row), weights in rows.items() if of == number}
            for key, rows in self.known.routing.items()
        }

    def _mini_batch(self, batch: Batch) -> int:
        return (batch.step - self.first) % len(self.known.batches)


def _with_columns(row: Row, known: Row) -> Row:
    """A row of a step with the columns that its roll-out has. Its own stay: the experts of an update are the step's."""
    columns = [{**other.columns, **own.columns} for own, other in zip(row.documents, known.documents, strict=True)]
    documents = zip(row.documents, columns, strict=True)
    return replace(row, documents=tuple(replace(document, columns=all_of_it) for document, all_of_it in documents))


def look_ahead(
    context: Context, models: Mapping[str, Trainable], objective: Objective, batches: Sequence[Batch]
) -> Looked:
    """Run forward passes over a whole roll-out, and return its mini-batches with the columns computed from them."""
    functions = cast(RolloutFunctions, functions_of(objective))
    found: dict[str, Rows] = {}
    routing: dict[str, Rows] = {}
    for role in objective.roles:
        if want := functions.looks(role.name):
            key = rollout_routing(role.prefix, trained=role.trained)
            own: Rows = {}
            routed: Rows = {}
            for number, batch in enumerate(batches):
                seen = look(context, models[role.name], batch, want, functions.temperature, key)
                own |= {(number, index): numbers for index, numbers in seen.rows.items()}
                routed |= {(number, index): weights for index, weights in seen.routing.items()}
            # Columns are computed from the rows of all ranks.
            found[role.name] = {key: numbers for of_rank in context.all_gather(own) for key, numbers in of_rank.items()}
            routing |= {key: routed} if routed else {}
    return Looked(functions.annotate(batches, found), routing)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """By row index: an output at its targets, (targets,), and what routers did, (tokens x routers x experts,), where
    the model has any."""

    rows: dict[int, Tensor]
    routing: dict[int, Tensor]


def look(
    context: Context, trainable: Trainable, batch: Batch, want: Wanted, temperature: float, routing: str = ROUTING
) -> Seen:
    """The output ``want`` of this rank's rows of one mini-batch. ``routing``: the key that its choices of experts have,
    where they are given."""
    micro_batches, inputs = step_inputs(context, batch)
    replayed = [choices_for(one, routing) for one in inputs]
    found = trainable.forward_backward(replayed, want=want, temperature=temperature, loss=None)
    (name,) = want
    seen = Seen(rows={}, routing={})
    for micro_batch, mine, outputs in zip(micro_batches, inputs, found, strict=True):
        seen.rows.update(target_rows(micro_batch, mine, getattr(outputs, name)))
        if outputs.routing is not None:
            seen.routing.update(routing_rows(mine, outputs, [row.index for row in micro_batch]))
    return seen
