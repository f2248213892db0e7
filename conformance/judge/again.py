"""Judging the records of an earlier run again: needs no GPU, no backend and no ranks."""

from dataclasses import replace
from pathlib import Path

from conformance.judge.expected import judge_cell
from conformance.judge.twice import in_both
from conformance.record.format import RecordError, read_lines
from conformance.record.results import Attempt, Entry, cell_summary, inside, read_run, write_entry, write_summary
from conformance.record.states import ANSWERED, NO_FAULT
from conformance.record.verdict import Verdict
from conformance.validation import UsageError

GONE = Verdict(state="infrastructure", reason="the cell was judged, but its record is gone; run it again")


def rejudge(out: Path) -> int:
    """Judge every record below ``out`` again and write verdicts and summary anew.

    Cells of whose records only the lines were kept keep their verdicts; their number is returned. A record that is
    damaged, or not where it belongs, makes its own cell an infrastructure failure; the others are judged. Raises
    UsageError for a folder that is not a run's output, and Unwritable.
    """
    run, old = read_run(out)
    entries = [_judged(out, entry) for entry in old]
    for entry in entries:
        write_entry(out, entry)
    write_summary(out, run, [cell_summary(entry) for entry in entries])
    return sum(new is entry for new, entry in zip(entries, old, strict=True))


def _judged(out: Path, entry: Entry) -> Entry:
    if entry.slim and entry.verdict.state in NO_FAULT and not _has_all_tensors(out, entry):
        return entry
    own = Attempt(fresh=False, verdict=entry.verdict, completed=entry.completed, records=entry.records)
    verdict = _judge(out, entry, own)
    if entry.other is None or verdict is GONE:
        return replace(entry, verdict=verdict)
    other = replace(entry.other, verdict=_judge(out, entry, entry.other))
    used, fresh = (verdict, other.verdict) if other.fresh else (other.verdict, verdict)
    return replace(entry, verdict=in_both(used, fresh), other=other)


def _has_all_tensors(out: Path, entry: Entry) -> bool:
    """Whether all tensors that the cell's records name are there, whatever its verdict says of them. Where only some
    are, removing them was stopped half-way."""
    others = entry.other.records if entry.other and entry.other.completed else ()
    records = [out / entry.folder / record for record in (*entry.records, *others)]
    try:
        found = [(record, read_lines(record)) for record in records]
    except RecordError:  # the reports say so
        return False
    named = [(record, line.get("tensors")) for record, lines in found for line in (lines.loaded, *lines.steps)]
    return all((record / file["file"]).exists() for record, file in named if file)


def _judge(out: Path, entry: Entry, attempt: Attempt) -> Verdict:
    if not (attempt.completed and attempt.records and entry.oracle):
        return GONE if attempt.verdict.state in ANSWERED else attempt.verdict
    folder = out / entry.folder
    try:
        legs = [inside(out, folder / record) for record in attempt.records]
        oracle = inside(out, folder / entry.oracle)
        defective = inside(out, folder / entry.defective) if entry.defective else None
    except UsageError as error:  # a link that leads out of the folder
        return Verdict(state="infrastructure", reason=str(error))
    return judge_cell(
        entry.cell, legs, oracle=oracle, known=entry.expected, defective=defective, observables=entry.observables
    )
