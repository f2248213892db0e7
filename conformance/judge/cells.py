"""Judges the cells of a run: in processes beside the run, again from its records, and twice where a cell ran twice.

While cells train, they are judged in processes of their own, because threads of one Python process judge one after
another. A cell runs in workers that have run other cells, and again in fresh workers where that may be the cause of a
difference. A cell that is wrong only in reused workers is wrong: whoever trains twice in one process meets the same
defect. Judging needs no GPU and no backend.
"""

import base64
import contextlib
import pickle
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from conformance.core.errors import UsageError
from conformance.judge.expected_differences import explained, judge_cell, planted_in
from conformance.records.record_format import RecordError, read_lines
from conformance.results.run_results import Attempt, Entry, cell_summary, inside, read_run, write_entry, write_summary
from conformance.results.verdict import ANSWERED, NO_FAULT, STATES, Verdict
from conformance.runtime import Pool, RankContext, WorkerGroupConfig
from conformance.runtime.leased_slots import Lanes
from conformance.spec.conventions import KNOWN, OracleConvention, of_oracle
from conformance.spec.known_defects import Bug, Defect, MeanOfMeans


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Computes with one thread inside of the block, in this thread and in those that it starts.

    Judges read many small tensors. OpenMP's other threads, which MKL uses too, would spin between two of them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


Defects = tuple[Defect, ...]
_CONFIG = WorkerGroupConfig(size=1, device="cpu", preload=(__name__,))


class Judges:
    """Runs ``judge_cell`` in worker groups of one rank. Threads share it.

    lanes: the number of cells that are judged at once. work_dir: for logs of forkservers. logs: a folder for the logs
    of single cells, which are removed. budget_s: see conformance.runtime.Pool.
    """

    def __init__(self, *, lanes: int, work_dir: Path, logs: Path, budget_s: float) -> None:
        self._pool = Pool(work_dir=work_dir, slots=Lanes(lanes, work_dir=work_dir, name="judge"))
        self._pool.prepare(_CONFIG)
        self._logs, self._budget_s = logs, budget_s
        self.abort, self.close = self._pool.abort, self._pool.close

    def judge(
        self, cell: str, records: Sequence[Path], *, slug: str, oracles: Mapping[Defects, Path], **rest: Any
    ) -> Verdict | None:
        """Returns the verdict of ``judge_cell`` with these oracles; None if it wants another one, or cannot be asked,
        and the caller has to judge. slug: the name of the cell's logs. rest: see ``judge_cell``."""
        call = {"cell": cell, "phases": list(records), "oracles": dict(oracles), **rest}
        logs = self._logs / slug
        outcome = self._pool.run(
            key="judge",
            config=_CONFIG,
            task=f"{__name__}:judge",
            kwargs={"call": _packed(call)},
            log_dir=logs,
            budget_s=self._budget_s,
            about=cell,
        )
        shutil.rmtree(logs, ignore_errors=True)
        verdict = _unpacked(outcome.results[0]) if outcome.state == "done" else None
        return verdict if isinstance(verdict, Verdict) else None


class _OtherOracle(Exception):
    """Says that a verdict needs an oracle that was not given."""


def judge(rank: RankContext, *, call: str) -> str:
    """Calls ``judge_cell`` in a rank, for Judges, which runs no code of a backend."""
    arguments = _unpacked(call)
    oracles: dict[Defects, Path] = arguments.pop("oracles")

    def given(defects: Defects) -> Path:
        if defects not in oracles:
            raise _OtherOracle
        return oracles[defects]

    cell, phases = arguments.pop("cell"), arguments.pop("phases")
    verdict = None
    with contextlib.suppress(_OtherOracle):
        verdict = judge_cell(cell, phases, oracles=given, **arguments)
    return _packed(verdict)


def _packed(value: object) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _unpacked(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))


