"""Judging the records of an earlier run again: needs no GPU, no backend and no ranks."""

from dataclasses import replace
from pathlib import Path

from conformance.judge.expected import apply_expectation
from conformance.judge.twice import in_both
from conformance.judge.verdict import judge_folders
from conformance.record.results import Attempt, Entry, Verdict, inside, read_run, write_entry, write_summary
from conformance.record.states import ANSWERED


def rejudge(out: Path) -> None:
    """Judge every record below ``out`` again and write verdicts and summary anew.

    Raises UsageError for a folder that is not a run's output.
    """
    run, old = read_run(out)
    entries = []
    for entry in old:
        if entry.completed and entry.records:
            entry = _judged(out, entry)
        elif entry.verdict.state in ANSWERED:
            reason = "the cell was judged, but its record is gone; run it again"
            entry = replace(entry, verdict=Verdict(state="infrastructure", reason=reason))
        entries.append(entry)
    for entry in entries:
        write_entry(out, entry)
    write_summary(out, run, entries)


def _judged(out: Path, entry: Entry) -> Entry:
    verdict = _judge(out, entry, entry.records)
    if entry.other is None:
        return replace(entry, verdict=verdict)
    other: Attempt = entry.other
    if other.completed and other.records:
        other = replace(other, verdict=_judge(out, entry, other.records))
    used, fresh = (verdict, other.verdict) if other.fresh else (other.verdict, verdict)
    return replace(entry, verdict=in_both(used, fresh), other=other)


def _judge(out: Path, entry: Entry, records: tuple[str, ...]) -> Verdict:
    folder = out / entry.folder
    legs = [inside(out, folder / record) for record in records]
    return apply_expectation(judge_folders(legs, inside(out, folder / str(entry.oracle))), entry.expected)
