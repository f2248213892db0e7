"""Judging the records of an earlier run again: needs no GPU, no backend and no ranks."""

from dataclasses import replace
from pathlib import Path

from conformance.judge.expected import apply_expectation
from conformance.judge.verdict import judge_folders
from conformance.record.results import Verdict, inside, read_run, write_entry, write_summary


def rejudge(out: Path) -> None:
    """Judge every record below ``out`` again and write verdicts and summary anew.

    Raises UsageError for a folder that is not a run's output.
    """
    run, old = read_run(out)
    entries = []
    for entry in old:
        if entry.completed and entry.records:
            folder = out / entry.folder
            legs = [inside(out, folder / record) for record in entry.records]
            verdict = judge_folders(legs, inside(out, folder / str(entry.oracle)))
            entry = replace(entry, verdict=apply_expectation(verdict, entry.expected))
        elif entry.verdict.state in ("conforms", "differs", "expected_difference"):
            reason = "the cell was judged, but its record is gone; run it again"
            entry = replace(entry, verdict=Verdict(state="infrastructure", reason=reason))
        entries.append(entry)
    for entry in entries:
        write_entry(out, entry)
    write_summary(out, run, entries)
