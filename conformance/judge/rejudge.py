"""Judges the records of an earlier run again, and combines the verdicts of a cell that ran twice.

A cell runs in workers that have run other cells, and again in fresh workers where that may be the cause of a
difference. A cell that is wrong only in reused workers is wrong: whoever trains twice in one process meets the same
defect. Judging needs no GPU, no backend and no workers.
"""

from dataclasses import replace
from pathlib import Path

from conformance.core.errors import UsageError
from conformance.judge.expected_differences import judge_cell
from conformance.records.record_format import RecordError, read_lines
from conformance.results.run_results import Attempt, Entry, cell_summary, inside, read_run, write_entry, write_summary
from conformance.results.verdict import ANSWERED, NO_FAULT, STATES, Verdict


def in_both(used: Verdict, fresh: Verdict) -> Verdict:
    """One verdict that states both. ``used``: of the workers that had run other cells; ``fresh``: of fresh workers."""
    both = ((used, "after other cells"), (fresh, "in fresh ranks"))
    wrong = [one for state in ("differs", "infrastructure") for one in both if one[0].state == state]
    if not wrong:
        return used
    (worst, when), (other, otherwise) = wrong[0], both[1 if wrong[0] is both[0] else 0]
    head, _, rest = worst.reason.partition("\n")
    their_head = other.reason.partition("\n")[0]
    if worst.state == other.state and (worst.first_stage or head) == (other.first_stage or their_head):
        said = f"{head}; {otherwise}, too"
    elif other.state in NO_FAULT:
        verb = "differs" if worst.state == "differs" else "fails"
        said = f"{verb} only {when}: {head}; {otherwise} {STATES[other.state].name}: {their_head}"
    else:
        said = f"{head}; {otherwise}: {their_head}"
    reason = "\n".join(filter(None, (said, rest)))
    told = worst if worst.quantities else other
    return replace(told, state=worst.state, reason=reason)


def combine(used: Attempt, fresh: Attempt, *, leased: bool) -> tuple[Attempt, Attempt, Verdict]:
    """The attempt whose records are the cell's own, the other attempt, and the verdict of both.

    ``leased``: on leased slots drivers and links fail at times, so an attempt that failed there says nothing.
    """
    if leased and not used.completed:
        return fresh, used, fresh.verdict
    own, other = (fresh, used) if fresh.completed and not used.completed else (used, fresh)
    return own, other, in_both(used.verdict, fresh.verdict)


GONE = Verdict(state="infrastructure", reason="the cell was judged, but its record is gone; run it again")


def rejudge(out: Path) -> int:
    """Judge every record below ``out`` again and write verdicts and summary anew.

    Cells of whose records only the lines were kept keep their verdicts; their number is returned. A record that is
    damaged, or not where it belongs, makes its own cell an infrastructure failure; the others are judged. Raises
    UsageError for a folder that is not a run's output, and Unwritable.
    """
    run, old = read_run(out)
    entries = [_judged(out, entry, leased=bool(run.leased)) for entry in old]
    for entry in entries:
        write_entry(out, entry)
    write_summary(out, run, [cell_summary(entry) for entry in entries])
    return sum(new is entry for new, entry in zip(entries, old, strict=True))


def _judged(out: Path, entry: Entry, *, leased: bool) -> Entry:
    if entry.slim and entry.verdict.state in NO_FAULT and not _has_all_tensors(out, entry):
        return entry
    is_fresh = entry.other is not None and not entry.other.fresh
    own = Attempt(fresh=is_fresh, verdict=entry.verdict, completed=entry.completed, records=entry.records)
    own = replace(own, verdict=_judge(out, entry, own))
    if entry.other is None or own.verdict is GONE:
        return replace(entry, verdict=own.verdict)
    other = replace(entry.other, verdict=_judge(out, entry, entry.other))
    *_, verdict = combine(*((other, own) if is_fresh else (own, other)), leased=leased)
    return replace(entry, verdict=verdict, other=other)


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
