"""Judges updates without masters: computed in float32, rounded once, and stored in bf16.

Such an update is often smaller than the distance of two bf16 numbers, so against the oracle's weights it cannot be
judged. But given the gradients it is known to the rounding of float32, as any update that is rebuilt
(conformance.judge.rebuilt). So the stored weight has to be the nearest bf16 number, or with stochastic rounding one of
the two around the exact value, element by element.

With stochastic rounding no single element tells more. An element at the fraction f between its neighbours is stored as
the upper one with probability f. Let d be 1 - f or -f, whichever happened: independent numbers of mean 0 and variance
f (1 - f). Sums of d, weighted by what is known before, and of products of two elements' d are martingales, so
Freedman's inequality (Annals of Probability 3, 1975) bounds them without any assumption on their distribution:
P(|sum| >= t) <= 2 exp(-t^2 / (2 V + 2 t / 3)). A bias shows in the sums: up, away from zero, along the update, to the
nearest. One random number for several elements, tensors, ranks or steps shows in the products.

The two steps of which only gradients of the first and weights after the second were read are judged together: the
moments are shown after them, and give the second gradient.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from conformance.judge.rebuilt import (
    MOMENT_ROUNDINGS,
    REBUILT_ROUNDINGS,
    UPDATE_ROUNDINGS,
    UpdateStep,
    clipped_gradient,
    place_in_weight,
    update_steps,
)
from conformance.judge.tolerance import Measurement
from conformance.numerics.comparison import finite
from conformance.oracle.optimizer import AdamW, spacing
from conformance.oracle.primitives import HONEST, Variant
from conformance.records.step_tensors import Record
from conformance.spec.layout import Layout
from conformance.spec.observables import AGAINST_REBUILT, Observable, is_unread
from conformance.spec.precision import FloatFormat
from conformance.spec.scenario import Scenario

# ln(2 / p) of one sum. A cell has fewer than 10,000 sums, so an honest one is flagged with probability below 1e-9.
CONFIDENCE = math.log(2 / 1e-13)
TINY = torch.finfo(torch.float64).tiny
ROUNDED = "roundings of "


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What chance did to the elements of a stored tensor, flattened. deviation: d, 0 where an element is not judged.
    variance: of d. doubt: how far the rounding of float32 may move its expected value from 0. sign: of the weight."""

    deviation: Tensor
    variance: Tensor
    doubt: Tensor
    sign: Tensor


@dataclass(kw_only=True)
class Sum:
    """A sum of weighted deviations. variance: the sum of their variances. doubt: how far its expected value may be from
    0. largest: term by size."""

    value: float = 0.0
    variance: float = 0.0
    doubt: float = 0.0
    largest: float = 1.0

    def add(self, other: "Sum") -> None:
        self.value, self.variance = self.value + other.value, self.variance + other.variance
        self.doubt, self.largest = self.doubt + other.doubt, max(self.largest, other.largest)

    @property
    def error(self) -> float:
        """Returns the distance from the expected value, relative to its bound (Freedman's inequality)."""
        third = self.largest * CONFIDENCE / 3
        return abs(self.value) / (self.doubt + third + math.sqrt(third**2 + 2 * CONFIDENCE * self.variance))


Sums = dict[str, Sum]  # by what they show


@dataclass(kw_only=True)
class _State:
    """What is known of a parameter between two steps. optimizer: with the stored moments. sizes: the same, of absolute
    gradients. decided: elements whose stored moments follow from what was read. pending: after a step whose weights
    were not read. drawn: by the last step."""

    optimizer: AdamW
    sizes: AdamW
    decided: Tensor
    pending: "_Update | None" = None
    drawn: Drawn | None = None


@dataclass(frozen=True, kw_only=True)
class _Update:
    """The weights after a step before they are stored. unit: the distance of their neighbours. doubt: how far float32
    may be off. moved: the size of the update."""

    exact: Tensor
    unit: Tensor
    doubt: Tensor
    moved: Tensor

    @property
    def fraction(self) -> Tensor:
        return (self.exact / self.unit) % 1


@dataclass(kw_only=True)
class _OfSteps:
    """Collects by step: sums over all tensors, and what chance did to the tensor before. shards: the numbers of parts
    into which ranks may cut a weight."""

    shards: Sequence[int]
    sums: dict[int, Sums] = field(default_factory=dict)
    last: dict[int, Drawn] = field(default_factory=dict)


