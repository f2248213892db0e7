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
from conformance.judge.tensor_views import infinite
from conformance.judge.tolerance import Measurement
from conformance.numerics.comparison import finite
from conformance.oracle.optimizer import AdamW, spacing
from conformance.oracle.primitives import HONEST, Variant
from conformance.records.step_tensors import Record
from conformance.spec.layout import Layout
from conformance.spec.observables import AGAINST_REBUILT, is_unread
from conformance.spec.precision import FloatFormat
from conformance.spec.scenario import Scenario

# ln(2 / p) of one sum. A cell has fewer than a million sums, so an honest one is flagged with probability below 1e-9.
CONFIDENCE = math.log(2 / 1e-15)
TINY = torch.finfo(torch.float64).tiny
ROUNDED = "roundings of "
OVER_TWO = " over two steps"
LOST = f"{ROUNDED}all weights, relative to those to the nearest number{AGAINST_REBUILT}"
NEAREST = "to the nearest number"
SAME = "same random numbers as"
COMPARED = 2**18  # elements of a tensor, from the first on, that are compared with all others and with other tensors
OTHERS = 8  # tensors of the same size, the last ones, that a tensor is compared with
SUBNORMAL = 2.0**-126  # GPUs may take smaller float32 numbers for 0


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What chance did to the elements of a stored tensor, flattened. deviation: d, 0 where an element is not judged.
    variance: of d. doubt: how far the rounding of float32 may move its expected value from 0. sign: of the weight.
    largest: the largest size of d."""

    deviation: Tensor
    variance: Tensor
    doubt: Tensor
    sign: Tensor
    largest: float = 1.0


@dataclass(kw_only=True)
class Sum:
    """A sum of weighted deviations. variance: the sum of their variances. doubt: how far its expected value may be from
    0. largest: term by size."""

    value: float = 0.0
    variance: float = 0.0
    doubt: float = 0.0
    largest: float = 1.0
    confidence: float = CONFIDENCE

    def add(self, other: "Sum") -> None:
        self.value, self.variance = self.value + other.value, self.variance + other.variance
        self.doubt, self.largest = self.doubt + other.doubt, max(self.largest, other.largest)

    @property
    def bound(self) -> float:
        """Returns how far the sum may be from 0 (Freedman's inequality)."""
        third = self.largest * self.confidence / 3
        return self.doubt + third + math.sqrt(third**2 + 2 * self.confidence * self.variance)

    @property
    def error(self) -> float:
        return abs(self.value) / self.bound


Sums = dict[str, Sum]  # by what they show


@dataclass(kw_only=True)
class _State:
    """What is known of a parameter between two steps. optimizer: with the stored moments. sizes: the same, of absolute
    gradients. decided: elements whose stored moments follow from what was read. pending: after a step whose weights
    were not read. drawn: by each step that was judged, also by earlier optimizers."""

    optimizer: AdamW
    sizes: AdamW
    decided: Tensor
    drawn: dict[int, Drawn]
    pending: "_Update | None" = None


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
    """Collects by step: sums over all tensors, the sum that rounding to the nearest number would give, and what chance
    did to the tensor before (None) and to the last ones of a size. shards: the numbers of parts into which ranks may
    cut a weight."""

    shards: Sequence[int]
    sums: dict[int, Sums] = field(default_factory=dict)
    nearest: dict[int, float] = field(default_factory=dict)
    last: dict[tuple[int, int | None], list[Drawn]] = field(default_factory=dict)

    def add(self, step: int, sums: Sums) -> None:
        of_all = self.sums.setdefault(step, {kind: Sum() for kind in sums})
        for kind, one in sums.items():
            of_all[kind].add(one)

    def measurements(self, step: UpdateStep) -> Iterator[Measurement]:
        """Yields the sums of all weights after a step, and how far they are from those of rounding to the nearest."""
        sums, expected = self.sums.get(step.step, {}), self.nearest.get(step.step, 0.0)
        if sums:
            yield _of_sums(step, "all weights", sums)
        if found := sums.get(NEAREST):
            error, bound = (number / expected if expected else math.inf for number in (abs(found.value), found.bound))
            if expected:
                yield Measurement(stage=step.stage, tensor=LOST, step=step.step, error=error, fixed=bound)


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
        yield from (found for step in steps for found in of_steps.measurements(step))


def not_rebuilt(phases: Sequence[Record], found: Sequence[Measurement], oracle: Record) -> list[int]:
    """Returns the steps at which some trained weight was read and not judged, because its moments are not known."""
    judged = {(m.step, m.tensor.removesuffix(AGAINST_REBUILT).removesuffix(OVER_TWO)) for m in found}
    shown = {step.step: step.line for phase in phases for step in phase.steps}
    left: dict[int, None] = {}
    for step in (step for step in oracle.steps if step.step in shown):
        for key in dict.fromkeys(o.key for o in oracle.observables if o.rebuilt):
            gradient = f"{key.removesuffix('weight')}gradient/"
            names = [name.removeprefix(gradient) for name in step.names() if name.startswith(gradient)]
            if not is_unread(key, shown[step.step]) and any((step.step, name) not in judged for name in names):
                left[step.step] = None
    return [*left]


def lost_in_rounding(found: Sequence[Measurement]) -> bool:
    """Tells whether rounding to the nearest number would be within the bounds of all steps."""
    bounds = [m.fixed for m in found if m.tensor == LOST and m.fixed is not None]
    return bool(bounds) and min(bounds) >= 1


def _shards(layout: Layout) -> list[int]:
    """Returns the numbers of parts into which ranks may cut a weight."""
    data = layout.dp // layout.rep * layout.sp
    return sorted({parts for parts in (data, layout.tp, data * layout.tp) if parts > 1})


def _of_parameter(
    name: str, steps: Sequence[UpdateStep], scenario: Scenario, variant: Variant, of_steps: _OfSteps
) -> Iterator[Measurement]:
    state: _State | None = None
    drawn: dict[int, Drawn] = {}
    for step in steps:
        if step.first:
            state = None
            if name in step.before.tensors and scenario.optimizer.name == "adamw":
                decided = torch.ones_like(step.before.elements[name], dtype=torch.bool)
                optimizer, sizes = (AdamW(scenario.optimizer, variant) for _ in range(2))
                state = _State(optimizer=optimizer, sizes=sizes, decided=decided, drawn=drawn)
        shown = (step.first_moment, step.second_moment, step.after)
        if state is None or not step.known:
            state = None
        elif name not in step.unread:
            yield from _after_read(name, step, state, scenario, of_steps)
        elif state.pending and all(name in view.tensors for view in shown):
            yield from _after_unread(name, step, state, state.pending, scenario, of_steps)
        else:
            state = None
            if step.first_moment.tensors or step.second_moment.tensors:  # those of other parameters, or one of two
                yield infinite(step.stage, f"moments of {name} (missing)", step.step)


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
        near |= (moments[name] != 0) & (moments[name].abs() < SUBNORMAL)
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
    sums = _biases(drawn, {**toward, NEAREST: (1 - 2 * fraction).flatten()})
    of_steps.add(step.step, sums)
    wrong = torch.where(state.decided, torch.minimum(fraction, 1 - fraction) * (1 - 2 * fraction).abs(), 0.0)
    of_steps.nearest[step.step] = of_steps.nearest.get(step.step, 0.0) + wrong.sum().item()
    columns = after.numel() // max(1, len(after)) if after.ndim else 1
    lags = {*(-(-len(after) // n) * columns for n in of_steps.shards if after.ndim)}
    for lag in sorted(lag for lag in lags if 0 < lag < len(drawn.deviation)):
        before = _part(drawn, slice(None, -lag))
        sums |= _products(f"{SAME} {lag} elements before", before, _part(drawn, slice(lag, None)))
    yield _of_sums(step, name, sums | _repeated(step, state, drawn, of_steps))
    if len(drawn.deviation) > 1:
        yield _any_lag(step, name, drawn)


def _repeated(step: UpdateStep, state: _State, drawn: Drawn, of_steps: "_OfSteps") -> Sums:
    """Compares what chance did to a tensor with all its earlier steps, the tensor before, and the last ones of its
    size."""
    part, sums = _part(drawn, slice(COMPARED)), Sums()
    for number, other in state.drawn.items():
        sums |= _products(f"{SAME} at step {number}", other, part)
    same = of_steps.last.setdefault((step.step, len(drawn.deviation)), [])
    before = of_steps.last.get((step.step, None), [])
    for number, other in enumerate([*before, *same]):
        sums |= _products(f"{SAME} in another weight ({number})", other, part)
    of_steps.last[step.step, None] = [part]
    of_steps.last[step.step, len(drawn.deviation)] = [*same, part][-OTHERS:]
    state.drawn[step.step] = part
    return sums


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
    gradient = state.optimizer.gradient_of(name, first, before.exact)
    off = (stored.rounding * first.abs() + beta1 * unknown[0] + SUBNORMAL) / (1 - beta1)
    if (error := clipped_gradient(step, name, gradient, off).error) is not None:
        yield error
    update = _updated(name, step, state, before.exact, gradient, scenario)
    expected = state.optimizer.moments[1][name]
    off = (1 - beta2) * (2 * gradient.abs() * off + off**2) + beta2 * unknown[1] + stored.rounding * expected
    off = off + SUBNORMAL
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
    yield _largest(step, name + OVER_TWO, name, outside, after, bound=1.0)
    if scenario.tier.is_stochastic:
        fraction = before.fraction
        variance = fraction * (1 - fraction) * (before.unit / unit) ** 2 + 0.25
        drawn = Drawn(
            deviation=torch.where(state.decided, (after - update.exact) / unit, 0.0).flatten(),
            variance=variance.flatten(),
            doubt=(doubt / unit).flatten(),
            sign=update.exact.sign().flatten(),
            largest=3.0,
        )
        sums = _biases(drawn, _directions(update.exact, before.exact))
        of_steps.add(step.step, sums)
        yield _of_sums(step, name + OVER_TWO, sums | _repeated(step, state, drawn, of_steps))
    for moments, shown in zip(state.optimizer.moments, (first, second), strict=True):
        moments[name] = shown
    state.decided, state.pending = torch.ones_like(state.decided), None


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


def _biases(drawn: Drawn, weights: Mapping[str, Tensor]) -> Sums:
    return {
        kind: Sum(
            value=float(drawn.deviation @ weight),
            variance=float((drawn.variance + drawn.doubt) @ weight.square()),
            doubt=float(drawn.doubt @ weight.abs()),
            largest=drawn.largest * max(1.0, float(weight.abs().max())),
        )
        for kind, weight in weights.items()
    }


def _products(what: str, first: Drawn, second: Drawn) -> Sums:
    """Sums the products of what chance did to elements of two tensors, or of two parts of one, from the first one on.

    One random number for both makes them positive: for weights of the same sign, and for others positive or negative,
    depending on whether it decides about up and down or about away from zero.
    """
    count = min(len(first.deviation), len(second.deviation))
    known = first.deviation[:count]
    kinds = {f"{what}, up": known, f"{what}, away from zero": known * first.sign[:count] * second.sign[:count]}
    return _biases(_part(second, slice(count)), kinds)


def _any_lag(step: UpdateStep, name: str, drawn: Drawn) -> Measurement:
    """Compares what chance did to each element with all others of the tensor, by their distance in it.

    All sums of products are computed at once, by Fourier transforms of twice the length.
    """
    part = _part(drawn, slice(COMPARED))
    count = len(part.deviation)

    def products(known: Tensor, later: Tensor) -> Tensor:
        """Sums known[i] later[i + lag] by lag, from 1 on."""
        first, second = (torch.fft.rfft(one, 2 * count) for one in (known, later))
        whole: Tensor = torch.fft.irfft(first.conj() * second, 2 * count)
        return whole[1:count]

    confidence = CONFIDENCE + math.log(2 * COMPARED)  # that of the largest of so many sums
    variance = products(part.deviation.square(), part.variance + part.doubt).clamp(min=0)
    third = confidence / 3
    bounds = third + (third**2 + 2 * confidence * variance).sqrt()
    bounds = bounds + products(part.deviation.abs(), part.doubt).clamp(min=0)
    found = {}
    for way, signed in (("up", part.deviation), ("away from zero", part.deviation * part.sign)):
        errors = products(signed, signed).abs() / bounds
        lag = int(errors.argmax())
        found[f"{SAME} {lag + 1} elements before, {way}"] = errors[lag].item()
    return _furthest(step, f"{name} at any distance", found)


def _part(drawn: Drawn, part: slice) -> Drawn:
    fields = (drawn.deviation, drawn.variance, drawn.doubt, drawn.sign)
    deviation, variance, doubt, sign = (one[part] for one in fields)
    return Drawn(deviation=deviation, variance=variance, doubt=doubt, sign=sign, largest=drawn.largest)


def _of_sums(step: UpdateStep, of: str, sums: Sums) -> Measurement:
    return _furthest(step, of, {kind: one.error for kind, one in sums.items()})


def _furthest(step: UpdateStep, of: str, errors: Mapping[str, float]) -> Measurement:
    """Measures the sum that is furthest from its expected value, relative to its bound."""
    kind, error = max(errors.items(), key=lambda one: one[1])
    tensor = f"{ROUNDED}{of}{AGAINST_REBUILT}"
    return Measurement(stage=step.stage, tensor=tensor, step=step.step, error=finite(error), where=kind, fixed=1.0)


def _largest(step: UpdateStep, what: str, name: str, errors: Tensor, compared: Tensor, *, bound: float) -> Measurement:
    return Measurement(
        stage=step.stage,
        tensor=what + AGAINST_REBUILT,
        step=step.step,
        error=finite(errors.max().item()),
        where=place_in_weight(step, name, int(errors.argmax()), compared),
        fixed=bound,
    )
