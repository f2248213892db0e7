"""Results: verdicts and the summary of a run on disk, and judging the records of an earlier run again.

Judging again needs no GPU, no backend and no ranks. docs/architecture.md has the schema of ``summary.json``.
"""

import fnmatch
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import conformance
from conformance.judge import STATES, Finding, Verdict, judge_folder

SUMMARY, VERDICT = "summary.json", "verdict.json"
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One cell of a run. ``details`` are its fields in verdict.json besides the verdict's own."""

    details: dict[str, Any]
    verdict: Verdict


def overall(verdicts: Sequence[Verdict]) -> Literal["conforms", "differs", "incomplete"]:
    """One word for all cells; what could not be judged makes it incomplete, never a pass."""
    states = {verdict.state for verdict in verdicts}
    if "differs" in states:
        return "differs"
    judged = states & {"conforms", "expected_difference"}
    return "incomplete" if states & {"infrastructure", "not_run"} or not judged else "conforms"


def apply_expectation(verdict: Verdict, known: dict[str, str] | None) -> Verdict:
    """Hold a verdict against what the backend says must differ, if it says so: the fields of an ExpectedDifference.

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


def write_entry(out: Path, entry: Entry) -> None:
    """Write the ``verdict.json`` of one cell."""
    folder = out / entry.details["folder"]
    folder.mkdir(parents=True, exist_ok=True)
    replace_json(folder / VERDICT, {"schema": SCHEMA, **entry.details, **asdict(entry.verdict)})


def write_summary(out: Path, run: dict[str, Any], entries: Sequence[Entry]) -> None:
    """Write ``summary.json``; ``run`` are the fields that belong to the run as a whole."""
    cells = [
        {
            "id": entry.details["cell"],
            "state": entry.verdict.state,
            "reason": entry.verdict.reason,
            "world_size": entry.details["world_size"],
            "seconds": round(entry.details["seconds"], 3),
            "ratios": {stage: worst["ratio"] for stage, worst in entry.verdict.stages.items()},
            "folder": entry.details["folder"],
        }
        for entry in entries
    ]
    verdicts = [entry.verdict for entry in entries]
    counts = dict.fromkeys(STATES, 0) | Counter(verdict.state for verdict in verdicts)
    head = {"schema": SCHEMA, "suite_version": conformance.__version__, "verdict": overall(verdicts), "counts": counts}
    replace_json(out / SUMMARY, {**run, **head, "cells": cells})


def rejudge(out: Path) -> None:
    """Judge every record below ``out`` again and write verdicts and summary anew.

    Raises ValueError for a folder that is not a run's output.
    """
    run, old = read_results(out)
    entries = []
    for entry in old:
        details = entry.details
        if details["record"] and details["completed"]:
            folder = out / details["folder"]
            verdict = judge_folder(folder / details["record"], (folder / details["oracle"]).parent)
            entry = Entry(details=details, verdict=apply_expectation(verdict, details["expected"]))
        elif entry.verdict.state in ("conforms", "differs", "expected_difference"):
            verdict = Verdict(
                state="infrastructure", reason="the cell was judged, but its record is gone; run it again"
            )
            entry = Entry(details=details, verdict=verdict)
        entries.append(entry)
    for entry in entries:
        write_entry(out, entry)
    write_summary(out, run, entries)


def read_results(out: Path) -> tuple[dict[str, Any], list[Entry]]:
    """The fields of the run as a whole, and its cells with the verdicts that are on disk now.

    Raises ValueError for a folder that is not a run's output.
    """
    run = _read(out / SUMMARY)
    entries = []
    for cell in run.pop("cells"):
        details = _read(out / cell["folder"] / VERDICT)
        del details["schema"]
        try:
            findings = [Finding(**finding) for finding in details.pop("findings")]
            fields = {name: details.pop(name) for name in Verdict.__dataclass_fields__ if name != "findings"}
        except KeyError as error:
            raise ValueError(f"{out / cell['folder'] / VERDICT} lacks {error}; it was changed") from None
        verdict = Verdict(**fields, findings=findings)
        entries.append(Entry(details=details, verdict=verdict))
    return run, entries


def _read(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no {file}; give the --out folder of a parity run") from None
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}); it was changed, run the cells again") from None
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        raise ValueError(f"{file} does not have schema {SCHEMA}; use the version of the suite that wrote it")
    return values


def dumps(values: dict[str, Any], *, indent: int | None = None) -> str:
    """JSON text. Infinity, which JSON cannot say, becomes 1e999: valid, and infinite again for whoever reads it."""
    text = json.dumps(values, indent=indent)
    return re.sub(r'("(?:[^"\\]|\\.)*")|\bInfinity\b', lambda match: match[1] or "1e999", text)


def replace_json(file: Path, values: dict[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(dumps(values, indent=1), encoding="utf-8")
    unfinished.rename(file)
