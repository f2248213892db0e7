"""Unobserved: what a cell has not shown, and whether anything is lost by that (claim 1).

A quantity that is left out cannot be wrong, so what is missing has to show in the state of the cell. Two things may be
missing without a loss: what a declaration says is judged by its effect at another stage (``Observable.effect_at``), and
replicas where no two ranks hold the same. The latter is believed of a backend that names the pieces of its ranks, all
of them apart; of several ranks that name none, nobody knows.
"""

from collections.abc import Iterator, Sequence, Set

from conformance.layout import Layout
from conformance.observable import Observable, unobserved_step
from conformance.record.tensors import Record
from conformance.record.verdict import Quantity


def unobserved(
    legs: Sequence[Record], quantities: Sequence[Quantity], observables: Sequence[Observable]
) -> tuple[list[str], list[str]]:
    """What was lost, by stage, and remarks on what is missing without a loss; of a cell in which nothing differs."""
    seen = {(q.stage, q.tensor) for q in quantities}
    stages = {q.stage for q in quantities}
    lost: dict[str, None] = {}
    apart: dict[str, None] = {}
    remarks: list[str] = []
    if any(leg.header["optimizer"] == "loaded" for leg in legs):
        remarks += _not_handed_over(observables, stages)
    for o in observables:
        if o.when == "handover":
            continue
        is_single = o.kind in ("scalar", "setting", "rows")  # one quantity per step, with the name of its key
        if not o.required and ((o.stage, o.key) not in seen if is_single else o.stage not in stages):
            if o.effect_at in stages:
                remarks.append(f"{o.key} is not reported, and judged by its effect at {o.effect_at}")
            else:
                lost[f"{o.stage} ({o.key})" if o.stage in stages else o.stage] = None
        if o.kind == "tensors" and o.replica_stage and o.replica_stage not in stages:
            if all(_are_apart(leg, o.key) for leg in legs):
                apart[o.replica_stage] = None
            else:
                lost[o.replica_stage] = None
    if apart:
        remarks.append(f"no two ranks hold the same: {', '.join(apart)}")
    return list(lost), remarks


def _not_handed_over(observables: Sequence[Observable], stages: Set[str]) -> Iterator[str]:
    """A remark for each model whose training state the backend does not show around a handover."""
    for stage, effect in {o.stage: o.effect_at for o in observables if o.when == "handover" and o.effect_at}.items():
        if stage not in stages:
            yield f"the {stage} as loaded is not shown, and judged by its effect at {effect}"


def _are_apart(leg: Record, key: str) -> bool:
    """Whether no two ranks of a leg can hold the same: there is one only, or each names pieces of its own."""
    return Layout.parse(leg.header["layout"]).world_size == 1 or all(offered > 0 for offered in _offered(leg, key))


def _offered(leg: Record, key: str) -> Iterator[int]:
    """How many pieces the ranks named at each step at which tensors were read."""
    unread = unobserved_step(leg.header["first_step"], len(leg.steps))
    read = (step for step in leg.steps if step.step != unread)
    return (step.line.get("replicas", {}).get(key, {}).get("offered", 0) for step in read)
