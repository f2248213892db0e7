"""Bounds the effect of rounding where it is amplified: noisy elements in AdamW, and rows of a value model's embedding.

AdamW divides by sqrt(v) + eps. An element whose gradients consist of rounding errors moves by up to twice the learning
rate, in a random direction; with the usual eps of 1e-8 every model has such elements. A single-process run has a few of
them by chance, which does not limit how many another honest run may have. So they are identified: an element is noisy
if d / (sqrt(v) + eps) is above NOISY times the relative noise of its tensor's gradient. Here d is the root mean square
of the noise in the element's row.

The exact tier has no run that shows noise. There the noise is the error of the cell's own gradients, as far as it is
within their bound: a larger error is not rounding, and nothing is allowed for it. All elements are counted, because
their effect is far below the bound of an update unless it is amplified. Of a sketched tensor, the sample is searched.

Contributions of a document's values to a row of the embedding may nearly cancel, while their correlated errors do not
(docs/explanations/tolerances.md). Single-process runs give the size of these errors: the root mean square, over
hundreds of values, of the errors of the gradients of the loss with respect to the values. The oracle gives how far a
row moves with them (conformance.oracle.step).
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
    """``updates``: how far noisy elements may move a weight, relative like its measurement, by stage, tensor and step.
    ``drift``: by step, the factor by which weights may be further apart than those of the single-process run."""

    updates: dict[tuple[str, str, int], float] = field(default_factory=dict)
    drift: dict[int, float] = field(default_factory=dict)


def amplified_noise(runs: Sequence[Sequence[StepRecord]], oracle: Record, scenario: Scenario) -> Amplified:
    """Computes the amplified noise from the steps of the single-process runs in the cell's precision (in the exact
    tier: of the cell itself) and the float64 oracle. SGD amplifies nothing."""
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
    """Yields, after each step, the largest possible relative error of each tensor, and the drift that follows."""
    config, exact = scenario.optimizer, scenario.tier.is_exact
    gradient, rate = (key.removesuffix("weight") + name for name in ("gradient", "lr"))
    start, steps = _float64(StepViews(oracle.loaded.tensors()), key), {step.step: step for step in run}
    second, moved = ({name: torch.zeros_like(weight) for name, weight in start.items()} for _ in range(2))
    noise: dict[str, torch.Tensor] = {}  # a step without gradients keeps that of the previous step
    count = 0  # number of updates
    for reference in (step for step in oracle.steps if step.step in steps):
        own, expected = StepViews(steps[reference.step].tensors()), StepViews(reference.tensors())
        lr, weights, gradients = reference.value(rate) or 0.0, _float64(expected, key), _float64(expected, gradient)
        factor = clip_factor(expected[gradient].norm, config.max_grad_norm)
        count += bool(gradients)  # a skipped update has none
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
        distance = _norm([w - weights[name] for name, w in _float64(own, key).items()]) if not exact else 0.0
        yield reference.step, errors, max(1.0, possible / distance) if distance else 1.0


def _noise(own: Tensors, reference: Tensors, *, most: float) -> dict[str, torch.Tensor]:
    """Returns the errors of gradients, without gradients whose relative error exceeds ``most``."""
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
    """Returns the leeway of rows by the key of the measurement of the worst row. ``runs``: the steps of the
    single-process runs. ``bounds``: of all quantities of these runs. Rows whose bound is 0, or whose movement the
    oracle did not record, get no leeway.

    Raises RecordError if the oracle's record gives the movement of other rows than it has.
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
                    shapes = f"the movement of {tuple(moved.shape)} rows of {name}, but has {tuple(rows)}"
                    raise RecordError(f"{reference.path} gives {shapes}; {AGAIN}")
                key = o.stage, f"{name} {OF_ROWS}", reference.step
                if bound := bounds.get(key):
                    found[key] = Leeway(rows=NOISE_FACTOR * error * moved, bound=bound)
    return found


def _read(step: StepRecord, key: str) -> dict[str, Tensor]:
    """Reads the tensors of one key, in float64 by name."""
    with step.open() as file:
        names = [name for name in file.keys() if name.startswith(f"{key}/")]  # noqa: SIM118
        return {name.removeprefix(f"{key}/"): file.get_tensor(name).double() for name in names}


def _error(own: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Returns the root mean square of the differences; 0 if the run has different rows or none."""
    if own.keys() != reference.keys() or any(own[row].shape != ref.shape for row, ref in reference.items()):
        return 0.0
    squares = sum((own[row] - ref).square().sum().item() for row, ref in reference.items())
    return math.sqrt(squares / max(1, sum(ref.numel() for ref in reference.values())))
