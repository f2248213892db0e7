"""Told: a comparison of two records in words, as text and as JSON values."""

import math
from collections.abc import Iterator
from typing import Any

from parity.files import Run
from parity.hints import hints
from parity.notes import notes
from parity.quantities import Pair, Quantity, Stage

LISTED = 10  # quantities of the stage that differs


def text(pair: Pair) -> str:
    """Where and how they part, or how closely they agree."""
    lines = [f"{run.name}: {_described(run)}" for run in (pair.a, pair.b)]
    allowed = f"{pair.threshold:.1e} of gradients and updates, {pair.loss_threshold:.1e} of the loss"
    lines += [f"Allowed: {allowed}, because {pair.because}.", ""]
    if parted := pair.parted:
        lines += [f"The records part at {_where(parted)}.", *_different(parted)]
        lines += [f"Hint: {hint}" for hint in _hints(pair, parted)]
    else:
        lines.append("The records agree.")
    lines += ["", "Largest differences before that:" if parted else "Largest differences:"]
    return "\n".join([*lines, *(f"- {_line(stage, worst)}" for stage, worst in _largest(pair)), *notes(pair)])


def values(pair: Pair) -> dict[str, Any]:
    """The same as JSON values."""
    parted = pair.parted
    return {
        "a": pair.a.name,
        "b": pair.b.name,
        "threshold": pair.threshold,
        "loss_threshold": pair.loss_threshold,
        "because": pair.because,
        "parted": None
        if parted is None
        else {
            "step": parted.step,
            "stage": parted.name,
            "quantities": [_values(quantity) for quantity in parted.different],
            "hints": _hints(pair, parted),
        },
        "largest": [
            {"stage": stage.name, "step": stage.step, **_values(quantity)} for stage, quantity in _largest(pair)
        ],
        "notes": list(notes(pair)),
    }


def _hints(pair: Pair, parted: Stage) -> list[str]:
    """What is exact, where whole tensors were kept, and guesses."""
    if "tensors" not in pair.a.loaded or "tensors" not in pair.b.loaded:
        return list(hints(pair, parted))
    from parity.whole import exact  # which needs torch

    return [*exact(pair, parted), *hints(pair, parted)]


def _values(quantity: Quantity) -> dict[str, Any]:
    found: dict[str, Any] = {"what": quantity.what, "observed": _json(quantity.observed), "allowed": quantity.allowed}
    if quantity.norms:
        found["norms"] = [_json(norm) for norm in quantity.norms]
    return found | {name: value for name in ("scale", "rows", "said") if (value := getattr(quantity, name))}


def _json(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


def _described(run: Run) -> str:
    steps, ranks = len(run.steps), run.header["ranks"]
    dtypes = sorted({parameter["dtype"] for parameter in run.parameters.values()})
    computed = next((line["computed_in"] for line in run.steps if line["computed_in"]), None)
    return (
        f"{_count(steps, 'step')}, {_count(ranks, 'rank')}, {_count(len(run.parameters), 'parameter')} "
        f"in {', '.join(dtypes)}"
        f"{f', computed in {computed}' if computed else ''}{'' if run.complete else '; it did not come to its end'}"
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _where(stage: Stage) -> str:
    return stage.name if stage.step is None else f"step {stage.step}, {stage.name}"


def _different(stage: Stage) -> Iterator[str]:
    """The quantities that differ, the worst first."""
    different = stage.different
    if len(stage.quantities) > 1:
        yield f"{len(different)} of {len(stage.quantities)} differ, the worst first:"
    yield from (f"- {_told(quantity)}" for quantity in different[:LISTED])
    if len(different) > LISTED:
        yield f"- and {len(different) - LISTED} more"


def _told(quantity: Quantity) -> str:
    if quantity.said:
        return f"{quantity.what}: {quantity.said}"
    parts = [f"{quantity.what}: {quantity.observed:.2e} apart, allowed {quantity.allowed:.1e}"]
    if quantity.norms:
        parts.append("A {:.6g}, B {:.6g}".format(*quantity.norms))
    if quantity.scale is not None:
        parts.append(f"times {quantity.scale:.6g}")
    return "; ".join([*parts, *([quantity.rows] if quantity.rows else [])])


def _line(stage: Stage, quantity: Quantity) -> str:
    if not quantity.observed:
        return f"{_where(stage)}: equal"
    return f"{_where(stage)}: {quantity.observed:.1e} ({quantity.what}), allowed {quantity.allowed:.1e}"


def _largest(pair: Pair) -> list[tuple[Stage, Quantity]]:
    """Of every kind of stage that does not differ, the quantity that is nearest to its bound."""
    found: dict[str, tuple[Stage, Quantity]] = {}
    for stage in (stage for stage in pair.stages if not stage.different):
        worst, known = stage.worst, found.get(stage.name)
        if worst and (known is None or worst.observed * known[1].allowed > known[1].observed * worst.allowed):
            found[stage.name] = stage, worst
    return list(found.values())
