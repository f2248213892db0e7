"""Runs one optimizer step for any backend and objective, and the passes over a rollout before its first update.

The columns of a rollout are computed before its first update and kept for all of its updates.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from conformance.backends.protocol import StepMetrics
from conformance.core.errors import UsageError
from conformance.spec.batch import Batch, Row
from conformance.spec.objectives import Objective
from conformance.spec.observables import ROUTER_LOSS, ROUTER_Z_LOSS, ROUTING, Role, model_key, rollout_routing
from impl.interface.distributed import Reading, moved
from impl.interface.micro_batches import Evaluation, Loss, MicroBatch, Outputs, Wanted, collate
from impl.interface.trainable import Context, Trainable
from impl.models.router import balance_of, choices_for, router_terms, routing_rows, z_loss_of
from impl.objectives.policy_gradient import ObjectiveFunctions, functions_of

Rows = dict[tuple[int, int], Tensor]  # by mini-batch and row


@runtime_checkable
class AheadFunctions(Protocol):
    """Declares what an objective adds to impl.objectives.policy_gradient.ObjectiveFunctions if its losses need sums
    over outputs of the whole step.
    """

    def ahead(
        self, outputs: Outputs, inputs: MicroBatch, *, totals: Mapping[str, Tensor], others: Mapping[str, Outputs]
    ) -> dict[str, Tensor]:
        """Returns scalars of one micro-batch, by observable, from a pass without gradients over the whole step.

        Their sums over micro-batches and data ranks are further totals of the step.
        """
        ...


class RolloutFunctions(Protocol):
    """Declares the functions of an objective on rollouts in addition to
    impl.objectives.policy_gradient.ObjectiveFunctions.
    """

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
    """Adds the columns of the rollout to a row of a step, and takes its targets. The row's own columns win: an update
    has its own experts."""
    pairs = zip(row.documents, known.documents, strict=True)
    documents = (replace(own, targets=of.targets, columns={**of.columns, **own.columns}) for own, of in pairs)
    return replace(row, documents=tuple(documents))


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
    (name,) = (str(one) for one in want)
    observed = OutputRows(rows={}, routing={})
    for micro_batch, tensors, outputs in zip(micro_batches, inputs, found, strict=True):
        observed.rows.update(target_rows(micro_batch, tensors, getattr(outputs, name)))
        if outputs.routing is not None:
            observed.routing.update(routing_rows(tensors, outputs, [row.index for row in micro_batch]))
    return observed


def train_step(
    context: Context,
    models: Mapping[str, Trainable],
    objective: Objective,
    batch: Batch,
    *,
    on_gradients: Callable[[str], None],
    with_rows: bool = True,
) -> StepMetrics:
    """Runs every model of the objective on one batch, in the order of its roles, and updates the trained ones.

    ``on_gradients(model)`` is called when a model's gradients are complete and not clipped yet. Without ``with_rows``,
    the metrics have no rows: a training that is not observed should not wait for a number per token.
    """
    functions = functions_of(objective)
    micro_batches, inputs = step_inputs(context, batch)
    totals = step_totals(context, functions, micro_batches)
    values = dict(functions.summary(batch))
    found: list[Evaluation] = []
    earlier: list[dict[str, Outputs]] = [{} for _ in inputs]
    rows: dict[str, dict[int, Tensor]] = defaultdict(dict)
    roles = [role for role in objective.roles if functions.wants(role.name)]
    for role in roles:
        trainable = models[role.name]
        if role.trained and isinstance(functions, AheadFunctions):
            totals |= _ahead(context, trainable, functions, role, inputs, totals, earlier)
        found += _run(context, trainable, functions, role, inputs, totals, earlier)
        if role is roles[-1]:  # the counts of ``evaluate`` replace the batch's own
            reduced = totals | of_all_ranks(context, *sum_evaluations(found))
            # The copy to the host is queued before the last update. If this update is clipped, its norm is read later,
            # so these numbers have arrived by then.
            reading = Reading(torch.stack([*reduced.values()]))
        if role.trained:
            outputs = [outputs_by_role[role.name] for outputs_by_role in earlier]
            values |= _routing(context, role, inputs, outputs)
            if with_rows:
                rows |= _routing_rows(role, micro_batches, inputs, outputs)
            values |= _update(trainable, role, on_gradients)
    for index, evaluation in enumerate(found if with_rows else ()):
        micro_batch = index % len(inputs)
        for key, numbers in evaluation.rows.items():
            rows[key] |= target_rows(micro_batches[micro_batch], inputs[micro_batch], numbers)
    return StepMetrics(values=values | dict(zip(reduced, reading.numbers(), strict=True)), rows=dict(rows))


def sum_evaluations(found: Sequence[Evaluation]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the sums (float64) and the maxima over all evaluations of this rank: scalars, by observable."""
    sums: dict[str, Tensor] = {}
    highest = defaultdict[str, list[Tensor]](list)
    for evaluation in found:
        for key, value in evaluation.values.items():
            sums[key] = sums[key] + value.double() if key in sums else value.double()
        for key, value in evaluation.highest.items():
            highest[key].append(value.double())
    return sums, {key: torch.stack(values).amax() for key, values in highest.items()}


