"""One optimizer step, written once on the strategy interface, whatever the backend and the objective."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from conformance.backend import StepMetrics
from conformance.batch import Batch, Row
from conformance.objective import Objective
from conformance.observable import ROUTER_LOSS, ROUTER_Z_LOSS, ROUTING, model_key
from conformance.role import Role
from impl.collate import MicroBatch, collate
from impl.evaluation import Evaluation
from impl.micro_batches import Loss
from impl.moving import moved
from impl.objectives import ObjectiveFunctions, functions_of
from impl.outputs import Outputs
from impl.routing import (
    balance_of,
    choices_for,
    router_terms,
    routing_rows,
    z_loss_of,
)
from impl.strategy import Context, Trainable


def train_step(
    context: Context,
    models: Mapping[str, Trainable],
    objective: Objective,
    batch: Batch,
    *,
    on_gradients: Callable[[str], None],
    with_rows: bool = True,
) -> StepMetrics:
    """Run every model of the objective on one batch, in the order of its roles, and update those that are trained.

    ``on_gradients(model)`` is called when a model's gradients are complete and not clipped yet. Without ``with_rows``,
    the metrics have no rows: they are numbers of every token, which somebody who observes nothing should not wait for.
    """
    functions = functions_of(objective)
    micro_batches, inputs = step_inputs(context, batch)
    totals = step_totals(context, functions, micro_batches)
    values = totals | functions.summary(batch)
    found: list[Evaluation] = []
    others: list[dict[str, Outputs]] = [{} for _ in inputs]
    rows: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for role in objective.roles:
        if not functions.wants(role.name):
            continue
        trainable = models[role.name]
        found += _run(context, trainable, functions, role, inputs, totals, others)
        if role.trained:
            outputs = [known[role.name] for known in others]
            values |= _routing(context, role, inputs, outputs)
            if with_rows:
                rows |= _routing_rows(role, micro_batches, inputs, outputs)
            values |= _update(trainable, role, on_gradients)
    # Numbers are read after the last update is on its way, and together, because reading one waits for the device.
    sums: dict[str, Tensor] = {}
    highest = defaultdict[str, list[Tensor]](list)
    for index, evaluation in enumerate(found):
        micro_batch = index % len(inputs)
        for key, value in evaluation.values.items():
            sums[key] = sums[key] + value.double() if key in sums else value.double()
        for key, value in evaluation.highest.items():
            highest[key].append(value)
        for key, numbers in evaluation.rows.items() if with_rows else ():
            rows[key] |= target_rows(micro_batches[micro_batch], inputs[micro_batch], numbers)
    values |= of_all_ranks(context, sums, highest)  # the counts of ``evaluate`` replace the batch's own
    return StepMetrics(values=values, rows=dict(rows))


def of_all_ranks(
    context: Context, sums: Mapping[str, Tensor], highest: Mapping[str, Sequence[Tensor]]
) -> dict[str, float]:
    """The numbers of the whole step, from scalars of this rank: ``sums`` (float64) added up over data ranks, and the
    largest of ``highest`` on any rank."""
    numbers = torch.stack([value.to(context.config.device) for value in sums.values()])
    summed = dict(zip(sums, _summed(context, numbers), strict=True))
    if not highest:
        return summed
    own = torch.stack([torch.stack([*values]).amax() for values in highest.values()])
    every = zip(*context.all_gather(own.tolist()), strict=True)  # by key, the numbers of all ranks
    return summed | {key: largest(values) for key, values in zip(highest, every, strict=True)}


def _summed(context: Context, own: Tensor) -> list[float]:
    """Each of some numbers added up over data ranks, all in one collective, because each waits for the device."""
    return list(context.all_reduce_tensor(own).tolist())


def largest(values: Sequence[float]) -> float:
    """The largest of some numbers; NaN if one of them is NaN, which Python's ``max`` loses behind another number."""
    return float(np.max(values))


def step_inputs(context: Context, batch: Batch) -> tuple[list[tuple[Row, ...]], list[MicroBatch]]:
    """This rank's micro-batches of a step, as rows and as tensors."""
    micro_batches = context.setup_dataloader(batch)
    device, multiple = context.config.device, context.sequence_multiple
    return micro_batches, [collate(rows, multiple_of=multiple).to(device) for rows in micro_batches]


