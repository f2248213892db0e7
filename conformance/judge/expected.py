"""Expected differences: a verdict is held against what the backend says must differ."""

import fnmatch
from dataclasses import replace
from typing import Any

from conformance.judge.tolerance import OF_ROWS
from conformance.record.verdict import Verdict


def apply_expectation(verdict: Verdict, known: dict[str, Any] | None) -> Verdict:
    """``known``: the fields of a conformance.backend.ExpectedDifference, if the backend has one for the cell.

    All findings of the first stage and step have to be of the tensors that are named, and where nothing follows from
    the defect, all findings.
    """
    if known is None or verdict.state not in ("conforms", "partly_observed", "differs"):
        return verdict
    start = next(((f.stage, f.step) for f in verdict.findings), None)
    judged = [f for f in verdict.findings if known["alone"] or (f.stage, f.step) == start]
    named = all(
        f.stage == known["stage"] and fnmatch.fnmatchcase(f.tensor.removesuffix(f" {OF_ROWS}"), known["tensors"])
        for f in judged
    )
    if verdict.first_stage == known["stage"] and named:
        return replace(verdict, state="expected_difference", reason=f"{known['reason']} ({known['link']})")
    return replace(
        verdict,
        state="differs",
        reason=f"expected to differ at {known['stage']} in {known['tensors']} ({known['reason']}), but: "
        f"{verdict.reason}; mend or remove the expectation {known['cells']!r}",
    )