def of_all_ranks(context: Context, sums: Mapping[str, Tensor], highest: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All-reduces float64 scalars over data-parallel ranks: SUM of ``sums``, MAX of ``highest``. NaN propagates."""
    numbers = torch.stack([*sums.values(), *highest.values()]).to(context.config.device)
    table = numbers.new_zeros(context.data_size, len(numbers))  # one row per rank: a MAX of NCCL or gloo may lose a NaN
    table[context.data_rank] = numbers
    every = context.all_reduce_tensor(table)
    summed, largest = every[:, : len(sums)].sum(dim=0), every[:, len(sums) :].amax(dim=0)
    return dict(zip([*sums, *highest], [*summed, *largest], strict=True))


def step_inputs(context: Context, batch: Batch) -> tuple[list[tuple[Row, ...]], list[MicroBatch]]:
    """Returns this rank's micro-batches of a step, as rows and as tensors."""
    micro_batches = context.setup_dataloader(batch)
    device, multiple = context.config.device, context.sequence_multiple
    return micro_batches, [collate(rows, multiple_of=multiple).to(device) for rows in micro_batches]


def step_totals(
    context: Context, functions: ObjectiveFunctions, micro_batches: Sequence[Sequence[Row]]
) -> dict[str, Tensor]:
    """Sums the objective's totals over the whole optimizer step and all ranks; one is the denominator of its loss.

    They are float64 scalars on the device, because reading them would make the host wait.
    """
    own = functions.totals([row for rows in micro_batches for row in rows])
    numbers = moved(torch.tensor([*own.values()], dtype=torch.float64), context.config.device)
    return dict(zip(own, context.all_reduce_tensor(numbers), strict=True))


def target_rows(rows: Sequence[Row], inputs: MicroBatch, numbers: Tensor) -> dict[int, Tensor]:
    """Returns the numbers (rows, length) at each row's targets, by the row's index in the step: (targets,), CPU.

    Rows without targets are left out.
    """
    numbers, targets = numbers.cpu(), inputs.targets.cpu()  # at once, because each copy waits for the device
    return {row.index: numbers[r][targets[r]] for r, row in enumerate(rows) if row.target_count}


def _ahead(
    context: Context,
    trainable: Trainable,
    functions: ObjectiveFunctions,
    role: Role,
    inputs: Sequence[MicroBatch],
    totals: Mapping[str, Tensor],
    earlier: Sequence[Mapping[str, Outputs]],
) -> dict[str, Tensor]:
    """Returns the totals that AheadFunctions declares, from a pass without gradients."""
    assert isinstance(functions, AheadFunctions)
    replayed = [choices_for(one, model_key(role.prefix, ROUTING)) for one in inputs]
    want, temperature = functions.wants(role.name), functions.temperature
    found = trainable.forward_backward(replayed, want=want, temperature=temperature, loss=None)
    totals = _in_default_dtype(totals)
    evaluations = [
        Evaluation(loss=None, values=functions.ahead(outputs, one, totals=totals, others=others))
        for outputs, one, others in zip(found, inputs, earlier, strict=True)
    ]
    return of_all_ranks(context, *sum_evaluations(evaluations))


def _in_default_dtype(totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns totals in the dtype of the outputs."""
    return {key: total.to(torch.get_default_dtype()) for key, total in totals.items()}


def _run(
    context: Context,
    trainable: Trainable,
    functions: ObjectiveFunctions,
    role: Role,
    inputs: Sequence[MicroBatch],
    totals: Mapping[str, Tensor],
    earlier: Sequence[dict[str, Outputs]],
) -> list[Evaluation]:
    """Runs one model on all micro-batches, forward, and backward if it is trained. Adds its outputs to ``earlier``."""
    totals = _in_default_dtype(totals)

    def evaluate(index: int, outputs: Outputs) -> Evaluation:
        return functions.evaluate(role.name, outputs, inputs[index], totals=totals, others=earlier[index])

    replayed = [choices_for(one, model_key(role.prefix, ROUTING)) for one in inputs]
    terms = router_terms(context, trainable, replayed) if role.trained else None

    def loss(index: int, outputs: Outputs) -> Tensor:
        value = evaluate(index, outputs).loss
        assert value is not None, f"the objective gives no loss for {role.name}, which is trained"
        return value

    loss_or_none: Loss | None = loss if role.trained else None
    found = trainable.forward_backward(
        replayed, want=functions.wants(role.name), temperature=functions.temperature, loss=loss_or_none, terms=terms
    )
    # Again without autograd: most ranks of a pipeline have not computed the loss, but now all ranks have the outputs.
    with torch.no_grad():
        evaluations = [evaluate(index, outputs) for index, outputs in enumerate(found)]
    for outputs_by_role, outputs in zip(earlier, found, strict=True):
        outputs_by_role[role.name] = outputs
    return evaluations


def _routing(context: Context, role: Role, inputs: Sequence[MicroBatch], found: Sequence[Outputs]) -> dict[str, float]:
    """Returns the router losses of a model; empty for a model without routers."""
    if found[0].routing is None:
        return {}
    values = {ROUTER_LOSS: balance_of(context, inputs, found).loss.item()}
    if (z_loss := z_loss_of(context, inputs, found)) is not None:
        values[ROUTER_Z_LOSS] = z_loss
    return {model_key(role.prefix, key): x for key, x in values.items()}


def _routing_rows(
    role: Role, micro_batches: Sequence[Sequence[Row]], inputs: Sequence[MicroBatch], found: Sequence[Outputs]
) -> dict[str, dict[int, Tensor]]:
    """Returns the recorded routing of each row; empty for a model without routers."""
    if found[0].routing is None:
        return {}
    rows: dict[int, Tensor] = {}
    for micro_batch, tensors, outputs in zip(micro_batches, inputs, found, strict=True):
        rows |= routing_rows(tensors, outputs, [row.index for row in micro_batch])
    return {model_key(role.prefix, ROUTING): rows}


def _update(trainable: Trainable, role: Role, on_gradients: Callable[[str], None]) -> dict[str, float]:
    lr = trainable.learning_rate()
    trainable.finish_gradients()
    on_gradients(role.name)
    norm = trainable.optimizer_step()
    values = {model_key(role.prefix, "lr"): lr}
    return values if norm is None else values | {model_key(role.prefix, "grad_norm"): norm}
