"""Expected differences: a verdict is held against what the backend says must differ."""

import fnmatch
from dataclasses import replace
from typing import Any

from conformance.record.results import Verdict


def apply_expectation(verdict: Verdict, known: dict[str, Any] | None) -> Verdict:
    """``known``: the fields of a conformance.backend.ExpectedDifference, if the backend has one for the cell.

    All findings of the first stage and step have to be of the tensors that are named.
    """
    if known is None or verdict.state not in ("conforms", "differs"):
        return verdict
    start = next(((f.stage, f.step) for f in verdict.findings), None)
    first = [f.tensor for f in verdict.findings if (f.stage, f.step) == start]
    named = all(fnmatch.fnmatchcase(tensor, known["tensors"]) for tensor in first)
    if verdict.first_stage == known["stage"] and named:
        return replace(verdict, state="expected_difference", reason=f"{known['reason']} ({known['link']})")
    return replace(
        verdict,
        state="differs",
        reason=f"expected to differ at {known['stage']} in {known['tensors']} ({known['reason']}), but: "
        f"{verdict.reason}; mend or remove the expectation {known['cells']!r}",
    )
