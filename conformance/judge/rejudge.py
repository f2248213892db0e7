"""Twice: what is said of a cell that was run in ranks that had run others, and once more in fresh ones (claim 9).

What an earlier cell has left in a process may be what differs. A cell that is wrong only then is wrong all the same:
whoever trains twice in one process meets it.

Judging the records of an earlier run again: needs no GPU, no backend and no ranks.
"""

from dataclasses import replace
from pathlib import Path

from conformance.core.errors import UsageError
from conformance.judge.expected_differences import judge_cell
from conformance.records.record_format import RecordError, read_lines
from conformance.results.run_results import Attempt, Entry, cell_summary, inside, read_run, write_entry, write_summary
from conformance.results.verdict import ANSWERED, NO_FAULT, STATES, Verdict


def in_both(used: Verdict, fresh: Verdict) -> Verdict:
    """One verdict that tells both; ``used``: of the ranks that had run other cells."""
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


def told_of(used: Attempt, fresh: Attempt) -> tuple[Attempt, Attempt]:
    """The attempt whose records a verdict of both rests on, and the other one."""
    return (fresh, used) if fresh.completed and not used.completed else (used, fresh)


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
