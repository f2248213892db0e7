"""Expected differences: a cell with a known defect is held against the oracle that has the defect, too (claim 8).

It has to differ from the oracle as it should be, and to agree with the one that has the defect, in all stages and by
the usual bounds. Of a defect that the oracle cannot have, only what its expectation names may differ. A cell with a
planted fault, which has no known defects, has to differ.
"""

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from conformance.judge.tolerance import OF_ROWS
from conformance.judge.verdict import judge_folders
from conformance.results.verdict import NO_FAULT, Quantity, Verdict
from conformance.spec.known_defects import Known, Unmodelled, defects_of
from conformance.spec.observables import Observable, stages


def judge_cell(
    cell: str,
    legs: Sequence[Path],
    *,
    oracle: Path,
    known: Sequence[Known],
    defective: Path | None,
    observables: Sequence[Observable],
) -> Verdict:
    """Judge the records of a cell's legs by the oracle in ``oracle``, and where differences are ``known``, by the one
    in ``defective``, which has all defects of these (None where they have none).

    The quantities of a verdict are those against the oracle as it should be if all is as expected, else those against
    the one with the defects: they begin where something else is wrong. A cell with a planted fault that agrees with the
    oracle has shown nothing, and does not pass.
    """
    verdict = judge_folders(cell, legs, oracle)
    if verdict.state in NO_FAULT and (planted := planted_in(cell)):
        reason = (
            f"{' and '.join(planted)} was planted and called, and nothing differs: it changes nothing in this cell, or "
            f"it is not seen; plant it in a cell that has what it needs (docs/reference/faults.md)"
        )
        return replace(verdict, state="infrastructure", reason=reason)
    if not known or verdict.state == "infrastructure":
        return verdict
    told = "; ".join(f"{one.reason} ({one.link})" for one in known)
    if verdict.state != "differs":
        reason = f"expected to differ ({told}), but: {verdict.reason}; remove the expectation"
        return replace(verdict, state="differs", reason=reason)
    defects = defects_of(known)
    behind = judge_folders(cell, legs, defective, defects=defects) if defective else verdict
    if behind.state == "infrastructure":
        return replace(behind, reason=f"of the oracle with the expected defects: {behind.reason}")
    allowed = [one.unmodelled for one in known if one.unmodelled]
    unexplained = [f for f in behind.findings if not any(_explains(u, f, behind, observables) for u in allowed)]
    if unexplained:
        first, others = unexplained[0], len(unexplained) - 1
        reason = f"expected to differ ({told}), but not like this: {first}, and {others} more; mend the expectation"
        return replace(behind, state="differs", reason=reason)
    for one in allowed:
        if not any(_is_named(one, finding) for finding in behind.findings):
            where = f"at {one.stage} in {', '.join(one.tensors)}"
            reason = f"expected to differ {where} ({told}), and does not; mend or remove the expectation"
            return replace(behind, state="differs", reason=reason)
    agrees = f"with that, {behind.reason}" if defects and not behind.findings else "nothing else differs"
    return replace(verdict, state="expected_difference", reason=f"{told}; {agrees}")


def planted_in(cell: str) -> list[str]:
    """The names of the faults that are planted in a cell, from its id."""
    return [part.removeprefix("fault-") for part in cell.split("/")[5:] if part.startswith("fault-")]


def _explains(allowed: Unmodelled, finding: Quantity, verdict: Verdict, observables: Sequence[Observable]) -> bool:
    """Whether the finding is one that the defect names, or follows from the first of these."""
    if _is_named(allowed, finding):
        return True
    named = [f.step for f in verdict.findings if _is_named(allowed, f)]
    if not allowed.onward or not named or not _is_against_the_oracle(finding, observables):
        return False
    order = stages(observables)
    if allowed.stage not in order:
        return False
    return (finding.step, order.index(finding.stage)) > (min(named), order.index(allowed.stage))


def _is_named(allowed: Unmodelled, finding: Quantity) -> bool:
    tensor = finding.tensor.removesuffix(f" {OF_ROWS}")
    is_of_any_model = finding.stage == allowed.stage or finding.stage.endswith(f" {allowed.stage}")
    return is_of_any_model and any(fnmatchcase(tensor, pattern) for pattern in allowed.tensors)


def _is_against_the_oracle(finding: Quantity, observables: Sequence[Observable]) -> bool:
    """Whether a number that was computed was held against the oracle's, and not against the cell's own record."""
    of_stage = [o for o in observables if o.stage == finding.stage]
    if any(o.kind == "setting" and o.key == finding.tensor for o in of_stage):
        return False
    name = finding.tensor.removesuffix(f" {OF_ROWS}")
    computed = any(o.key == name for o in of_stage if o.kind in ("scalar", "rows"))
    # What is rebuilt, missing, of another shape or compared between ranks has more than a name.
    return computed or (" " not in name and any(o.kind == "tensors" and o.when != "loaded" for o in of_stage))
