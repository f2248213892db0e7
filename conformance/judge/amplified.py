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
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from conformance.judge.distance import Tensors, floor_of
from conformance.judge.seen import elementwise, movement, norm_of
from conformance.judge.tolerance import EXACT
from conformance.oracle.training import clip_factor
from conformance.record.tensors import Record, StepRecord
from conformance.scenario import Scenario

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
    config, exact = scenario.optimizer, scenario.precision == "exact"
    gradient, rate = (key.removesuffix("weight") + name for name in ("gradient", "lr"))
    start, steps = _float64(oracle.loaded, key), {step.step: step for step in run}
    second, moved = ({name: torch.zeros_like(weight) for name, weight in start.items()} for _ in range(2))
    noise: dict[str, torch.Tensor] = {}  # of a step without gradients it is that of the step before
    count = 0  # of updates
    for reference in (step for step in oracle.steps if step.step in steps):
        own, lr, weights = steps[reference.step], reference.value(rate) or 0.0, _float64(reference, key)
        gradients, seen = _float64(reference, gradient), _float64(own, gradient)
        factor = clip_factor(norm_of(reference.tensors(), gradient), config.max_grad_norm)
        count += bool(gradients)  # there are none of an update that is skipped
        noise |= _noise(seen, gradients, most=EXACT if exact else math.inf)
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


def _float64(step: StepRecord, key: str) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in elementwise(step.tensors(), key).items()}
