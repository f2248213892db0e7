"""Hints: guesses at why two records part, from what differs together and how."""

from collections.abc import Iterator
from itertools import pairwise

from parity.quantities import Pair, Quantity, Stage

ALIKE = 0.01  # relative spread of factors that are taken for one
WHOLE = 1e-3  # how near to a whole number a factor is to be one
GRADUAL = 10.0  # a distance that grows less than so much in a step grows gradually


def hints(pair: Pair, parted: Stage) -> Iterator[str]:
    """Sentences, the most telling first."""
    different = parted.different
    factor = _one_factor(different)
    if factor is not None:
        yield from _of_factor(parted, factor, everything=len(different) == _sized(parted))
    if parted.name == "gradients" and (factor is None or len(different) < _sized(parted)):
        last = next(q.what for q in reversed(parted.quantities) if q.differs)
        yield (
            f"of what differs, {last} is nearest to the loss, in the order in which the model defines its parameters; a wrong "
            "backward pass shows there first, and in what lies before it as a consequence."
        )
    if parted.name == "update":
        for quantity in different:
            if quantity.norms and (still := [n == 0 for n in quantity.norms]) and any(still):
                yield f"{quantity.what} does not move in {(pair.a if still[0] else pair.b).name}."
    yield from _history(pair, parted)


def _one_factor(different: tuple[Quantity, ...]) -> float | None:
    """The factor by which all that differs differs, if it is the same."""
    scales = [quantity.scale for quantity in different if quantity.scale is not None]
    if len(scales) < len(different) or not scales:
        return None
    return scales[0] if max(scales) - min(scales) <= ALIKE * abs(scales[0]) else None


def _sized(stage: Stage) -> int:
    """How many quantities of a stage are not zero on both sides."""
    return sum(quantity.norms is None or any(quantity.norms) for quantity in stage.quantities)


def _of_factor(parted: Stage, factor: float, *, everything: bool) -> Iterator[str]:
    times = f"{factor:.6g} times"
    n = next((round(x) for x in (factor, 1 / factor) if round(x) > 1 and abs(x - round(x)) < WHOLE * x), None)
    mean = f"a mean over {n} micro-batches or ranks that one side takes and the other does not" if n else ""
    if parted.name in ("loss", "batch"):
        if mean:
            yield f"B is {times} A: {mean}."
    elif parted.name == "gradients" and everything:
        others = "clipping to another norm, or a loss scale"
        yield f"all gradients of B are {times} those of A, in the same direction: {f'{mean}, ' if mean else ''}{others}."
    elif parted.name == "gradients":
        yield f"what differs is {times} that of A, in the same direction, and nothing else differs: it is scaled by itself."
    elif parted.name == "update":
        yield f"the updates of B are {times} those of A, in the same direction: another rate."


def _history(pair: Pair, parted: Stage) -> Iterator[str]:
    """How what differs most came to it over the steps before."""
    what = parted.different[0].what
    past = [q.observed for s in pair.stages if s.name == parted.name for q in s.quantities if q.what == what]
    if len(past) < 2 or parted.different[0].said:
        return
    told = ", ".join(f"{distance:.1e}" for distance in past[-5:])
    if all(later <= GRADUAL * earlier for earlier, later in pairwise(past)):
        yield f"{what} has moved apart gradually ({told}): rounding that training amplifies, or a cause below the bound."
    else:
        yield f"{what} moved apart at once ({told})."
