"""Hints: guesses at why two records part, from what differs together and how."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from parity.quantities import Pair, Quantity, Stage

ALIKE = 0.01  # relative spread of factors that are taken for one
WHOLE = 1e-3  # how near to a whole number a factor is to be one
GRADUAL = 10.0  # a distance that grows less than so much in a step grows gradually
HINTED = 4


def hints(pair: Pair, parted: Stage) -> Iterator[str]:
    """Sentences, the most telling first."""
    different = parted.different
    if parted.name == "gradients":
        yield from _of_gradients(parted)
    elif (factor := _one_factor(different)) is not None:
        if parted.name == "update":
            yield f"The updates of B are {factor:.6g} times those of A, in the same direction: another rate."
        elif mean := _mean(factor):
            yield f"B is {factor:.6g} times A: {mean}."
    if parted.name == "update":
        for quantity in (q for q in different if q.norms and not all(q.norms)):
            assert quantity.norms is not None
            still = pair.a if quantity.norms[0] == 0 else pair.b
            yield f"{quantity.what} does not move in {still.name}."
    yield from _history(pair, parted)


def _of_gradients(stage: Stage) -> Iterator[str]:
    """What most gradients have in common is told apart from those that are wrong by themselves."""
    every = [quantity for quantity in stage.quantities if quantity.differs or any(quantity.norms or ())]
    factor, alike = _most_common_factor(every)
    wrong = [quantity for quantity in every if quantity not in alike]
    if not wrong:
        mean = f"{said}, " if (said := _mean(factor)) else ""
        yield (
            f"All gradients of B are {factor:.6g} times those of A, in the same direction: {mean}clipping to another "
            "norm, or a loss scale."
        )
        return
    if any(quantity.differs for quantity in alike):
        yield (
            f"{len(alike)} gradients of B are {factor:.6g} times those of A, as clipping makes them where the norm of "
            f"the others is wrong. The others: {_last_names([quantity.what for quantity in wrong])}."
        )
    own = _one_factor(wrong)
    if own is not None and alike:
        yield f"What is wrong by itself is {own / factor:.6g} times that of A, in the same direction: it is scaled."
    block = _block(wrong[-1].what)
    inside = [quantity.what for quantity in wrong if _block(quantity.what) == block]
    yield (
        f"Nearest to the loss of these is {block} ({_last_names(inside)}), in the order in which the model defines its "
        "parameters. A wrong backward pass shows there first; what lies before it is wrong in consequence."
    )


def _most_common_factor(quantities: Sequence[Quantity]) -> tuple[float, list[Quantity]]:
    """The factor that most gradients differ by, 1 if no two share one, and those that do."""
    groups = [
        (one.scale, [q for q in quantities if q.scale is not None and abs(q.scale / one.scale - 1) <= q.allowed])
        for one in quantities
        if one.scale
    ]
    factor, alike = max(groups, key=lambda group: len(group[1]), default=(1.0, []))
    return (factor, alike) if len(alike) > 1 or len(quantities) == 1 else (1.0, [])


def _one_factor(different: Sequence[Quantity]) -> float | None:
    """The factor by which all that differs differs, if it is the same."""
    scales = [quantity.scale for quantity in different if quantity.scale is not None]
    if len(scales) < len(different) or not scales:
        return None
    return scales[0] if max(scales) - min(scales) <= ALIKE * abs(scales[0]) else None


def _mean(factor: float) -> str:
    """What a factor of a whole number, or of one over it, comes from."""
    n = next((round(x) for x in (factor, 1 / factor) if round(x) > 1 and abs(x - round(x)) < WHOLE * x), None)
    return f"a mean over {n} micro-batches or ranks that one side takes and the other does not" if n else ""


def _block(name: str) -> str:
    """The layer that a parameter belongs to: its name up to the last number, or its module."""
    parts = name.split(".")
    last = max((place for place, part in enumerate(parts) if part.isdigit()), default=len(parts) - 2)
    return ".".join(parts[: last + 1]) or name


def _last_names(names: Sequence[str]) -> str:
    return ", ".join(names[-HINTED:]) + (f" and {len(names) - HINTED} more" if len(names) > HINTED else "")


def _history(pair: Pair, parted: Stage) -> Iterator[str]:
    """How what differs most came to it over the steps before."""
    worst = parted.different[0]
    past = [q.observed for s in pair.stages if s.name == parted.name for q in s.quantities if q.what == worst.what]
    if len(past) < 2 or worst.said:
        return
    told = ", ".join(f"{distance:.1e}" for distance in past[-5:])
    if all(later <= GRADUAL * earlier for earlier, later in pairwise(past)):
        yield f"{worst.what} moved apart gradually ({told}): rounding that training amplifies, or a small cause."
    else:
        yield f"{worst.what} moved apart at once ({told})."
