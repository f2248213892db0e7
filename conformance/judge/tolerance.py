"""Computes the allowed distance of a cell from the oracle, by a rule and never by hand (docs/principles.md).

* Exact tier: one fixed bound, whatever the model, layout or step. Honest float64 errors are below 1e-12, the smallest
  silent bug on record is 3.5e-5 (docs/explanations/tolerances.md), so nothing needs tuning.
* fp32, bf16, fp16: single-process runs in the cell's precision are compared with the float64 oracle, quantity by
  quantity. A cell may be NOISE_FACTOR times as far away as the farther one. The effect of rounding is thus measured in
  the same run, on the same data; what a library's precision policy adds shows.

One measured error is one draw of a random rounding; a lucky draw must not become a bound. So the noise of a quantity is
its largest over the runs and the steps; for a tensor no less than the median of its stage at that step, for a scalar no
less than SCALAR_ROUNDINGS roundings of float32, and for a sum over tokens, a norm or a scale of tensors
(conformance.judge.direction) no less than the effect of the errors of its parts. A norm also has a narrower bound: it
is rebuilt from the cell's own tensors.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from conformance.records.record_format import RecordError
from conformance.results.verdict import TokenErrors
from conformance.spec.observables import Observable
from conformance.spec.precision import PRECISIONS, PrecisionName

EXACT = 1e-11  # relative, per tensor; honest errors are below 1e-12
NOISE_FACTOR = 3.0  # times the single-process error; see docs/explanations/tolerances.md for honest cells
ROUNDING = 2.0**-24  # relative rounding of one float32 operation
SCALAR_ROUNDINGS = 4  # least roundings of a reported scalar, whatever one run shows by chance
NORM_ROUNDINGS = 32  # float32 roundings between a framework's own norm and the one rebuilt in float64
# Every bound is then below 1/2, so nothing that is lost, doubled, or of the wrong sign is within it. Gradients have a
# limit by precision (Precision.noise_limit).
NOISE_LIMIT_OF_ALL = 1 / 6
# A worst row is an extreme of many: above NOISE_LIMIT_OF_ALL its bound is 1/2, which is at least twice its noise.
NOISE_LIMIT_OF_ROWS = 1 / 4
TOO_EXACT = 0.1  # times the single-process error; a cell below it did not compute in its precision
OF_ROWS = "(worst row)"  # suffix of the name of a measurement of one row
ROW_FLOOR = 0.25  # times the RMS norm of a tensor's rows

Key = tuple[str, str, int]  # stage, tensor and step of a measurement


def largest_rounding(precision: PrecisionName) -> float:
    """Returns the relative error of a value of a model above which no rounding explains it."""
    return EXACT if PRECISIONS[precision].is_exact else NOISE_FACTOR * PRECISIONS[precision].noise_limit


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One number that was compared, not judged yet. ``error`` of a tensor is ||x - ref|| / max(||ref||, FLOOR x RMS
    norm of the stage's tensors); the error of a number or of rows is relative to the unit that their observable
    declares, and the unit of a row with a leeway (conformance.judge.tensor_views.Leeway) is larger.

    scalar: whether there is one number per step, and value: this number. of_row: whether this is the worst row of a
    tensor. fixed: a bound that holds in every precision, None where the rule decides. max_abs and where: the largest
    absolute difference and its index. scale: <x, ref> / <ref, ref>. residual, size: ||x - scale ref|| and ||ref||, in
    the unit of ``error``. broken: in words, the numbers of x that are not finite. replica: whether ranks were compared
    with each other, not with the oracle. factor: times the noise, for a number with a narrower bound. typical: for a
    sum, a norm or a scale, the effect of the errors of its parts. of_tokens: whether these parts are numbers of tokens,
    which no gradient of the step reaches. rounding: added to the bound, for a tensor that was not read but rebuilt from
    rounded numbers. strip: for rows, the errors of their tokens.
    """

    stage: str
    tensor: str
    step: int
    error: float
    scalar: bool = False
    value: float | None = None
    of_row: bool = False
    fixed: float | None = None
    max_abs: float = 0.0
    where: str = ""
    scale: float | None = None
    residual: float = 0.0
    size: float = 0.0
    broken: str = ""
    replica: bool = False
    factor: float = NOISE_FACTOR
    typical: float = 0.0
    of_tokens: bool = False
    rounding: float = 0.0
    strip: TokenErrors | None = None

    @property
    def key(self) -> Key:
        return self.stage, self.tensor, self.step

    def left_without(self, factor: float) -> float:
        """Returns the error that is left when ``factor``, which is not 0, is undone."""
        distance = (self.scale or 0.0) - factor
        return math.hypot(self.residual, distance * self.size) / abs(factor)


def gradient_stages(observables: Sequence[Observable]) -> frozenset[str]:
    """Returns the stages whose tensors are judged one by one at every step: the gradients of each model."""
    return frozenset(o.stage for o in observables if o.kind == "tensors" and o.when == "every")


def noisiest(
    runs: Sequence[Sequence[Measurement]], *, precision: PrecisionName, gradients: frozenset[str], amplified: Set[Key]
) -> list[Measurement]:
    """Returns the larger error of the single-process runs for every quantity, with the largest effect of its parts.

    If a further run is too noisy in a quantity, or in a gradient and so in norms and scales, the first run alone
    counts. ``gradients`` and ``amplified``: see allowed_errors.
    """
    found: dict[Key, Measurement] = {}
    for number, run in enumerate(runs):
        judged = may_be_judged_by(run, precision, gradients)
        exempt = amplified if judged else frozenset()
        for q in run:
            follows = q.typical and not q.of_tokens
            if number and (_too_noisy(q, precision, gradients, exempt) or (follows and not judged)):
                continue
            largest = max(found.get(q.key, q), q, key=lambda m: m.error)
            found[q.key] = replace(largest, typical=max(found.get(q.key, q).typical, q.typical))
    return list(found.values())


