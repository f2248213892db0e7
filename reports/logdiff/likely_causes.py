"""Names likely causes of a difference between two runs, from the shape of their curves.

Looked for are constant factors, learning rates that lag or begin again, jumps, another order of the data and steady
growth (docs/guides/comparing-runs.md). A likely cause is a guess: it never decides whether the runs differ. Where no
shape fits, none is named.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from conformance.numerics.comparison import whole_number
from reports.logdiff.metrics import is_rate
from reports.logdiff.run import Floats
from reports.wording import percent, plural

LEAST = 0.05  # of a logarithm: a smaller factor is a difference like any other
HELD = 0.8  # of the steps, at least, at which a factor holds within a quarter of its logarithm


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A factor exp(``log``), with the standard ``error`` of the logarithm."""

    log: float
    error: float

    @property
    def size(self) -> float:
        """The factor or its inverse, whichever is above 1."""
        return math.exp(abs(self.log))


def constant_factor(d: Floats, *, least: float = LEAST) -> Factor | None:
    """Find the factor exp(d) of logarithms ``d`` [T] if it is the same from the first third to the last; else None.

    Its median has to stand out of what varies about it, whose scale is the median absolute deviation, and most steps
    have to be near it. ``least``: of its logarithm.
    """
    if len(d) < 3:
        return None
    middle = float(np.median(d))
    spread = 1.4826 * float(np.median(np.abs(d - middle)))
    third = max(len(d) // 3, 1)
    begin, end = float(np.median(d[:third])), float(np.median(d[-third:]))
    error = 1.2533 * spread / math.sqrt(len(d))  # of a median of normally distributed numbers
    steady = abs(begin - end) <= max(0.1 * abs(middle), 4 * 1.2533 * spread * math.sqrt(2 / third))
    held = float(np.mean(np.abs(d - middle) <= 0.25 * abs(middle)))
    if abs(middle) < least or spread > 0.5 * abs(middle) or held < HELD or not steady or begin * end <= 0:
        return None
    return Factor(log=middle, error=error)


def integer_of(factor: Factor) -> tuple[int, bool] | None:
    """Find the whole number that a factor or its inverse is, and whether as a square root; None if that is unclear.

    Unclear is a factor whose error is not small compared with the distance to the next number.
    """
    return whole_number(factor.log, within=max(3 * factor.error, 0.005), roots=True)


EXACT = 1e-3  # relative to the largest rate; logs print three digits or more
FEWEST = 4  # points that have to agree
PACES = range(2, 65)


def rate_causes(curves: tuple[Floats, Floats, Floats] | None) -> Iterator[tuple[str, str]]:
    """Yield (name, sentence) for positions [T] and both sides' learning rates [T]; nothing if they are the same."""
    if curves is None or len(curves[0]) < 2:
        return
    steps, a, b = curves
    if _same(a, b, a):
        return
    yield _lag(steps, a, b) or _factor(a, b) or _restart(steps, a, b) or _pace(steps, a, b) or _other(steps, a, b)


def _same(x: Floats, y: Floats, whole: Floats) -> bool:
    return bool(np.abs(x - y).max(initial=0.0) <= EXACT * np.abs(whole).max())


def _varies(x: Floats) -> bool:
    return bool(np.ptp(x) > 10 * EXACT * np.abs(x).max())


def _factor(a: Floats, b: Floats) -> tuple[str, str] | None:
    kept = (a > EXACT * a.max()) & (b > EXACT * b.max())
    found = constant_factor(np.log(b[kept] / a[kept]), least=2 * EXACT) if kept.sum() >= 3 else None
    if found is None or not _same(a * np.exp(found.log), b, b):
        return None
    number = integer_of(Factor(log=found.log, error=EXACT))
    exact = f", the square root of {number[0]}" if number and number[1] else ""
    direction = "larger" if found.log > 0 else "smaller"
    return (
        "learning rate: factor",
        f"the learning rate is {found.size:.4g} times {direction} on side B{exact}, at every step",
    )


def _lag(steps: Floats, a: Floats, b: Floats) -> tuple[str, str] | None:
    stride = float(np.median(np.diff(steps)))
    for k in range(1, len(a) // 2):
        later = f"{plural(round(k * stride), 'step')} later"
        for late, early, who in ((b, a, "B"), (a, b, "A")):
            if _varies(late[k:]) and len(late) - k >= FEWEST and _same(late[k:], early[:-k], a):
                return (
                    "learning rate: lag",
                    f"the learning rate of side {who} is the other's {later}: the schedule is"
                    " advanced before instead of after the update, counts its steps from another one, or skips some;"
                    " or the log has the rate of the next step",
                )
    return None


def _restart(steps: Floats, a: Floats, b: Floats) -> tuple[str, str] | None:
    """Test whether the schedule of one side begins again after both were the same."""
    differing = np.flatnonzero(np.abs(a - b) > EXACT * np.abs(a).max())
    s = int(differing[0])
    for at in (s, s - 1):
        count = len(a) - at
        for new, old, who in ((b, a, "B"), (a, b, "A")):
            if at > 1 and count >= FEWEST and _varies(old[:count]) and _same(new[at:], old[:count], a):
                return (
                    "learning rate: begins again",
                    f"the learning rate of side {who} begins again at step {steps[at]:.0f}: a resume without the"
                    " state of the schedule",
                )
    return None


def _pace(steps: Floats, a: Floats, b: Floats) -> tuple[str, str] | None:
    for n in PACES:
        for fast, slow, who in ((b, a, "B"), (a, b, "A")):
            # A schedule that was advanced n times before the first log, or not yet; or that began before this log.
            for begin, offset in ((steps[0] - (steps[0] == 1), 0.0), (steps[0] - (steps[0] == 1), 1.0), (0.0, 0.0)):
                there = (steps - begin - offset) * n + begin + offset
                inside = (there >= steps[0]) & (there <= steps[-1])
                expected = np.interp(there[inside], steps, slow)
                if inside.sum() >= FEWEST and _varies(expected) and _same(fast[inside], expected, slow):
                    return (
                        "learning rate: pace",
                        f"the schedule of side {who} runs {n} times as fast: it is advanced with every micro-batch or"
                        " on every rank, or planned for fewer steps",
                    )
    return None


def _other(steps: Floats, a: Floats, b: Floats) -> tuple[str, str]:
    first = int(np.flatnonzero(np.abs(a - b) > EXACT * np.abs(a).max())[0])
    return (
        "learning rate",
        f"the learning rates differ from step {steps[first]:.0f} on ({a[first]:.4g} and {b[first]:.4g}): another"
        " schedule, warm-up or number of steps",
    )


SAME = 1e-3  # relative; two first losses that are closer were computed from the same weights and batch
ROUNDING = 1e-5  # relative; differences of the first steps that are smaller are rounding
TINY = 1e-9  # relative; where a difference that grows begins, at least
JUMP = 10.0  # a jump is that much larger than any difference before it, within three steps
BITS = -math.log(math.log(2))  # logarithm of the bits in a nat
SOON = 10  # steps from a jump to where it leaves the band, at most
SETTLED = 10  # steps before a jump, at least


@dataclass(frozen=True, kw_only=True)
class LikelyCause:
    """A guess at the cause: a short ``name``, a sentence, and a ``weight`` of its evidence from 0 to 1."""

    name: str
    text: str
    weight: float


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The positions [T] and both sides' means [T] of each metric; ``firsts``: the index at which a metric differs.

    ``broken``: metric, side, first position of values that are not finite on that side alone, and for how long.
    ``averaged``: metrics of which one log has means, with a sentence, and whether the numbers show it.
    ``numbers`` are counts of ranks and micro-batches in the logs' headers, ``resumed`` steps at which a log begins
    again; ``seeds`` says that the curves are means of several seeds, each of which has an order of its own. ``pace``: a
    sentence if the logs agree line for line, and their counters differ by a factor.
    """

    curves: Mapping[str, tuple[Floats, Floats, Floats]]
    firsts: Mapping[str, int]
    broken: tuple[tuple[str, str, float, str], ...]
    averaged: Mapping[str, tuple[str, bool]]
    numbers: Mapping[int, list[str]]
    resumed: Mapping[int, str]
    by: str
    seeds: bool
    pace: str = ""

    def ratio(self, metric: str) -> Floats | None:
        """Give the logarithm of B / A [T]; None if the metric is missing or not positive everywhere."""
        if metric not in self.curves:
            return None
        _, a, b = self.curves[metric]
        return np.log(b / a) if len(a) and (a > 0).all() and (b > 0).all() else None

    @property
    def same_start(self) -> bool:
        """Whether the first step's loss is the same on both sides: the same weights and the same batch."""
        return any((d := self.ratio(name)) is not None and abs(d[0]) < SAME for name in LOSSES)


ALONE = "alone"  # of one position
LOSSES = ("loss", "policy_loss")
DIVERGENCES = ("kl", "ppo_kl")


def likely_causes(evidence: Evidence) -> tuple[LikelyCause, ...]:
    """Give all likely causes that fit, the most probable first."""
    if evidence.pace:
        return (LikelyCause(name="counter", text=evidence.pace, weight=0.97),)
    found = [LikelyCause(name=name, text=text, weight=0.95) for name, text in rate_causes(evidence.curves.get("lr"))]
    for guess in GUESSES:
        found += guess(evidence)
    causes = [cause for cause in found if cause.name not in CONSEQUENCES]
    return tuple(sorted(causes or found, key=lambda cause: -cause.weight))


def _not_finite(evidence: Evidence) -> Iterator[LikelyCause]:
    """Name the first metric that is not finite on one side alone."""
    for metric, side, position, course in sorted(evidence.broken, key=lambda one: one[2])[:1]:
        where = f"{evidence.by} {position:.0f}"
        when = f"at {where} {ALONE}" if course == ALONE else f"from {where} on, {course}"
        yield LikelyCause(
            name="not finite",
            text=f"the {metric} of side {side} is not finite {when}: an"
            " overflow, a division by zero, or a learning rate that is too high; look at the step before",
            weight=0.9,
        )


def _averaged(evidence: Evidence) -> Iterator[LikelyCause]:
    """Name the metrics of which one log has means."""
    for metric, (text, is_shown) in evidence.averaged.items():
        name, weight = ("averaged", 0.85) if is_shown else ("perhaps averaged", 0.6)
        yield LikelyCause(name=name, text=f"{metric}: {text}", weight=weight)


def _factors(evidence: Evidence) -> Iterator[LikelyCause]:
    """Look for a constant factor of the loss, of the gradient norm, or of both."""
    loss, norm = evidence.ratio("loss"), evidence.ratio("grad_norm")
    of_loss, of_norm = (_steady(d, evidence) for d in (loss, norm))
    if of_loss is None and loss is not None and norm is not None and abs(loss[0]) > 0.1 > 5 * abs(loss[0] - norm[0]):
        of_loss = of_norm = Factor(log=float(loss[0]), error=SAME)  # the same weights and batch: later the runs diverge
    if of_norm is None and norm is not None and evidence.same_start and abs(norm[0]) > 0.1:
        of_norm = Factor(log=float(norm[0]), error=SAME)
    if of_loss and of_norm and abs(of_loss.log - of_norm.log) < max(0.1 * abs(of_loss.log), 0.02):
        yield LikelyCause(
            name="loss and gradient factor",
            text=f"loss and gradient norm are both {_in_words(of_loss, evidence)}: a mean over micro-batches or tokens"
            " is taken differently (under gradient accumulation, a sum instead of a mean, or the reverse)",
            weight=0.9,
        )
        return
    if of_loss:
        bits = abs(abs(of_loss.log) - BITS) < max(3 * of_loss.error, 0.002)
        how = "a sum instead of a mean over micro-batches, ranks or tokens, or the reverse"
        yield LikelyCause(
            name="loss factor",
            text=f"the loss is {_in_words(of_loss, evidence)}: it is logged"
            f" {'in bits on one side and in nats on the other (1.4427 is 1 / ln 2)' if bits else f'as {how}'}; "
            + ("the logs have no gradient norm" if norm is None else "the gradients show no such factor"),
            weight=0.85,
        )
    if of_norm:
        yield LikelyCause(
            name="gradient factor",
            text=f"the gradient norm is {_in_words(of_norm, evidence)}"
            f"{'' if loss is None else ', and the loss is not'}: gradients are summed over"
            " the data-parallel ranks or the micro-batches of an accumulation instead of averaged, or the reverse"
            f"{_square_root(of_norm)}",
            weight=0.85,
        )


def _other_factors(evidence: Evidence) -> Iterator[LikelyCause]:
    """Look for a constant factor of any other metric, such as a KL divergence, which training need not show."""
    for metric in (name for name in evidence.firsts if name not in ("loss", "grad_norm") and not is_rate(name)):
        if found := _steady(evidence.ratio(metric), evidence):
            how = "another estimator (k1, k2 or k3), or a coefficient" if metric in DIVERGENCES else "a coefficient"
            yield LikelyCause(
                name="factor of a metric",
                text=f"the {metric} is {_in_words(found, evidence)}: {how} in one of the numbers, or a sum instead of a"
                " mean over tokens, responses or ranks",
                weight=0.7,
            )


def _steady(d: Floats | None, evidence: Evidence) -> Factor | None:
    """Find the constant factor of a metric; None if a first step of the same weights and batch does not have it."""
    found = constant_factor(d) if d is not None else None
    if d is None or found is None or (evidence.same_start and abs(d[0] - found.log) > 0.3 * abs(found.log)):
        return None
    return found


def _in_words(factor: Factor, evidence: Evidence) -> str:
    """Describe a factor: its size, the whole number that it is, and the entries of logs' headers with this number."""
    text = f"{factor.size:.4g} times {'larger' if factor.log > 0 else 'smaller'} on side B"
    found = integer_of(factor)
    if found:
        number, root = found
        if root or f"{factor.size:.4g}" != str(number):
            text += f", {'the square root of ' if root else ''}{number} within its error"
        if number in evidence.numbers and not root:
            text += f" ({' and '.join(evidence.numbers[number])} in the logs' headers)"
    return text


def _square_root(factor: Factor) -> str:
    found = integer_of(factor)
    if not found or not found[1]:
        return ""
    return (
        "; a square root is what a norm shows that counts replicas once per rank, or that sees the gradient of one of"
        f" {found[0]} ranks or micro-batches where noise dominates"
    )


def _jump(evidence: Evidence) -> Iterator[LikelyCause]:
    """Look for agreement and then a sudden difference: a resume that did not restore something."""
    for metric in (*LOSSES, "grad_norm"):
        d = evidence.ratio(metric)
        first = evidence.firsts.get(metric)
        if d is None or first is None or first < SETTLED:
            continue
        steps, size = evidence.curves[metric][0], np.abs(d)
        before = np.maximum(np.maximum.accumulate(size)[:-1], ROUNDING)
        candidates = range(max(SETTLED, first - SOON), first + 1)
        rise = {at: float(size[at : at + 3].max()) / float(before[at - 1]) for at in candidates}
        at = next((at for at in candidates if size[at] > 0.1 * size[at : at + 3].max() and rise[at] >= JUMP), None)
        if at is None:
            continue
        if passing := _passing(evidence, metric, at, level=float(before[at - 1])):
            yield passing
            return
        soon = d[at : first + SOON]
        peak, tail = float(soon[np.abs(soon).argmax()]), size[first + SOON :]
        fades = len(tail) > SOON and float(tail[-len(tail) // 4 :].mean()) < 0.25 * abs(peak)
        course = ", and the difference fades, as moments fill again" if fades else ""
        again = "".join(f"; the log of {name} begins again at step {step}" for step, name in evidence.resumed.items())
        cause = "a resume without its state" if again else "as after a resume without its state, which no log shows"
        yield LikelyCause(
            name="jump",
            text=f"both agree before {evidence.by} {steps[at]:.0f}, from which the {metric} differs"
            f" by up to {percent(np.expm1(peak))}{course}: {cause} (optimizer moments, step count,"
            f" schedule or data position){again}",
            weight=0.8,
        )
        return


def _passing(evidence: Evidence, metric: str, at: int, *, level: float) -> LikelyCause | None:
    """Tell a jump at the index ``at`` that no weights show: later steps, or another metric, agree as before.

    ``level``: the largest difference before the jump.
    """
    d = evidence.ratio(metric)
    if d is None or level > SAME:
        return None
    steps, size = evidence.curves[metric][0], np.abs(d)
    last = int(np.flatnonzero(size > level)[-1])
    where = (
        f"at {evidence.by} {steps[at]:.0f}"
        if last == at
        else f"from {evidence.by} {steps[at]:.0f} to {steps[last]:.0f}"
    )
    peak = d[at + int(size[at : last + 1].argmax())]
    before = f"both agree before {evidence.by} {steps[at]:.0f}"
    says = f"{before}; the {metric} differs {where} alone, by up to {percent(np.expm1(peak))}"
    means = (
        "both have the same weights there, and no state was lost: one bad batch, or a number that is logged otherwise"
    )
    if last < len(d) - 1 and size[last] >= JUMP * level:
        return LikelyCause(name="passing", text=f"{says}, and both agree again after it: {means}", weight=0.8)
    for name in (*LOSSES, "grad_norm"):
        other = evidence.ratio(name) if name != metric else None
        if other is None or len(other) != len(d) or not _varies(evidence.curves[name][1]):
            continue
        if float(np.abs(other).max()) <= max(level, ROUNDING):
            return LikelyCause(name="passing", text=f"{says}, and the {name} does not: {means}", weight=0.8)
    return None


def _data_order(evidence: Evidence) -> Iterator[LikelyCause]:
    """Look for the same distribution of losses in another order, from the first step or a later one on."""
    for metric in LOSSES:
        d = evidence.ratio(metric)
        if d is None or len(d) < 20 or evidence.seeds:
            continue
        _, a, b = evidence.curves[metric]
        x, y = _detrended(a), _detrended(b)
        if min(x.std(), y.std()) < SAME * float(np.mean(np.abs(a))):
            continue
        correlation = float(np.corrcoef(x, y)[0, 1])
        mean, noise = float(np.mean(d)), float(np.std(d)) / np.sqrt(len(d) / 4)
        unlike = correlation < max(0.3, 2.6 / np.sqrt(len(d))) and float(np.median(np.abs(d[:5]))) > SAME
        if unlike and abs(mean) < 4 * noise:
            yield LikelyCause(
                name="data order",
                text=f"the {metric} has the same mean on both sides ({percent(np.expm1(mean))}), but its ups and downs"
                f" have nothing to do with each other (correlation {correlation:.2f}), from the first step on: another"
                " order of the data, or another seed",
                weight=0.75,
            )
            return


def _growing(evidence: Evidence) -> Iterator[LikelyCause]:
    """Look for a difference that grows from a first step that agrees."""
    for metric in (*LOSSES, "grad_norm"):
        d = evidence.ratio(metric)
        if d is None or len(d) < 12 or metric not in evidence.firsts:
            continue
        size = np.abs(d)
        smooth = np.convolve(size, np.ones(5) / 5, mode="valid")
        rising = np.array([part.mean() for part in np.array_split(smooth[: max(8, int(smooth.argmax()) + 1)], 8)])
        rank = float(np.corrcoef(np.argsort(np.argsort(rising)), np.arange(8))[0, 1])
        agrees = abs(d[0]) < (0.1 * float(smooth.max()) if evidence.seeds else SAME)
        if not agrees or rank < 0.7 or not (_gradual(rising) or _gradual(np.log(np.maximum(rising, TINY)))):
            continue
        if float(size[1:4].max()) == 0:
            continue
        if float(size[1:4].max()) < ROUNDING:
            yield LikelyCause(
                name="rounding",
                text=f"the {metric} differs by {size[1:4].max():.1e} in the first steps and parts slowly: rounding"
                " (another precision, kernel or order of sums) that training amplifies; not a bug by itself",
                weight=0.55,
            )
        else:
            yield LikelyCause(
                name="growing",
                text=f"the {metric} agrees at the first step and drifts apart steadily from there: another learning"
                " rate, weight decay or betas, or gradients that are scaled or clipped differently",
                weight=0.5,
            )
        return


def _gradual(values: Floats) -> bool:
    """Tell whether no single step makes up most of a rise."""
    return bool(np.diff(values).max() <= 0.8 * np.ptp(values))


def _detrended(values: Floats) -> Floats:
    """Subtract a running mean of a tenth of the run, at least 5 steps long."""
    width = max(5, len(values) // 10) | 1
    padded = np.pad(values, width // 2, mode="reflect", reflect_type="odd")  # goes on with the slope at the ends
    return values - np.convolve(padded, np.ones(width) / width, mode="valid")


GUESSES: tuple[Callable[[Evidence], Iterator[LikelyCause]], ...] = (
    _not_finite,
    _averaged,
    _factors,
    _other_factors,
    _jump,
    _data_order,
    _growing,
)
CONSEQUENCES = ("growing", "rounding", "perhaps averaged")  # reported only where no other cause was found
