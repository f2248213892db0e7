"""Amplified noise: what AdamW with a small eps makes of rounding, and how far two honest runs drift apart by it.

Serves claim 6. AdamW divides by sqrt(v) + eps. An element whose gradients are nothing but rounding moves by up to twice
the rate, in a random direction; with the usual eps of 1e-8 every model has such elements. A single-process run shows a
few of them by chance, which is no measure of how many another honest run may show. So they are looked for: an element
is one of them where d / (sqrt(v) + eps) is above NOISY times the relative noise of its tensor's gradient. Here d is the
root mean square of the noise in the element's row.

The exact tier has no run that shows noise. There it is the error of the cell's own gradients, as far as it is within
their bound: what is above it is no rounding, and nothing is allowed for it. All elements are counted, because what they
may do is far below the bound of an update unless it is amplified. Of a sketched tensor they are looked for in its
sample.

Shifted rows: how far the rounding of values may take a row of a value model's embedding.

Serves claim 6. What the values of a document add to a row may nearly cancel, where their errors, which are alike, do
not (docs/explanations/tolerances.md). How large these are is told by single-process runs: the root mean square, over
hundreds of
values, of the errors of the gradients of the loss with respect to them, which is not small by luck. How far a row moves
with them is told by the oracle (conformance.oracle.step).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from conformance.judge.tensor_views import Leeway, StepViews, Tensors, floor_of, movement
from conformance.judge.tolerance import EXACT, NOISE_FACTOR, OF_ROWS, Key
from conformance.oracle.optimizer import clip_factor
from conformance.records.record_format import AGAIN, RecordError
from conformance.records.step_tensors import Record, StepRecord
from conformance.spec.observables import SHIFTED, VALUE_GRADIENT
from conformance.spec.scenario import Scenario

NOISY = 3.0


@dataclass(kw_only=True)
class Amplified:
    """``updates``: how far noisy elements may take a weight, relative as its measurement is, by stage, tensor and step.

    ``drift``: by step, how much further apart weights may be before it than those of the single-process run are.
    """

    updates: dict[tuple[str, str, int], float] = field(default_factory=dict)
    drift: dict[int, float] = field(default_factory=dict)


def amplified_noise(runs: Sequence[Sequence[StepRecord]], oracle: Record, scenario: Scenario) -> Amplified:
    """From the steps of the single-process runs in the cell's precision (in the exact tier: of the cell itself) and the
    float64 oracle; nothing for SGD."""
    found = Amplified()
    if scenario.optimizer.name != "adamw":
        return found
    for key in dict.fromkeys(o.key for o in oracle.observables if o.rebuilt):
        weights = [o for o in oracle.observables if o.key == key and o.rebuilt]
        for run in runs:
            for step, errors, drift in _of_model(run, oracle, scenario, key):
                stage = next(o.stage for o in weights if o.applies(step))
                for name, error in errors.items():
                    place = stage, name, step
                    found.updates[place] = max(error, found.updates.get(place, 0.0))
                found.drift[step + 1] = max(drift, found.drift.get(step + 1, 1.0))
    found.updates = {place: error for place, error in found.updates.items() if error}
    return found


def _of_model(
    run: Sequence[StepRecord], oracle: Record, scenario: Scenario, key: str
) -> Iterator[tuple[int, dict[str, float], float]]:
    """After each step: the relative error of each tensor that is possible, and the drift that follows."""
    config, exact = scenario.optimizer, scenario.tier.is_exact
    gradient, rate = (key.removesuffix("weight") + name for name in ("gradient", "lr"))
    start, steps = _float64(StepViews(oracle.loaded.tensors()), key), {step.step: step for step in run}
    second, moved = ({name: torch.zeros_like(weight) for name, weight in start.items()} for _ in range(2))
    noise: dict[str, torch.Tensor] = {}  # of a step without gradients it is that of the step before
    count = 0  # of updates
    for reference in (step for step in oracle.steps if step.step in steps):
        own, expected = StepViews(steps[reference.step].tensors()), StepViews(reference.tensors())
        lr, weights, gradients = reference.value(rate) or 0.0, _float64(expected, key), _float64(expected, gradient)
        factor = clip_factor(expected[gradient].norm, config.max_grad_norm)
        count += bool(gradients)  # there are none of an update that is skipped
        noise |= _noise(_float64(own, gradient), gradients, most=EXACT if exact else math.inf)
        for name, g in gradients.items():
            error = noise.get(name, torch.zeros_like(g))
            relative = error.norm() / g.norm().clamp(min=torch.finfo(g.dtype).tiny)
            rows = (factor * error).reshape(len(g) if g.ndim > 1 else 1, -1)
            d = rows.square().mean(dim=1).sqrt().reshape(-1, *[1] * (g.ndim - 1))
            second[name] = config.betas[1] * second[name] + (1 - config.betas[1]) * (factor * g).square()
            size = (second[name] / (1 - config.betas[1] ** count)).sqrt() + config.eps
            least = 0.0 if exact else NOISY * relative
            moved[name] = moved[name] + torch.where(d > least * size, lr * (d / size).clamp(max=2.0), 0.0)
        movements = movement(weights, start)
        floor = floor_of(movements)
        errors = {
            name: m.norm().item() / (max(movements[name].norm().item(), floor) or 1.0) for name, m in moved.items()
        }
        possible = _norm(moved.values())
        apart = _norm([w - weights[name] for name, w in _float64(own, key).items()]) if not exact else 0.0
        yield reference.step, errors, max(1.0, possible / apart) if apart else 1.0


def _noise(own: Tensors, reference: Tensors, *, most: float) -> dict[str, torch.Tensor]:
    """The errors of gradients, of those that are at most ``most`` off, as their measurement is."""
    floor = floor_of(reference)
    errors = {name: own[name] - g for name, g in reference.items() if name in own and own[name].shape == g.shape}
    return {name: e for name, e in errors.items() if e.norm() <= most * max(reference[name].norm().item(), floor)}


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors))


def _float64(views: StepViews, key: str) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in views[key].elements.items()}


def leeway_of_rows(
    runs: Sequence[Sequence[StepRecord]], oracle: Record, bounds: Mapping[Key, float]
) -> dict[Key, Leeway]:
    """By the key of a worst row's measurement. ``runs``: the steps of the single-process runs. ``bounds``: of all
    quantities of these runs. None of a row whose bound is 0, and where the oracle does not say how far rows move.

    Raises RecordError where it says so of other rows than it has.
    """
    found = {}
    for o in (o for o in oracle.observables if o.rowwise):
        prefix = o.key.removesuffix("gradient")
        for number, reference in enumerate(oracle.steps):
            values = _read(reference, prefix + VALUE_GRADIENT)
            error = max((_error(_read(run[number], prefix + VALUE_GRADIENT), values) for run in runs), default=0.0)
            for name, moved in _read(reference, prefix + SHIFTED).items():
                rows = reference.shapes().get(f"{o.key}/{name}", ())[:1]
                if moved.shape != rows:
                    told = f"how far {tuple(moved.shape)} rows of {name} move, and has {tuple(rows)}"
                    raise RecordError(f"{reference.path} tells {told}; {AGAIN}")
                key = o.stage, f"{name} {OF_ROWS}", reference.step
                if bound := bounds.get(key):
                    found[key] = Leeway(rows=NOISE_FACTOR * error * moved, bound=bound)
    return found


def _read(step: StepRecord, key: str) -> dict[str, Tensor]:
    """The tensors of a key, in float64 by name, and no others."""
    with step.open() as file:
        names = [name for name in file.keys() if name.startswith(f"{key}/")]  # noqa: SIM118
        return {name.removeprefix(f"{key}/"): file.get_tensor(name).double() for name in names}


def _error(own: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """The root mean square of the differences; 0 of a run that has other rows, or none."""
    if own.keys() != reference.keys() or any(own[row].shape != ref.shape for row, ref in reference.items()):
        return 0.0
    squares = sum((own[row] - ref).square().sum().item() for row, ref in reference.items())
    return math.sqrt(squares / max(1, sum(ref.numel() for ref in reference.values())))