def step_totals(
    context: Context, functions: ObjectiveFunctions, micro_batches: Sequence[Sequence[Row]]
) -> dict[str, float]:
    """The objective's sums over the whole optimizer step and all ranks; one of them is the denominator of its loss."""
    own = functions.totals([row for rows in micro_batches for row in rows])
    numbers = moved(torch.tensor([*own.values()], dtype=torch.float64), context.config.device)
    return dict(zip(own, _summed(context, numbers), strict=True))


def target_rows(rows: Sequence[Row], inputs: MicroBatch, numbers: Tensor) -> dict[int, Tensor]:
    """The numbers (rows, length) at each row's targets, by the row's index in the optimizer step: (targets,), CPU.

    Rows without targets are left out.
    """
    numbers, targets = numbers.cpu(), inputs.targets.cpu()  # at once, because each copy waits for the device
    return {row.index: numbers[r][targets[r]] for r, row in enumerate(rows) if row.target_count}


def _run(
    context: Context,
    trainable: Trainable,
    functions: ObjectiveFunctions,
    role: Role,
    inputs: Sequence[MicroBatch],
    totals: Mapping[str, float],
    others: Sequence[dict[str, Outputs]],
) -> list[Evaluation]:
    """Run one model on all micro-batches: forward, and backward if it is trained. Adds its outputs to ``others``."""

    def evaluate(index: int, outputs: Outputs) -> Evaluation:
        return functions.evaluate(role.name, outputs, inputs[index], totals=totals, others=others[index])

    replayed = [choices_for(one, model_key(role.prefix, ROUTING)) for one in inputs]
    terms = router_terms(context, trainable, replayed) if role.trained else None

    def loss(index: int, outputs: Outputs) -> Tensor:
        value = evaluate(index, outputs).loss
        assert value is not None, f"the objective gives no loss for {role.name}, which is trained"
        return value

    asked: Loss | None = loss if role.trained else None
    found = trainable.forward_backward(
        replayed, want=functions.wants(role.name), temperature=functions.temperature, loss=asked, terms=terms
    )
    # Again without autograd: most ranks of a pipeline have not computed the loss, but all ranks have the outputs now.
    with torch.no_grad():
        evaluations = [evaluate(index, outputs) for index, outputs in enumerate(found)]
    for known, outputs in zip(others, found, strict=True):
        known[role.name] = outputs
    return evaluations


def _routing(context: Context, role: Role, inputs: Sequence[MicroBatch], found: Sequence[Outputs]) -> dict[str, float]:
    """The numbers of a model's routers; none of a model without any."""
    if found[0].routing is None:
        return {}
    values = {ROUTER_LOSS: balance_of(context, inputs, found).loss.item()}
    if (of_logits := z_loss_of(context, inputs, found)) is not None:
        values[ROUTER_Z_LOSS] = of_logits
    return {model_key(role.prefix, key): x for key, x in values.items()}


def _routing_rows(
    role: Role, micro_batches: Sequence[Sequence[Row]], inputs: Sequence[MicroBatch], found: Sequence[Outputs]
) -> dict[str, dict[int, Tensor]]:
    """What is recorded of a model's routers for each row; nothing of a model without any."""
    if found[0].routing is None:
        return {}
    rows: dict[int, Tensor] = {}
    for micro_batch, mine, outputs in zip(micro_batches, inputs, found, strict=True):
        rows |= routing_rows(mine, outputs, [row.index for row in micro_batch])
    return {model_key(role.prefix, ROUTING): rows}


def _update(trainable: Trainable, role: Role, on_gradients: Callable[[str], None]) -> dict[str, float]:
    lr = trainable.learning_rate()
    trainable.finish_gradients()
    on_gradients(role.name)
    norm = trainable.optimizer_step()
    values = {model_key(role.prefix, "lr"): lr}
    return values if norm is None else values | {model_key(role.prefix, "grad_norm"): norm}
