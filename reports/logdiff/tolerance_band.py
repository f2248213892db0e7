"""Derives the band within which two sides agree. docs/guides/comparing-runs.md explains and measures it.

With one run a side, a relative threshold, but for learning rates, which are exact. With several, the spread of the
seeds: the difference of the sides' means over its standard error is compared with a quantile of Student's t, at every
step and for means of a twentieth of the run, corrected for their number (Bonferroni), so that one comparison in a
hundred of honest sides is flagged at most.

* Numbers that are positive everywhere are compared by their logarithm: a loss and a gradient norm vary by a part of
  their size, and one spike moves a mean of logarithms little.
* The variance within the sides is pooled over both, and over neighbouring positions, since two seeds alone say little;
  where a position's own is larger, that one counts: some steps vary more than their neighbours, in every run.
* Deviations of neighbouring positions resemble each other (a run that lags goes on lagging). The number of independent
  ones among n with autocorrelation r is n (1 - r) / (1 + r) (Bayley and Hammersley, 1946), and the degrees of freedom
  are that times the runs less two: where seeds wander slowly, few of them give a wide band.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from statistics import NormalDist

import numpy as np

from reports.logdiff.run import Decimals, Floats

ERROR = 0.01  # the probability that honest runs are flagged in any metric, at most
NEIGHBOURS = 5  # positions on each side that a variance is pooled over
BLOCKS = 20  # of a run, whose means are compared
LEAST = 1e-6  # relative, of a learning rate to the largest; below it is rounding in float32
SAMPLED = 100  # values whose digits are counted
SMALLEST = 1e-4  # size of a metric of order one; below it may be what cancelled sums leave, of which sides are unlike
ALIKE, SIGNED_ALIKE = 0.9, 0.99  # cosine of two sides' curves, above which what is smaller is a number all the same
FEWEST = 5  # positions that show it
QUIET = 0.25  # of the noise of two curves, below which that of their ratio says that it is the same noise
FLOAT32 = 2.0**-23  # relative rounding; of sums of order one that cancel, it is left
CANCELLED = 1e-2  # of its size; a difference of sums of either sign that is smaller is rounding
QUARTILE = 0.75  # of a metric's values, whose size is its size: one spike among them says nothing about the others
HUGE = 10.0  # of a metric; how much wider a band is says nothing
WIDE = 0.5  # of a metric; a band that is nowhere narrower proves little
SHORT = 0.05  # relative; half a unit of a second digit: what is printed as 1e-05 is that, and not rounded from 1.4e-05
UNKNOWN = (Decimals(), Decimals())  # of two sides
SMALL = 1e-3  # of a metric's size: differences of smaller values are not taken as ratios


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A difference and what is allowed, at positions [T]: side B less side A, relative, and the band's half width.

    ``outside`` [T] says where they part; ``spans`` [T] the number of positions whose mean shows it, 1 for the position
    alone, 0 inside; ``shown`` and ``bound`` [T] the difference of that mean, and what is allowed of it. A value that is
    not finite on one side only is outside. ``untold``: why the metric cannot be said to agree where nothing is outside;
    empty if it can. ``wide``: whether that is because too much is allowed of a metric that is positive everywhere; one
    that changes its sign may be noise about 0, as a policy loss is.
    """

    difference: Floats
    allowed: Floats
    outside: np.ndarray
    spans: np.ndarray
    shown: Floats
    bound: Floats
    untold: str = ""
    wide: bool = False


def within_threshold(
    a: Floats,
    b: Floats,
    threshold: float,
    *,
    any_size: bool,
    noisy: bool = False,
    decimals: Sequence[Decimals] = UNKNOWN,
) -> Judged:
    """One run a side, [T] each: b - a relative to a; digits that a log does not print are allowed.

    A metric that changes its sign is measured by its size at least: next to a zero, a ratio says nothing. Unless it is
    of ``any_size``, it may be rounding: the policy loss of normalised advantages is 0 but for that, and its ratios are
    noise. Then the ``threshold`` is relative to SMALLEST at least, and the metric is ``untold``.

    ``noisy``: of a ratio, such as a divergence or the share of clipped tokens, in which two honest runs differ by its
    noise from step to step. That noise is allowed as well; means over more steps, whose noise is smaller, are judged.
    ``decimals``: of each side, where they are known.
    """
    known = _known(a, b)
    size = _size(known)
    one_sign = bool((known > 0).all() or (known < 0).all())
    signed = bool((known < 0).any() and (known > 0).any())
    scale = np.maximum(np.abs(a), size if signed else SMALL * size)
    untold = "" if any_size else _cancelled(a, b)
    digits = unprinted(a, any_size=any_size, decimals=decimals[0])
    digits = digits + unprinted(b, any_size=any_size, decimals=decimals[1])
    allowed = threshold * np.maximum(scale, SMALLEST if untold else 0.0) + digits
    if not any_size and not one_sign and size < SMALLEST:
        allowed = np.maximum(allowed, FLOAT32)
    judge = _within_noise if noisy else _judged
    return replace(judge(a, b, scale=scale, allowed=allowed), untold=untold)


