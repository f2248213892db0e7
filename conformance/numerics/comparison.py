"""Measures how far numbers and tensors are from a reference, by one definition for all that compare.

The judge, the comparison of backends, bisection and records of training loops measure with these functions, which also
name the likely cause of a constant factor: a count of ranks, of micro-batches or of tokens, of those that the caller
knows. Tensors may be torch's or numpy's. Nothing here imports torch.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
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


WHOLE = 1e-3  # relative error within which a factor is taken for a whole number
LARGEST = 1024  # count of ranks or micro-batches that a factor is taken for


def powers_of(counts: Mapping[str, float]) -> dict[str, float]:
    """Give the factors that a mean or a norm over each count may be off by: n, 1/n, sqrt(n) and 1/sqrt(n).

    counts: by name. A count of 1 explains nothing and is left out.
    """
    return {
        text: factor
        for name, n in counts.items()
        if n > 1
        for text, factor in (
            (name, n),
            (f"1/({name})", 1 / n),
            (f"sqrt({name})", n**0.5),
            (f"1/sqrt({name})", n**-0.5),
        )
    }


def common_factor(factors: Iterable[float], *, within: float) -> float | None:
    """Returns the factor that all ``factors`` are, to a relative spread of ``within``; None if there is no such one."""
    found = list(factors)
    return found[0] if found and max(found) - min(found) <= within * abs(found[0]) else None


def times(factor: float, *, of: str = "the reference", digits: int = 4, causes: Sequence[str] = ()) -> str:
    """Describes a factor: ``0.5 times the reference, which is dp or accumulation``."""
    return f"{factor:.{digits}g} times {of}" + (f", which is {' or '.join(causes)}" if causes else "")


def mean_over(factor: float) -> str:
    """Names the likely cause of a factor n or 1/n whose counts are not known; empty for any other factor."""
    found = whole_number(math.log(factor), within=WHOLE) if factor > 0 else None
    return f"a mean over {found[0]} micro-batches or ranks that one side takes and the other does not" if found else ""


def likely_causes(scale: float, factors: Mapping[str, float], *, within: float) -> list[str]:
    """Give the names of the ``factors`` that ``scale`` is, to a relative error of ``within``."""
    return [name for name, factor in factors.items() if abs(scale / factor - 1) < within]


def whole_number(log: float, *, within: float, roots: bool = False) -> tuple[int, bool] | None:
    """Find the whole number n from 2 to LARGEST whose logarithm ``log`` is, whatever its sign.

    within: the error of ``log``. roots: whether ``log`` may also be that of the square root of n.

    Returns n, and whether it stands under a root. None if no number is near, or several of one kind are. Ranks and
    micro-batches mostly come in powers of two, so these count as numbers of a kind of their own.
    """
    for root in (False, True)[: 1 + roots]:
        for kind in (range(2, LARGEST + 1), [2**k for k in range(1, 11)]):
            near = _near(abs(log) * (2 if root else 1), kind, within=within * (2 if root else 1))
            if len(near) == 1 and not (root and math.isqrt(near[0]) ** 2 == near[0]):
                return near[0], root
    return None


def _near(log: float, numbers: Iterable[int], *, within: float) -> list[int]:
    return [number for number in numbers if abs(math.log(number) - log) <= within]