def stored_updates(
    phases: Sequence[Record], oracle: Record, scenario: Scenario, variant: Variant = HONEST
) -> Iterator[Measurement]:
    """Measures how far every weight after a step is outside of what rounding may give, in units of the distance of two
    neighbours, and how far sums of roundings are from their expected values, relative to their bounds."""
    declared = [o for o in oracle.observables if o.rebuilt]
    for key in dict.fromkeys(o.key for o in declared):
        steps = list(update_steps(phases, oracle, scenario, [o for o in declared if o.key == key]))
        of_steps = _OfSteps(shards=_shards(phases[0].layout))
        for name in dict.fromkeys(name for step in steps for name in (*step.unread, *step.gradients.tensors)):
            yield from _of_parameter(name, steps, scenario, variant, of_steps)
        yield from (_of_sums(s, "all weights", of_steps.sums[s.step]) for s in steps if s.step in of_steps.sums)


def not_rebuilt(phases: Sequence[Record], found: Sequence[Measurement], observables: Sequence[Observable]) -> list[int]:
    """Returns the steps whose weights were read and not judged, because the moments before are not known."""
    stages = {o.stage for o in observables if o.rebuilt}
    keys = {o.key for o in observables if o.rebuilt}
    judged = {m.step for m in found if m.stage in stages and m.tensor.endswith(AGAINST_REBUILT)}
    steps = (step for phase in phases for step in phase.steps)
    return [s.step for s in steps if s.step not in judged and not all(is_unread(key, s.line) for key in keys)]


def _shards(layout: Layout) -> list[int]:
    """Returns the numbers of parts into which ranks may cut a weight."""
    data = layout.dp // layout.rep * layout.sp
    return sorted({parts for parts in (data, layout.tp, data * layout.tp) if parts > 1})


def _of_parameter(
    name: str, steps: Sequence[UpdateStep], scenario: Scenario, variant: Variant, of_steps: _OfSteps
) -> Iterator[Measurement]:
    state: _State | None = None
    for step in steps:
        if step.first:
            state = None
            if name in step.before.tensors and scenario.optimizer.name == "adamw":
                decided = torch.ones_like(step.before.elements[name], dtype=torch.bool)
                optimizer, sizes = (AdamW(scenario.optimizer, variant) for _ in range(2))
                state = _State(optimizer=optimizer, sizes=sizes, decided=decided)
        shown = (step.first_moment, step.second_moment, step.after)
        if state is None or not step.known:
            state = None
        elif name not in step.unread:
            yield from _after_read(name, step, state, scenario, of_steps)
        elif state.pending and all(name in view.tensors for view in shown):
            yield from _after_unread(name, step, state, state.pending, scenario, of_steps)
        else:
            state = None


