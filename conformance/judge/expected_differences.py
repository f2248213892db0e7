"""Compares a cell that has a known defect with an oracle that has the same defect (docs/principles.md).

The cell has to differ from the correct oracle, and to agree with the defective one in all stages by the usual bounds.
If the oracle cannot have the defect, only the quantities that the expectation names may differ. A cell with a planted
fault, which has no known defects, has to differ.
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
    phases: Sequence[Path],
    *,
    oracle: Path,
    known: Sequence[Known],
    defective: Path | None,
    observables: Sequence[Observable],
) -> Verdict:
    """Judges the records of a cell's phases by the oracle in ``oracle``. If differences are ``known``, also judges them
    by the oracle in ``defective``, which has all these defects (None where the oracle cannot have them).

    If all is as expected, the verdict has the quantities against the correct oracle, else those against the defective
    one: these begin where something unexpected is wrong. A cell with a planted fault that agrees with the oracle proves
    nothing, and does not pass.
    """
    verdict = judge_folders(cell, phases, oracle)
    if verdict.state in NO_FAULT and (planted := planted_in(cell)):
        reason = (
            f"{' and '.join(planted)} was planted and called, and nothing differs: it changes nothing in this cell, or "
            f"it is not detected; plant it in a cell that has what it needs (docs/reference/faults.md)"
        )
        return replace(verdict, state="infrastructure", reason=reason)
    if not known or verdict.state == "infrastructure":
        return verdict
    known_reasons = "; ".join(f"{one.reason} ({one.link})" for one in known)
    if verdict.state != "differs":
        reason = f"expected to differ ({known_reasons}), but: {verdict.reason}; remove the expectation"
        return replace(verdict, state="differs", reason=reason)
    defects = defects_of(known)
    behind = judge_folders(cell, phases, defective, defects=defects) if defective else verdict
    if behind.state == "infrastructure":
        return replace(behind, reason=f"of the oracle with the expected defects: {behind.reason}")
    allowed = [one.unmodelled for one in known if one.unmodelled]
    unexplained = [f for f in behind.findings if not any(_explains(u, f, behind, observables) for u in allowed)]
    if unexplained:
        first, more = unexplained[0], len(unexplained) - 1
        unlike = f"but not like this: {first}, and {more} more"
        reason = f"expected to differ ({known_reasons}), {unlike}; correct the expectation"
        return replace(behind, state="differs", reason=reason)
    for one in allowed:
        if not any(_is_named(one, finding) for finding in behind.findings):
            where = f"at {one.stage} in {', '.join(one.tensors)}"
            reason = f"expected to differ {where} ({known_reasons}), and does not; correct or remove the expectation"
            return replace(behind, state="differs", reason=reason)
    agrees = f"with that, {behind.reason}" if defects and not behind.findings else "nothing else differs"
    return replace(verdict, state="expected_difference", reason=f"{known_reasons}; {agrees}")


def planted_in(cell: str) -> list[str]:
    """Returns the names of the faults that are planted in a cell, from its id."""
    return [part.removeprefix("fault-") for part in cell.split("/")[5:] if part.startswith("fault-")]


def _explains(allowed: Unmodelled, finding: Quantity, verdict: Verdict, observables: Sequence[Observable]) -> bool:
    """Whether the defect names the finding, or the finding follows from the first one that the defect names."""
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
    """Whether the quantity was computed and compared with the oracle, not with the cell's own record."""
    of_stage = [o for o in observables if o.stage == finding.stage]
    if any(o.kind == "setting" and o.key == finding.tensor for o in of_stage):
        return False
    name = finding.tensor.removesuffix(f" {OF_ROWS}")
    computed = any(o.key == name for o in of_stage if o.kind in ("scalar", "rows"))
    # Quantities that are rebuilt, missing, of another shape or compared between ranks have more than a name.
    return computed or (" " not in name and any(o.kind == "tensors" and o.when != "loaded" for o in of_stage))
