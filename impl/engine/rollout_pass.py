"""Computes the columns of a rollout before its first update and keeps them for all of its updates."""

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
    """Declares the functions of an objective on rollouts in addition to impl.objectives.registry.ObjectiveFunctions."""

    temperature: float

    def rollout_wants(self, model: str) -> Wanted:
        """Returns the one output of ``model`` that is needed before the first update; empty if none is needed."""
        ...

    def annotate(self, batches: Sequence[Batch], found: Mapping[str, Mapping[tuple[int, int], Tensor]]) -> list[Batch]:
        """Returns the mini-batches with the columns that ``evaluate`` reads.

        ``found[model][b, r]``: that output at the targets of row r of mini-batch b, (targets,).
        """
        ...


@dataclass(frozen=True)
class RolloutColumns:
    """Holds the results of the forward passes before the first update of a rollout.

    batches: the mini-batches with the columns that ``annotate`` has added.
    routing: the routers' choices in these passes for this rank's rows: by the key of the observable, then by mini-batch
        and row.
    """

    batches: Sequence[Batch]
    routing: Mapping[str, Rows] = field(default_factory=dict)


@dataclass
class Rollouts:
    """Keeps the results of the current rollout, which began at step ``first``."""

    context: Context
    models: Mapping[str, Trainable]
    objective: Objective
    known: RolloutColumns = field(default_factory=lambda: RolloutColumns(()))
    first: int = 0

    def annotated(self, batch: Batch) -> Batch:
        """Returns ``batch`` with all columns that its objective reads. Collective at the first step of a rollout.

        Raises UsageError if training begins in the middle of a rollout.
        """
        if batch.rollout:
            self.known = rollout_columns(self.context, self.models, self.objective, batch.rollout)
            self.first = batch.step
        if not self.known.batches:
            raise UsageError(
                f"step {batch.step} is in the middle of a rollout, but the columns computed before the rollout's first "
                f"update are missing; begin every phase with a rollout: steps in multiples of mini_batches x ppo_epochs"
            )
        known = self.known.batches[self._mini_batch(batch)]
        pairs = zip(batch.rows, known.rows, strict=True)
        return replace(batch, rows=tuple(_with_columns(own, other) for own, other in pairs))

    def routing(self, batch: Batch) -> dict[str, dict[int, Tensor]]:
        """Returns the routers' choices before the first update for this rank's rows of ``batch``, by row."""
        number = self._mini_batch(batch)
        return {
            key: {row: weights for (mini_batch, row), weights in rows.items() if mini_batch == number}
            for key, rows in self.known.routing.items()
        }

    def _mini_batch(self, batch: Batch) -> int:
        return (batch.step - self.first) % len(self.known.batches)


def _with_columns(row: Row, known: Row) -> Row:
    """Adds the columns of the rollout to a row of a step. The row's own columns win: an update has its own experts."""
    columns = [{**other.columns, **own.columns} for own, other in zip(row.documents, known.documents, strict=True)]
    documents = zip(row.documents, columns, strict=True)
    return replace(row, documents=tuple(replace(document, columns=merged) for document, merged in documents))


def rollout_columns(
    context: Context, models: Mapping[str, Trainable], objective: Objective, batches: Sequence[Batch]
) -> RolloutColumns:
    """Runs forward passes over a whole rollout and returns its mini-batches with the columns computed from them."""
    functions = cast(RolloutFunctions, functions_of(objective))
    found: dict[str, Rows] = {}
    routing: dict[str, Rows] = {}
    for role in objective.roles:
        if want := functions.rollout_wants(role.name):
            key = rollout_routing(role.prefix, trained=role.trained)
            own: Rows = {}
            routed: Rows = {}
            for number, batch in enumerate(batches):
                observed = output_rows(context, models[role.name], batch, want, functions.temperature, key)
                own |= {(number, index): numbers for index, numbers in observed.rows.items()}
                routed |= {(number, index): weights for index, weights in observed.routing.items()}
            # Columns are computed from the rows of all ranks.
            found[role.name] = {key: numbers for of_rank in context.all_gather(own) for key, numbers in of_rank.items()}
            routing |= {key: routed} if routed else {}
    return RolloutColumns(functions.annotate(batches, found), routing)


@dataclass(frozen=True, kw_only=True)
class OutputRows:
    """Holds the results of a forward pass, by row index.

    rows: an output at the targets, (targets,).
    routing: the routers' choices, (tokens x routers x experts,).
    """

    rows: dict[int, Tensor]
    routing: dict[int, Tensor]


def output_rows(
    context: Context, trainable: Trainable, batch: Batch, want: Wanted, temperature: float, routing: str = ROUTING
) -> OutputRows:
    """Returns the output ``want`` of this rank's rows of one mini-batch.

    ``routing``: the key of the experts' choices in the columns, if they are given.
    """
    micro_batches, inputs = step_inputs(context, batch)
    replayed = [choices_for(one, routing) for one in inputs]
    found = trainable.forward_backward(replayed, want=want, temperature=temperature, loss=None)
    (name,) = want
    observed = OutputRows(rows={}, routing={})
    for micro_batch, tensors, outputs in zip(micro_batches, inputs, found, strict=True):
        observed.rows.update(target_rows(micro_batch, tensors, getattr(outputs, name)))
        if outputs.routing is not None:
            observed.routing.update(routing_rows(tensors, outputs, [row.index for row in micro_batch]))
    return observed
