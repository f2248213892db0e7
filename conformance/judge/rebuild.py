"""Rebuild: the weights after a step, from what the cell itself recorded before: its gradients, and its weights.

Serves claim 2. A cell's own gradients carry the noise of its precision, so against the oracle an update can only be
judged as loosely as they are: in bf16 a lost weight decay disappears in it. Given the gradients, an update has no noise
but the rounding of the optimizer's own arithmetic, which is float32 in every precision below the exact tier. So it is
computed again in float64 and compared element by element: clipping, moments, decay, bias correction and rate.
"""

import math
from collections.abc import Iterator, Sequence, Set

import torch

from conformance.judge.compare import named, unnamed_norm
from conformance.judge.distance import Tensors, finite, place
from conformance.judge.tolerance import NORM_ROUNDINGS, ROUNDING, Measurement
from conformance.observable import AGAINST_REBUILT, SKIPPED, Observable
from conformance.oracle.training import clip, global_norm, make_optimizer
from conformance.record.tensors import Record
from conformance.scenario import Scenario

MASTER_ROUNDING = {"exact": 2.0**-53, "fp32": 2.0**-24, "bf16": 2.0**-24, "fp16": 2.0**-24}
REBUILT_ROUNDINGS = 4  # of a weight; a multiplication for decay and a subtraction of the update round it twice
UPDATE_ROUNDINGS = 64  # of an update: norm and clipping, two moments, a square root, divisions, and the rate

UNCHANGED = " where the update is skipped"


def rebuilt_updates(legs: Sequence[Record], oracle: Record, scenario: Scenario) -> Iterator[Measurement]:
    """The distance of every weight after a step from the one that is rebuilt, largest element.

    An error is relative to |w| + (UPDATE_ROUNDINGS / REBUILT_ROUNDINGS) |u|, where w is the weight before and u what
    the update would be if no two terms of it cancelled. Nothing is rebuilt from an unobserved step on, because the
    optimizer's moments are not known then, until a leg begins with a new optimizer. Where an update is skipped, because
    gradients overflow in fp16, no weight may change at all.
    """
    declared = [o for o in oracle.observables if o.rebuilt]
    for key in dict.fromkeys(o.key for o in declared):
        yield from _of_model(legs, oracle, scenario, [o for o in declared if o.key == key])


def _of_model(
    legs: Sequence[Record], oracle: Record, scenario: Scenario, weights: Sequence[Observable]
) -> Iterator[Measurement]:
    key = weights[0].key
    prefix = key.removesuffix("weight")
    gradient = f"{prefix}gradient"
    rates = {step.step: step.value(f"{prefix}lr") for step in oracle.steps}
    unnamed = {step.step: unnamed_norm(step, prefix) for step in oracle.steps}
    skipped = {step.step for step in oracle.steps if step.value(f"{prefix}{SKIPPED}")}
    known = False
    trained: Set[str] = frozenset()
    for leg in legs:
        before = _float64(leg.loaded.tensors(), key)
        if leg.header["optimizer"] == "new":
            optimizer, sizes, known = make_optimizer(scenario.optimizer), make_optimizer(scenario.optimizer), True
        for step in leg.steps:
            tensors, lr = step.tensors(), rates.get(step.step)
            gradients, after = _float64(tensors, gradient), _float64(tensors, key)
            stage = next(o.stage for o in weights if o.applies(step.step))
            if step.step in skipped:
                yield from _unchanged(before, after, stage=stage, step=step.step)
                before = after
                continue
            trained = trained or gradients.keys()  # other weights are frozen: those of the oracle do not move either
            known = known and lr is not None and bool(gradients) and gradients.keys() == trained
            known = known and gradients.keys() <= after.keys() & before.keys()
            known = known and all(g.shape == after[name].shape == before[name].shape for name, g in gradients.items())
            if known:
                assert lr is not None
                before = {name: before[name] for name in gradients}
                norm = math.hypot(global_norm(gradients), unnamed[step.step])
                norm = _reported(step.value(f"{prefix}grad_norm"), norm, gradients, scenario)
                clipped = clip(gradients, norm, scenario.optimizer.max_grad_norm)
                rebuilt = optimizer.step(before, clipped, lr)
                nothing = {name: torch.zeros_like(weight) for name, weight in before.items()}
                moved = sizes.step(nothing, {name: g.abs() for name, g in clipped.items()}, lr)
                for name in gradients:
                    weight = after[name]
                    unit = before[name].abs() + UPDATE_ROUNDINGS / REBUILT_ROUNDINGS * moved[name].abs()
                    off = (weight - rebuilt[name]).abs() / unit.clamp(min=torch.finfo(torch.float64).tiny)
                    at = int(off.argmax())
                    yield Measurement(
                        stage=stage,
                        tensor=name + AGAINST_REBUILT,
                        step=step.step,
                        error=finite(off.max().item()),
                        where=place(at, weight),
                        fixed=REBUILT_ROUNDINGS * MASTER_ROUNDING[scenario.precision],
                    )
            before = after


def _reported(own: float | None, norm: float, gradients: Tensors, scenario: Scenario) -> float:
    """The norm that the cell clips by: the one that it reports, where it differs from the rebuilt one by no more than
    adding up in another order does, else the rebuilt one. The reported norm is judged by itself.

    Errors of n additions grow as the square root of n (Higham, Accuracy and Stability of Numerical Algorithms, section
    2.8). At 56 million parameters torch's norm is 1.3e-14 off in float64, twice what a whole update may be.
    """
    if own is None:
        return norm
    roundings = math.sqrt(sum(gradient.numel() for gradient in gradients.values()))
    apart = min(roundings * MASTER_ROUNDING[scenario.precision], NORM_ROUNDINGS * ROUNDING)
    return own if abs(own - norm) <= apart * norm else norm


def _unchanged(before: Tensors, after: Tensors, *, stage: str, step: int) -> Iterator[Measurement]:
    """The largest relative change of each weight that is known before and after a step; none is allowed."""
    for name in before.keys() & after.keys():
        change = (after[name] - before[name]).abs() / before[name].abs().clamp(min=torch.finfo(torch.float64).tiny)
        where = place(int(change.argmax()), change)
        error = finite(change.max().item())
        yield Measurement(stage=stage, tensor=name + UNCHANGED, step=step, error=error, where=where, fixed=0.0)


def _float64(tensors: Tensors, key: str) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in named(tensors, key).items()}