def combine_verdicts(reused: Verdict, fresh: Verdict) -> Verdict:
    """Combines the verdicts of a cell in ``reused`` workers, which had run other cells, and in ``fresh`` ones."""
    both = ((reused, "after other cells"), (fresh, "in fresh workers"))
    wrong = [one for state in ("differs", "infrastructure") for one in both if one[0].state == state]
    if not wrong:
        return reused
    (worst, when), (other, otherwise) = wrong[0], both[1 if wrong[0] is both[0] else 0]
    head, _, rest = worst.reason.partition("\n")
    other_head = other.reason.partition("\n")[0]
    if worst.state == other.state and (worst.first_stage or head) == (other.first_stage or other_head):
        summary = f"{head}; {otherwise}, too"
    elif other.state in NO_FAULT:
        verb = "differs" if worst.state == "differs" else "fails"
        summary = f"{verb} only {when}: {head}; {otherwise} {STATES[other.state].name}: {other_head}"
    else:
        summary = f"{head}; {otherwise}: {other_head}"
    reason = "\n".join(filter(None, (summary, rest)))
    detailed = worst if worst.quantities else other
    return replace(detailed, state=worst.state, reason=reason)


def combine(reused: Attempt, fresh: Attempt, *, leased: bool) -> tuple[Attempt, Attempt, Verdict]:
    """Returns the attempt whose records are the cell's own, the other attempt, and the verdict of both.

    ``leased``: drivers and links on leased hosts fail at times, so an attempt that failed there does not count.
    """
    if leased and not reused.completed:
        return fresh, reused, fresh.verdict
    own, other = (fresh, reused) if fresh.completed and not reused.completed else (reused, fresh)
    return own, other, combine_verdicts(reused.verdict, fresh.verdict)


GONE = Verdict(state="infrastructure", reason="the cell was judged, but its record is gone; run it again")


@one_thread()
def rejudge(out: Path) -> int:
    """Judges every record below ``out`` again and writes verdicts and summary anew.

    Cells of which only the lines were kept keep their verdicts; returns their number. A record that is damaged or in
    the wrong place makes its own cell an infrastructure failure; the other cells are judged. Raises UsageError for a
    folder that is not a run's output, and Unwritable.
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
    """Whether all tensors that the cell's records name exist, whatever its verdict claims. If only some exist, their
    removal was interrupted."""
    other_records = entry.other.records if entry.other and entry.other.completed else ()
    records = [out / entry.folder / record for record in (*entry.records, *other_records)]
    try:
        found = [(record, read_lines(record)) for record in records]
    except RecordError:  # reports show this error
        return False
    named = [(record, line.get("tensors")) for record, lines in found for line in (lines.loaded, *lines.steps)]
    return all((record / file["file"]).exists() for record, file in named if file)


def _candidates(entry: Entry) -> dict[str, Any]:
    """Returns the undeclared conventions, means and bugs that the run tried as explanations of a difference."""
    if entry.expected or planted_in(entry.cell):
        return {"candidates": (), "means": (), "bugs": ()}
    declared = of_oracle(entry.conventions)
    tried = [one.defects[-1] for one in entry.variants if one.defects[:-1] == declared]
    conventions = (one for one in tried if isinstance(one, get_args(OracleConvention)))
    own = tuple(one for one in KNOWN if one.unjudged)
    of = {
        name: [one for one in tried if isinstance(one, kind)] for name, kind in (("means", MeanOfMeans), ("bugs", Bug))
    }
    return {"candidates": (*conventions, *own), **of}


def _judge(out: Path, entry: Entry, attempt: Attempt) -> Verdict:
    if not (attempt.completed and attempt.records and entry.oracle):
        return GONE if attempt.verdict.state in ANSWERED else attempt.verdict
    folder = out / entry.folder
    try:
        phases = [inside(out, folder / record) for record in attempt.records]
        oracles: dict[tuple[Defect, ...], Path] = {(): inside(out, folder / entry.oracle)}
        oracles |= {one.defects: inside(out, folder / one.folder) for one in entry.variants}
    except UsageError as error:  # a link that leads out of the folder
        return Verdict(state="infrastructure", reason=str(error))
    options: Any = {
        "conventions": entry.conventions,
        "oracles": oracles.get,
        "observables": entry.observables,
    }
    verdict = judge_cell(entry.cell, phases, known=entry.expected, **options)
    return explained(verdict, entry.cell, phases, **_candidates(entry), **options)
