"""Measures how far numbers and tensors are from a reference, by one definition for all that compare.

The judge, the comparison of backends, bisection and records of training loops measure with these functions.
conformance.numerics.factors names the likely cause of a factor. Tensors may be torch's or numpy's.
"""

import math
from collections.abc import Iterable
from typing import Any

FLOOR = 0.05  # times the RMS norm of a stage's tensors: the least norm that an error is relative to


def floor_of(squares: Iterable[float]) -> float:
    """Returns the least norm that the errors of a stage are relative to, from the squared norms of its tensors.

    A tensor below it, such as the gradient of a bias that cancels, consists mostly of rounding.
    """
    squares = list(squares)
    return FLOOR * math.sqrt(sum(squares) / max(1, len(squares)))


def relative(distance: float, size: float) -> float:
    """Returns distance / size: 0 for equal numbers, infinite for NaN and where only ``size`` is 0."""
    return 0.0 if distance == 0 else finite(distance / size) if size else math.inf


def ratio(observed: float, allowed: float) -> float:
    """Returns observed / allowed; infinite if ``observed`` is NaN, or if it is above a bound of 0."""
    return relative(observed, max(allowed, 0.0))


def finite(error: float) -> float:
    """Maps NaN to infinity, because NaN would pass every comparison."""
    return math.inf if math.isnan(error) else error


def scale_of(x: Any, ref: Any) -> tuple[float | None, float]:
    """Returns the factor of ``ref`` that is nearest to ``x``, <x, ref> / <ref, ref>, and the norm of the rest of ``x``.

    x, ref: tensors of one shape and dtype. The factor is None where ``ref`` is zero.
    """
    x, ref = x.reshape(-1), ref.reshape(-1)
    square = float(ref @ ref)
    if not square:
        return None, math.inf
    scale = float(x @ ref) / square
    rest = ref * -scale
    rest += x
    return scale, finite(math.sqrt(float(rest @ rest)))


def not_finite(x: Any) -> str:
    """Names the numbers of a tensor that are not finite: ``NaN`` or ``infinite numbers``; empty if there are none."""
    return "NaN" if (x != x).any() else "infinite numbers" if (abs(x) == math.inf).any() else ""
