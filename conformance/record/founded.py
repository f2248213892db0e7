"""Founded: whether a verdict that passes rests on all that its oracle's record demands; without torch.

Where tensors were not kept nobody can judge again, so the quantities are held against the observables that the record
declares: each that is required, at each step at which it applies; of tensors the same names at every step; and for a
verdict that all stages conform, also what is not required, or else its effect (claim 9).
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from conformance.observable import Observable, unobserved_step
from conformance.record.format import Line, Lines
from conformance.record.results import Entry
from conformance.record.verdict import Quantity

AGAIN = "Run it again."


def why_unfounded(entry: Entry, legs: Sequence[Lines], oracle: Lines | None) -> str:
    """Why a verdict that passes cannot be trusted, in words; empty if it can."""
    if not entry.records:
        return f"there is no record of the cell. {AGAIN}"
    if not entry.completed:
        return f"the cell did not come to its end. {AGAIN}"
    if not entry.verdict.quantities:
        return "nothing was compared. Judge it again."
    if oracle is None:
        return ""
    quantities = entry.verdict.quantities
    told = [*_not_judged(quantities, legs, oracle)]
    if entry.verdict.state == "conforms":
        told += _not_shown(quantities, oracle.observables)
    return f"{told[0]}. {AGAIN}" if told else ""


def _not_judged(quantities: Sequence[Quantity], legs: Sequence[Lines], oracle: Lines) -> Iterator[str]:
    judged = {(q.stage, q.tensor, q.step) for q in quantities}
    unread = {unobserved_step(leg.header["first_step"], len(leg.steps)) for leg in legs}
    names: dict[tuple[str, int], set[str]] = {}
    for q in quantities:
        names.setdefault((q.stage, q.step), set())
        if " " not in q.tensor:  # else more is said of a tensor than its name
            names[q.stage, q.step].add(q.tensor)
    for o in oracle.observables:
        if not o.required or o.kind == "evidence":
            continue
        steps = [
            line["step"] for line in (oracle.loaded, *oracle.steps) if o.applies(line["step"]) and not _lost(o, line)
        ]
        for step in steps:
            is_read = o.kind != "tensors" or step not in unread
            there = (o.stage, step) in names if o.kind == "tensors" else (o.stage, o.judged_as, step) in judged
            if is_read and not there:
                yield f"{o.stage} ({o.key}) of step {step} was not judged, and its record demands it"
        if o.kind == "tensors":
            shown = [step for step in steps if step not in unread and (o.stage, step) in names]
            for before, after in pairwise(shown):
                if apart := names[o.stage, before] ^ names[o.stage, after]:
                    told = f"{o.stage} of steps {before} and {after} were not judged for the same tensors"
                    yield f"{told}, such as {min(apart)}"


def _not_shown(quantities: Sequence[Quantity], observables: Sequence[Observable]) -> Iterator[str]:
    """What need not be shown, and was judged neither itself nor by its effect; then a cell conforms in part only."""
    judged, stages = {(q.stage, q.tensor) for q in quantities}, {q.stage for q in quantities}
    for o in observables:
        if o.required or o.kind == "evidence" or o.when == "handover" or o.effect_at in stages:
            continue
        if (o.stage not in stages) if o.kind == "tensors" else ((o.stage, o.judged_as) not in judged):
            yield f"{o.stage} ({o.key}) was not judged, and the cell is said to conform in all"


def _lost(observable: Observable, line: Line) -> bool:
    """Whether it is no number at this step, because the update is skipped."""
    return bool(observable.lost_if and line.get("values", {}).get(observable.lost_if))