def _after_read(
    name: str, step: UpdateStep, state: _State, scenario: Scenario, of_steps: _OfSteps
) -> Iterator[Measurement]:
    """Judges the weights after a step whose gradients and weights before were read."""
    stored, rounding = _stored(scenario), scenario.tier.master.rounding
    weight = step.before.elements[name].double()
    clipped = step.factor * step.gradients.elements[name].double()
    if step.factor != 1:
        state.decided = state.decided & ~_near_tie(clipped, MOMENT_ROUNDINGS * rounding * clipped.abs(), stored)
    update = _updated(name, step, state, weight, _nearest(clipped, stored), scenario)
    for moments, sizes in zip(state.optimizer.moments, state.sizes.moments, strict=True):
        near = _near_tie(moments[name], MOMENT_ROUNDINGS * rounding * sizes[name], stored)
        state.decided = state.decided & ~near
        moments[name], sizes[name] = _nearest(moments[name], stored), _nearest(sizes[name], stored)
    if name not in step.after.tensors:
        state.pending = update
        return
    after, low, high = step.after.elements[name].double(), update.exact - update.doubt, update.exact + update.doubt
    if scenario.tier.is_stochastic:
        low, high = _below(low, stored), -_below(-high, stored)
    else:
        low, high = _nearest(low, stored), _nearest(high, stored)
    outside = torch.maximum(low - after, after - high).clamp(min=0) / update.unit
    outside = torch.where(_nearest(after, stored) == after, outside, math.inf)  # another is not a stored number
    yield _largest(step, name, name, torch.where(state.decided, outside, 0.0), after, bound=0.0)
    if not scenario.tier.is_stochastic:
        return
    fraction = update.fraction
    drawn = Drawn(
        deviation=torch.where(state.decided, (after - update.exact) / update.unit, 0.0).flatten(),
        variance=(fraction * (1 - fraction)).flatten(),
        doubt=(update.doubt / update.unit).flatten(),
        sign=update.exact.sign().flatten(),
    )
    toward = _directions(update.exact, weight)
    sums = _biases(drawn, {**toward, "to the nearest number": (1 - 2 * fraction).flatten()})
    of_all = of_steps.sums.setdefault(step.step, {kind: Sum() for kind in sums})
    for kind, one in sums.items():
        of_all[kind].add(one)
    columns = after.numel() // max(1, len(after)) if after.ndim else 1
    lags = {1, columns, *(-(-len(after) // n) * columns for n in of_steps.shards if after.ndim)}
    lags |= {-(-columns // n) for n in of_steps.shards}
    for lag in sorted(lag for lag in lags if 0 < lag < len(drawn.deviation)):
        sums |= _products(f"{lag} elements before", _part(drawn, slice(None, -lag)), _part(drawn, slice(lag, None)))
    if (other := of_steps.last.get(step.step)) is not None:
        sums |= _products("in another weight", other, drawn)
    if state.drawn is not None:
        sums |= _products("in the step before", state.drawn, drawn)
    of_steps.last[step.step] = state.drawn = drawn
    yield _of_sums(step, name, sums)


def _after_unread(
    name: str, step: UpdateStep, state: _State, before: _Update, scenario: Scenario, of_steps: _OfSteps
) -> Iterator[Measurement]:
    """Judges the weights after a step whose gradients were not read, nor the weights ``before``, by its moments."""
    stored, (beta1, beta2) = _stored(scenario), scenario.optimizer.betas
    first, second, after = (
        view.elements[name].double() for view in (step.first_moment, step.second_moment, step.after)
    )
    kept = [moments[name] for moments in state.optimizer.moments]
    unknown = [2 * stored.rounding * torch.where(state.decided, 0.0, moment.abs()) for moment in kept]
    gradient = state.optimizer.gradient_of(name, first)
    off = (stored.rounding * first.abs() + beta1 * unknown[0]) / (1 - beta1)
    if (error := clipped_gradient(step, name, gradient, off).error) is not None:
        yield error
    update = _updated(name, step, state, before.exact, gradient, scenario)
    expected = state.optimizer.moments[1][name]
    off = (1 - beta2) * (2 * gradient.abs() * off + off**2) + beta2 * unknown[1] + stored.rounding * expected
    error_of_second = (second - expected).abs() / (off * (1 + stored.rounding)).clamp(min=TINY)
    for moment in (first, second):
        error_of_second = torch.where(_nearest(moment, stored) == moment, error_of_second, math.inf)
    yield _largest(step, f"exp_avg_sq of {name}", name, error_of_second, second, bound=1.0)
    share = (stored.rounding + off / (2 * expected).clamp(min=TINY)).clamp(max=1.0)
    doubt = before.doubt + update.doubt + share * update.moved
    unit = spacing(torch.maximum(update.exact.abs(), after.abs()), stored.significant_bits)
    allowed = (before.unit + unit) * (1.0 if scenario.tier.is_stochastic else 0.5)
    outside = ((after - update.exact).abs() - doubt).clamp(min=0) / allowed
    outside = torch.where(state.decided, outside, 0.0)
    yield _largest(step, f"{name} over two steps", name, outside, after, bound=1.0)
    if scenario.tier.is_stochastic:
        fraction = before.fraction
        variance = fraction * (1 - fraction) * (before.unit / unit) ** 2 + 0.25
        drawn = Drawn(
            deviation=torch.where(state.decided, (after - update.exact) / unit, 0.0).flatten(),
            variance=variance.flatten(),
            doubt=(doubt / unit).flatten(),
            sign=update.exact.sign().flatten(),
        )
        sums = _biases(drawn, _directions(update.exact, before.exact), largest=2.0)
        of_all = of_steps.sums.setdefault(step.step, {kind: Sum() for kind in sums})
        for kind, one in sums.items():
            of_all[kind].add(one)
        yield _of_sums(step, f"{name} over two steps", sums)
    for moments, shown in zip(state.optimizer.moments, (first, second), strict=True):
        moments[name] = shown
    state.decided, state.pending, state.drawn = torch.ones_like(state.decided), None, None


def _updated(
    name: str, step: UpdateStep, state: _State, weight: Tensor, gradient: Tensor, scenario: Scenario
) -> _Update:
    """Makes a step of the optimizer in float64."""
    exact = state.optimizer.step({name: weight}, {name: gradient}, step.lr)[name]
    moved = state.sizes.size(gradient, name, step.lr)
    doubt = scenario.tier.master.rounding * (REBUILT_ROUNDINGS * weight.abs() + UPDATE_ROUNDINGS * moved)
    unit = spacing(exact, _stored(scenario).significant_bits)
    return _Update(exact=exact, unit=unit, doubt=doubt, moved=moved)


def _stored(scenario: Scenario) -> FloatFormat:
    assert scenario.tier.stored, "this precision has masters"
    return scenario.tier.stored


def _nearest(x: Tensor, stored: FloatFormat) -> Tensor:
    """Rounds to the nearest stored number, of two the even one."""
    unit = spacing(x, stored.significant_bits)
    return (x / unit).round() * unit


def _below(x: Tensor, stored: FloatFormat) -> Tensor:
    """Rounds down to a stored number."""
    unit = spacing(x, stored.significant_bits)
    return (x / unit).floor() * unit


def _near_tie(x: Tensor, off: Tensor, stored: FloatFormat) -> Tensor:
    """Tells which elements are so near to the middle of two stored numbers that an error of ``off`` decides."""
    unit = spacing(x, stored.significant_bits)
    return ((x / unit) % 1 - 0.5).abs() * unit <= off


def _directions(exact: Tensor, before: Tensor) -> dict[str, Tensor]:
    """Returns the signs by which a bias shows in a sum of roundings."""
    signs = {"up": torch.ones_like(exact), "away from zero": exact.sign(), "along the update": (exact - before).sign()}
    return {kind: sign.flatten() for kind, sign in signs.items()}


def _biases(drawn: Drawn, weights: Mapping[str, Tensor], *, largest: float = 1.0) -> Sums:
    return {
        kind: Sum(
            value=float(drawn.deviation @ weight),
            variance=float((drawn.variance + drawn.doubt) @ weight.square()),
            doubt=float(drawn.doubt @ weight.abs()),
            largest=largest,
        )
        for kind, weight in weights.items()
    }


def _products(where: str, first: Drawn, second: Drawn) -> Sums:
    """Sums the products of what chance did to elements of two tensors, or of two parts of one, from the first one on.

    One random number for both makes them positive: for weights of the same sign, and for others positive or negative,
    depending on whether it decides about up and down or about away from zero.
    """
    count = min(len(first.deviation), len(second.deviation))
    known = first.deviation[:count]
    signs = first.sign[:count] * second.sign[:count]
    kinds = {f"up as {where}": known, f"away from zero as {where}": known * signs}
    return _biases(_part(second, slice(count)), kinds)


def _part(drawn: Drawn, part: slice) -> Drawn:
    fields = (drawn.deviation, drawn.variance, drawn.doubt, drawn.sign)
    deviation, variance, doubt, sign = (one[part] for one in fields)
    return Drawn(deviation=deviation, variance=variance, doubt=doubt, sign=sign)


def _of_sums(step: UpdateStep, of: str, sums: Sums) -> Measurement:
    """Measures the sum that is furthest from its expected value, relative to its bound."""
    kind, error = max(((kind, one.error) for kind, one in sums.items()), key=lambda one: one[1], default=("", 0.0))
    return Measurement(
        stage=step.stage,
        tensor=f"{ROUNDED}{of}{AGAINST_REBUILT}",
        step=step.step,
        error=finite(error),
        where=kind,
        fixed=1.0,
    )


def _largest(step: UpdateStep, what: str, name: str, errors: Tensor, compared: Tensor, *, bound: float) -> Measurement:
    return Measurement(
        stage=step.stage,
        tensor=what + AGAINST_REBUILT,
        step=step.step,
        error=finite(errors.max().item()),
        where=place_in_weight(step, name, int(errors.argmax()), compared),
        fixed=bound,
    )