def _limit(q: Measurement, precision: PrecisionName, gradients: frozenset[str]) -> float:
    """Returns the largest noise of a quantity that can make a bound."""
    return PRECISIONS[precision].noise_limit if q.stage in gradients and not q.of_row else NOISE_LIMIT_OF_ALL


def _too_noisy(q: Measurement, precision: PrecisionName, gradients: frozenset[str], amplified: Set[Key]) -> bool:
    """Whether a single-process run is too far off to judge by. An amplified update is judged by being rebuilt."""
    limit = NOISE_LIMIT_OF_ROWS if q.of_row else _limit(q, precision, gradients)
    return not q.error <= limit and not (q.key in amplified and math.isfinite(q.error))


def may_be_judged_by(run: Sequence[Measurement], precision: PrecisionName, gradients: frozenset[str]) -> bool:
    """Whether every gradient of a single-process run is exact enough to judge by."""
    return not any(_too_noisy(q, precision, gradients, frozenset()) for q in run if q.stage in gradients)


def allowed_errors(
    quantities: Sequence[Measurement],
    *,
    precision: PrecisionName,
    noise: Sequence[Measurement],
    gradients: frozenset[str],
    amplified: Mapping[Key, float],
    drift: Mapping[int, float],
) -> dict[Key, float]:
    """Returns the bound of every measurement, by its key.

    noise: the same quantities of the single-process run. gradients: the stages to which Precision.noise_limit applies.
    amplified, drift: the noise of an update that an optimizer may make of the noise of gradients, and the factor by
    which it may enlarge the noise of later steps (conformance.judge.rounding). An amplified update has no noise limit,
    because it is judged by being rebuilt. In the exact tier its bound follows from the rounding of the cell's own
    gradients, which are within their bound.

    Raises RecordError if the noise is not finite, or larger than its limit.
    """
    if PRECISIONS[precision].is_exact:
        return {
            q.key: max(EXACT, NOISE_FACTOR * amplified.get(q.key, 0.0)) if q.fixed is None else min(EXACT, q.fixed)
            for q in quantities
        }
    limits = {q.key: _limit(q, precision, gradients) for q in noise}
    for q in noise:
        if _too_noisy(q, precision, gradients, amplified.keys()):
            # The gradients of step 0 do not depend on the optimizer.
            less = "" if q.stage in gradients and q.step == 0 else "raise eps or lower the learning rate, or "
            limit = NOISE_LIMIT_OF_ROWS if q.of_row else limits[q.key]
            raise RecordError(
                f"the single-process run in {precision} is {q.error:.1e} off in {q.tensor} ({q.stage}, step {q.step}), "
                f"more than can be judged by ({limit:.1e}); {less}run the cell in fp32 and the exact tier"
            )
    noise = [replace(q, error=_bounding(q, drift.get(q.step, 1.0), limits[q.key])) for q in noise]
    medians = _medians(noise)
    largest: dict[tuple[str, str], float] = defaultdict(float)
    for q in noise:
        # The worst row is an extreme of few, so all tensors share the noise of the worst one.
        tensor = OF_ROWS if q.of_row else q.tensor
        largest[q.stage, tensor] = max(largest[q.stage, tensor], q.error, q.typical)
    bounds = {}
    for q in quantities:
        if q.fixed is not None:
            bounds[q.key] = q.fixed
        elif q.scalar:
            factor = min(q.factor, NOISE_FACTOR)
            bounds[q.key] = factor * max(largest[q.stage, q.tensor], SCALAR_ROUNDINGS * ROUNDING)
        elif q.of_row:
            bounds[q.key] = NOISE_FACTOR * largest[q.stage, OF_ROWS]
        else:
            typical = max(medians.get((q.stage, q.step), 0.0), amplified.get(q.key, 0.0))
            bounds[q.key] = NOISE_FACTOR * max(largest[q.stage, q.tensor], typical) + q.rounding
    return bounds


def _bounding(noise: Measurement, drift: float, limit: float) -> float:
    """Returns the error that makes a bound. Drift raises it to the limit at most. A larger error is that of an
    amplified update, or of a worst row, which counts as the limit."""
    return min(noise.error * drift, limit) if noise.of_row else max(noise.error, min(noise.error * drift, limit))


def is_too_exact(
    quantities: Sequence[Measurement],
    *,
    precision: PrecisionName,
    noise: Sequence[Measurement],
    gradients: frozenset[str],
) -> bool:
    """Whether a cell below the exact tier is so close to float64 that it cannot have computed in its precision."""

    def median(of: Sequence[Measurement]) -> float:
        return statistics.median(
            [q.error for q in of if q.stage in gradients and not (q.of_row or q.scalar)] or [math.inf]
        )

    return not PRECISIONS[precision].is_exact and median(quantities) < TOO_EXACT * median(noise)


def _medians(noise: Sequence[Measurement]) -> dict[tuple[str, int], float]:
    errors: dict[tuple[str, int], list[float]] = defaultdict(list)
    for q in noise:
        if not (q.scalar or q.of_row) and q.fixed is None:
            errors[q.stage, q.step].append(q.error)
    return {key: statistics.median(values) for key, values in errors.items()}