def _cancelled(a: Floats, b: Floats) -> str:
    """Say that a metric may be what cancelled sums leave, if its values [T] are small and the sides' are unlike.

    Curves that are smooth and keep their sign are none.
    """
    finite = np.isfinite(a) & np.isfinite(b)
    x, y = a[finite], b[finite]
    size = _size(_known(a, b))
    lengths = float(np.linalg.norm(x)) * float(np.linalg.norm(y))
    one_sign = (np.minimum(x, y) > 0).all() or (np.maximum(x, y) < 0).all()
    is_similar = lengths > 0 and len(x) >= FEWEST and float(x @ y) > (ALIKE if one_sign else SIGNED_ALIKE) * lengths
    smooth = one_sign and len(x) >= FEWEST and all(_noise(one) < QUIET * abs(one.mean()) for one in (x, y))
    if not 0 < size < SMALLEST or is_similar or smooth or (x == y).all():
        return ""
    return (
        f"its values are of size {size:.1e}, and those of the sides are unlike:"
        " too small to be told from the rounding of sums that cancel"
    )


def _within_noise(a: Floats, b: Floats, *, scale: Floats, allowed: Floats) -> Judged:
    """Judge each position, and the means of a twentieth and of all: what is ``allowed`` plus the noise of that mean.

    The noise of one value is taken from the differences of neighbours, on the quieter side. Where both sides have the
    same ups and downs, so that their ratio has QUIET of their noise at most, it is taken from the ratio's.
    """
    judged = _judged(a, b, scale=scale, allowed=allowed)
    where = np.flatnonzero(np.isfinite(a) & np.isfinite(b))
    count = len(where)
    if count < 2:
        return judged
    noise = np.full(count, math.sqrt(2) * min(_noise(side[where]) for side in (a, b)))  # of a difference
    if (np.minimum(a[where], b[where]) > 0).all():
        x, y = np.log(a[where]), np.log(b[where])
        if _noise(y - x) <= QUIET * min(_noise(x), _noise(y)):
            noise = np.minimum(noise, _noise(y - x) * a[where])
    spans = sorted({1, max(1, count // BLOCKS), count}, reverse=True)
    factor = NormalDist().inv_cdf(1 - ERROR / (2 * sum(math.ceil(count / span) for span in spans)))
    found = np.where(judged.outside & ~np.isin(np.arange(len(a)), where), 1, 0)
    shown, bound, alone = judged.difference.copy(), judged.allowed.copy(), judged.allowed.copy()
    for span in spans:
        starts = np.arange(0, count, span)
        sizes = np.diff([*starts, count])
        gap, size, band = (np.add.reduceat(one[where], starts) / sizes for one in (b - a, scale, allowed))
        band = band + factor * np.add.reduceat(noise, starts) / sizes / np.sqrt(sizes)
        beyond = np.repeat(np.abs(gap) > band, sizes)
        found[where[beyond]] = span
        shown[where[beyond]] = np.repeat(gap / size, sizes)[beyond]
        bound[where[beyond]] = np.repeat(band / size, sizes)[beyond]
        if span == 1:
            alone[where] = band / size
    return replace(judged, allowed=alone, outside=found > 0, spans=found, shown=shown, bound=bound)


def _noise(values: Floats) -> float:
    """The standard deviation of values [T] about a slow curve, by the differences of neighbours."""
    return float(np.sqrt(np.mean(np.diff(values) ** 2) / 2))


def within_digits(a: Floats, b: Floats, *, decimals: Sequence[Decimals] = UNKNOWN) -> Judged:
    """One run a side, [T] each, of a metric that is exact: b - a relative to a.

    Allowed are the digits that a log does not print, and LEAST of the largest value: a schedule multiplies that one.
    """
    largest = float(np.abs(_known(a, b)).max(initial=0.0))
    digits = unprinted(a, any_size=True, exact=True, decimals=decimals[0])
    digits = digits + unprinted(b, any_size=True, exact=True, decimals=decimals[1])
    return _judged(a, b, scale=np.maximum(np.abs(a), SMALL * largest), allowed=LEAST * largest + digits)


def _known(a: Floats, b: Floats) -> Floats:
    """The values of both sides where both are finite."""
    finite = np.isfinite(a) & np.isfinite(b)
    return np.concatenate([a[..., finite], b[..., finite]])


def _judged(a: Floats, b: Floats, *, scale: Floats, allowed: Floats) -> Judged:
    """What is outside of what is ``allowed`` [T], which is in the metric's unit, as is the ``scale`` [T]."""
    with np.errstate(all="ignore"):
        scale = np.where(scale > 0, scale, 1.0)
        difference, allowed = np.where(a == b, 0.0, (b - a) / scale), allowed / scale
        same = (a == b) | (np.isnan(a) & np.isnan(b))  # of values that are not finite
        outside = np.where(np.isfinite(a) & np.isfinite(b), np.abs(difference) > allowed, ~same)
    return Judged(
        difference=difference,
        allowed=allowed,
        outside=outside,
        spans=outside.astype(int),
        shown=difference,
        bound=allowed,
    )


def within_spread(
    a: Floats, b: Floats, *, metrics: int, any_size: bool, exact: bool = False, decimals: Sequence[Decimals] = ()
) -> Judged:
    """Several runs a side, [R, T] and [S, T], R + S > 2; ``metrics``: how many are judged, ``any_size`` as above.

    ``exact``: of a metric whose values are as they were configured, or rounded by a log to the digits that it shows.
    ``decimals``: of each run, where they are known.
    """
    count = a.shape[1]
    finite = np.isfinite(a).all(axis=0) & np.isfinite(b).all(axis=0)
    # As many of a side's seeds have broken down as of the other's, or they part.
    broken = ~finite & (np.isfinite(a).mean(axis=0) != np.isfinite(b).mean(axis=0))
    known = np.concatenate([a[:, finite], b[:, finite]])
    untold = "" if any_size else _cancelled(a.mean(axis=0), b.mean(axis=0))
    size = max(_size(known), SMALLEST if untold else 0.0)
    logarithmic = bool(known.size) and bool((known > 0).all()) and not untold
    spans = sorted({1, max(1, count // BLOCKS)})
    tests = metrics * sum(math.ceil(count / span) for span in spans)
    difference, allowed, shown, bound = np.full((4, count), np.nan)
    found = np.zeros(count, dtype=int)
    narrowest = math.inf
    where = np.flatnonzero(finite)
    if len(where):
        with np.errstate(all="ignore"):
            x, y = (np.log(side[:, finite]) if logarithmic else side[:, finite] / (size or 1.0) for side in (a, b))
            units = size or 1.0
            digits = [
                unprinted(v, any_size=any_size, exact=exact, decimals=one) / (np.abs(v) if logarithmic else units)
                for v, one in zip((*a, *b), decimals or [Decimals()] * (len(a) + len(b)), strict=True)
            ]
        rounding = np.max(digits, axis=0)[finite]
        for span in reversed(spans):
            starts = np.arange(0, len(where), span)
            gap, band = _blocks(x, y, starts, tests=tests)
            sizes = np.diff([*starts, len(where)])
            least = (LEAST if any_size or logarithmic else CANCELLED) + 2 * np.add.reduceat(rounding, starts) / sizes
            band = np.maximum(band, least)
            narrowest = min(narrowest, float(np.median(np.expm1(band) if logarithmic else band)))
            beyond = np.repeat(np.abs(gap) > band, sizes)
            gap, band = (np.repeat(np.expm1(one) if logarithmic else one, sizes) for one in (gap, band))
            found[where[beyond]], shown[where[beyond]], bound[where[beyond]] = span, gap[beyond], band[beyond]
            if span == 1:
                difference[finite], allowed[finite] = gap, band
    outside = (found > 0) | broken
    wide = WIDE < narrowest < math.inf
    if wide and not untold:
        width = f"±{narrowest:.0%} are" if narrowest < HUGE else f"more than ±{HUGE:.0%} are"
        untold = f"the runs of a side differ so much that {width} allowed; give more runs"
    return Judged(
        difference=difference,
        allowed=allowed,
        outside=outside,
        spans=np.where(outside, np.maximum(found, 1), 0),
        shown=shown,
        bound=bound,
        untold=untold,
        wide=wide and logarithmic,
    )


def _size(known: Floats) -> float:
    """The root mean square of a metric's values, or the upper quartile of what they are without their signs if that is
    less, as where there is a spike; zeros are no values here."""
    sizes = np.abs(known[known != 0])
    if not sizes.size:
        return float(known.size == 0)
    return min(float(np.sqrt(np.mean(known**2))), float(np.quantile(sizes, QUARTILE, method="lower")))


def _blocks(x: Floats, y: Floats, starts: np.ndarray, *, tests: int) -> tuple[Floats, Floats]:
    """Of each block of positions the difference of the sides' means, and what is allowed of it. x [R, T], y [S, T]."""
    sizes = np.diff([*starts, x.shape[1]])
    x, y = (np.add.reduceat(side, starts, axis=1) / sizes for side in (x, y))
    residuals = np.concatenate([x - x.mean(axis=0), y - y.mean(axis=0)])
    freedom = len(residuals) - 2
    own = (residuals**2).sum(axis=0) / freedom
    kernel = np.ones(2 * NEIGHBOURS + 1)
    neighbours = np.convolve(np.ones(len(own)), kernel, mode="full")[NEIGHBOURS : NEIGHBOURS + len(own)]
    pooled = np.convolve(own, kernel, mode="full")[NEIGHBOURS : NEIGHBOURS + len(own)] / neighbours
    independent = np.maximum(neighbours * _independent(residuals), 1.0)
    factors = {n: student_t(1 - ERROR / (2 * tests), freedom * n) for n in set(independent.tolist())}
    factor = np.array([factors[n] for n in independent.tolist()])
    error = np.sqrt(np.maximum(own, pooled) * (1 / len(x) + 1 / len(y)))
    return y.mean(axis=0) - x.mean(axis=0), factor * error


def _independent(residuals: Floats) -> float:
    """The part of neighbouring deviations that is independent: (1 - r) / (1 + r), of their autocorrelation at lag 1."""
    if residuals.shape[1] < 3:
        return 1.0
    scale = np.sqrt((residuals**2).mean(axis=0))
    unit = residuals / np.where(scale > 0, scale, 1.0)
    total = float((unit**2).sum())
    r = float((unit[:, 1:] * unit[:, :-1]).sum()) / total if total else 0.0
    r = min(max(r, 0.0), 0.99)
    return (1 - r) / (1 + r)


def unprinted(values: Floats, *, any_size: bool, exact: bool = False, decimals: Decimals = UNKNOWN[0]) -> Floats:
    """What a log may have rounded away of each of a run's values [T].

    That is half a unit where a log prints fixed ``decimals``. Else it is what ``printed`` says, and at most SHORT of
    the value, or, where the metric is not of ``any_size``, of the size of the run's values: 1.0 against 0.0 is no
    matter of digits. Of an ``exact`` metric, one value throughout or values of one digit are what was configured, and
    nothing is rounded away.
    """
    if decimals.of_all:
        return np.full(len(values), decimals.half_unit)
    of_zeros = np.where(values == 0, decimals.half_unit, 0.0)
    finite = values[np.isfinite(values)]
    if exact and (len(np.unique(finite[finite != 0])) < 2 or _figures(values)[0] < 2):
        return of_zeros
    size = np.abs(values) if any_size else _size(finite) if finite.size else 0.0
    return np.minimum(printed(values), SHORT * size) + of_zeros


def printed(values: Floats) -> Floats:
    """Half a unit of the last digit that a log prints, for each of the values [T]; 0 for values that are not finite.

    A log prints a number of digits or a number of decimals. Neither is known, so both are taken at the longest that
    the values show, and the larger of the two units counts.
    """
    digits, decimals = _figures(values)
    with np.errstate(all="ignore"):
        exponents = np.floor(np.log10(np.abs(values)))
        by_digits = np.where(np.isfinite(exponents), 0.5 * 10.0 ** (exponents - digits + 1), 0.0)
    return np.where(np.isfinite(values), np.maximum(by_digits, 0.5 * 10.0 ** (-float(decimals))), 0.0)


def _figures(values: Floats) -> tuple[int, int]:
    """The most digits, and the most decimals, that SAMPLED of the values [T] have."""
    digits = decimals = 0
    known = values[np.isfinite(values) & (values != 0)]
    for value in known[:: len(known) // SAMPLED + 1].tolist():
        _, figures, exponent = Decimal(repr(value)).normalize().as_tuple()
        digits, decimals = max(digits, len(figures)), max(decimals, -int(exponent))
    return digits, decimals


def student_t(probability: float, freedom: float) -> float:
    """The quantile of Student's t above 1/2 (Hill, Algorithm 396, Communications of the ACM 13, 1970)."""
    p = 2 * (1 - probability)
    if freedom < 2:  # of 1, which is larger than that of any between
        return 1 / math.tan(p * math.pi / 2)
    if freedom == 2:
        return math.sqrt(2 / (p * (2 - p)) - 2)
    a = 1 / (freedom - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * freedom
    y = (d * p) ** (2 / freedom)
    if y > 0.05 + a:
        x = NormalDist().inv_cdf(p / 2)
        y = x * x
        if freedom < 5:
            c += 0.3 * (freedom - 4.5) * (x + 0.6)
        c = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c
        y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
        y = a * y * y
        y = math.expm1(y)
    else:
        y = (
            (1 / (((freedom + 6) / (freedom * y) - 0.089 * d - 0.822) * (freedom + 2) * 3) + 0.5 / (freedom + 4)) * y
            - 1
        ) * (freedom + 1) / (freedom + 2) + 1 / y
    return math.sqrt(freedom * y)
