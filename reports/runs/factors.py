"""Constant factors between two curves, and the whole numbers whose ratio or root they are."""

import math
from dataclasses import dataclass

import numpy as np

from reports.runs.run import Floats

LEAST = 0.05  # of a logarithm: a smaller factor is a difference like any other
LARGEST = 1024


@dataclass(frozen=True, kw_only=True)
class Factor:
    """exp(``log``), with the standard ``error`` of the logarithm."""

    log: float
    error: float

    @property
    def size(self) -> float:
        """The factor or its inverse, whichever is above 1."""
        return math.exp(abs(self.log))


def constant_factor(d: Floats) -> Factor | None:
    """The factor exp(d) of logarithms ``d`` [T] if it is the same from the first third to the last; else None.

    Its median has to stand out of what varies about it, whose scale is the median absolute deviation.
    """
    if len(d) < 3:
        return None
    middle = float(np.median(d))
    spread = 1.4826 * float(np.median(np.abs(d - middle)))
    third = max(len(d) // 3, 1)
    begin, end = float(np.median(d[:third])), float(np.median(d[-third:]))
    error = 1.2533 * spread / math.sqrt(len(d))  # of a median of normally distributed numbers
    steady = abs(begin - end) <= max(0.1 * abs(middle), 4 * 1.2533 * spread * math.sqrt(2 / third))
    if abs(middle) < LEAST or spread > 0.5 * abs(middle) or not steady or begin * end <= 0:
        return None
    return Factor(log=middle, error=error)


def integer_of(factor: Factor) -> tuple[int, bool] | None:
    """The whole number n (from 2) that the factor or its inverse is, and whether as its square root; None if unclear.

    Unclear is a factor whose error is not small beside the distance to the next number of that kind; but powers of two
    are what ranks and micro-batches mostly are, and count as numbers of a kind of their own.
    """
    size, error = abs(factor.log), max(3 * factor.error, 0.005)
    for root in (False, True):
        exponent = 0.5 if root else 1.0
        for candidates in (range(2, LARGEST + 1), [2**k for k in range(1, 11)]):
            logs = exponent * np.log(np.array(candidates, dtype=np.float64))
            near = np.flatnonzero(np.abs(logs - size) <= error)
            if len(near) == 1 and not (root and math.isqrt(candidates[int(near[0])]) ** 2 == candidates[int(near[0])]):
                return candidates[int(near[0])], root
    return None
