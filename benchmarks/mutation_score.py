"""Plants every fault of the catalogue on every backend with its patch point, in every tier, and counts the catches.

python benchmarks/mutation_score.py [OUT] [--jobs N] [--minutes M] [--faults NAME ...] [--backends NAME ...]
                                    [--tiers TIER ...]
                                    [--seeds SEED ... [--cells N] [--ranks N] [--profiles NAME ...]]

A fault is planted in its own cells (Fault.cells), with all steps and rows of the scenario. For the tier ``quick``, it
is planted in the cells of the quick profile until one of them catches it. Each cell also runs without a fault, and
catches nothing if it does not conform then. ``--seeds`` adds cells without a fault, N for each seed, of the profiles
and in turn of each tier; ``--faults`` without a name plants none.

Jobs are processes of one thread, each with its own session. Each takes one cell after another, with all faults of the
cell, or all cells that share an oracle.
OUT/mutation-score.md and .json are written at the end; cells with another result than predicted are kept in
OUT/workers. The same command with the same OUT runs only cells that have not been run; of OUT, mutation-score.json is
enough for that. A job needs one core and 4 GiB of memory.

Exit status: 0 if every fault is caught in some tier on every backend, and all cells without a fault conform; 1 if not;
3 if a cell was not run.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, zip_longest
from pathlib import Path
from zlib import crc32

from mutation_table import BLANK, HONEST, JSON, MARKDOWN, QUICK, Row, read_score, to_markdown, write_score
from pydantic import TypeAdapter

from conformance.backends.faults import Fault, catalogue
from conformance.backends.protocol import BackendEntry, registered_backends
from conformance.core.host import FIXTURES
from conformance.matrix.cell import Cell
from conformance.matrix.options import Selection
from conformance.matrix.profile import select_cells
from conformance.models.synthetic import with_skeleton
from conformance.records.record_format import dumps
from conformance.records.step_tensors import StepRecord, read_record
from conformance.results.run_results import VERDICT, read_entry
from conformance.runner.earlier_run import environment
from conformance.runner.placement import SessionConfig
from conformance.runner.session import Session
from conformance.spec.layout import Layout
from conformance.spec.observables import is_unread
from conformance.spec.precision import PRECISIONS, PrecisionName
from conformance.spec.scenario import load_scenario
from impl.faults.declaration import with_program

Key = tuple[str, str, str, str]  # fault, backend, tier, and the cell of a row without a fault
JOBS = "jobs.pickle"
GRACE = 60  # seconds that a cell may go on after --minutes
MOST = 24  # cells of one oracle that are run with one seed
LOSSES, NORMS = ("loss", "critic.loss"), ("grad_norm", "critic.grad_norm")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Describes the work for one row of the score.

    cells: the one cell to run, or several that are run until one catches the fault; none if the row is BLANK.
    claimed_as: see ``claim``.
    """

    row: Row
    cells: tuple[Cell, ...] = ()
    claimed_as: str = ""

    @property
    def key(self) -> Key:
        """Identifies the job in the rows of an earlier command."""
        return key_of(self.row)

    @property
    def claim(self) -> str:
        """Names the jobs that one process runs in turn: those of a cell, or of cells that share an oracle."""
        return self.claimed_as or self.cells[0].plain.slug


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    default = Path("parity-out") / f"mutation-score-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    parser.add_argument("out", type=Path, nargs="?", default=default)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="after which no cell is begun; one more and workers end (default: none)",
    )
    parser.add_argument("--faults", nargs="*", default=list(catalogue()), choices=list(catalogue()), metavar="NAME")
    parser.add_argument("--backends", nargs="+", default=list(registered_backends()))
    parser.add_argument("--tiers", nargs="+", default=[*PRECISIONS, QUICK], choices=[*PRECISIONS, QUICK])
    parser.add_argument("--seeds", nargs="*", type=int, default=[], help="of cells without a fault (default: none)")
    parser.add_argument("--cells", type=int, default=500, help="for each of --seeds (default: 500)")
    parser.add_argument(
        "--profiles", nargs="+", default=["full", "families"], help="of --seeds (default: full families)"
    )
    parser.add_argument("--ranks", type=int, default=8, help="of the largest cell of --seeds (default: 8)")
    parser.add_argument("--is-worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    if options.is_worker:
        work(pickle.loads((options.out / JOBS).read_bytes()), options.out, until=until)
        return 0
    jobs = plan(options.faults, options.backends, options.tiers, models=options.out.resolve() / "models")
    if options.seeds:
        cells = {str(c): c for name in options.profiles for c in select_cells(Selection(profile=name))}.values()
        own = [
            cell
            for cell in cells
            if cell.world_size <= options.ranks and {p.backend.name for p in cell.phases} <= set(options.backends)
        ]
        for seed in options.seeds:
            jobs += without_faults(own, seed, [tier for tier in PRECISIONS if tier in options.tiers], options.cells)
    facts = {"date": f"{datetime.now():%Y-%m-%d}", **environment()}
    run_workers(jobs, options.out, count=options.jobs, until=until)
    score = write_score(options.out, collected(jobs, options.out), facts)
    print(to_markdown(score, facts).partition("## Every fault")[0])
    print(options.out / MARKDOWN)
    return 0 if score.holds else 1 if score.is_complete else 3


def plan(faults: Sequence[str], backends: Sequence[str], tiers: Sequence[str], *, models: Path) -> list[Job]:
    """Returns the jobs, ordered so that consecutive jobs use the same worker group; long ones of a backend come first.

    ``models``: the folder for models with dropout.
    """
    jobs = list(_planted(faults, backends, tiers, models))
    honest = {str(cell.plain): cell.plain for job in jobs for cell in job.cells}
    for name, cell in honest.items():
        row = Row(fault="", predicted="", backend=cell.backend, tier=cell.scenario.precision, cell=name, state="")
        jobs.append(Job(row=row, cells=(cell,)))
    return sorted(jobs, key=lambda job: (job.row.backend, job.row.tier != QUICK, job.row.cell))


def _planted(faults: Sequence[str], backends: Sequence[str], tiers: Sequence[str], models: Path) -> Iterator[Job]:
    quick = select_cells(Selection()) if QUICK in tiers else []
    entries = registered_backends()
    for fault in (catalogue()[name] for name in faults):
        for backend in (name for name in backends if name in fault.cells.layouts):
            row = Row(fault=fault.name, predicted=fault.stage, backend=backend, tier="", cell="", state="")
            for tier in (tier for tier in PRECISIONS if tier in tiers):
                row = dataclasses.replace(row, predicted=fault.stage_in(tier))
                if why := fault.cells.unobservable.get(tier):
                    yield Job(row=dataclasses.replace(row, tier=tier, state=BLANK, reason=why))
                    continue
                cell = with_program(_cell(fault, entries[backend], tier), fault, models)
                yield Job(row=dataclasses.replace(row, tier=tier, cell=str(cell)), cells=(cell,))
            if cells := tuple(_of_quick(quick, fault, entries[backend])):
                yield Job(row=dataclasses.replace(row, tier=QUICK, cell=str(cells[0])), cells=cells)


def _cell(fault: Fault, backend: BackendEntry, tier: PrecisionName) -> Cell:
    place = fault.cells
    file = FIXTURES / "scenarios" / f"{place.scenario_in(tier)}.toml"
    return Cell.single(
        scenario=load_scenario(file, model=with_skeleton(f"models/{place.model}"), precision=tier),
        backend=backend,
        layout=Layout.parse(place.layouts[backend.name]),
        faults=(fault.name,),
    )


def _of_quick(quick: Sequence[Cell], fault: Fault, backend: BackendEntry) -> Iterator[Cell]:
    """Returns the backend's cells in the quick profile: first those of the fault's own scenario, small ones first."""
    reads = _cell(fault, backend, "exact").scenario.objective.reads
    own = [cell for cell in quick if cell.backend == backend.name]
    for cell in sorted(own, key=lambda cell: (cell.scenario.name != fault.cells.scenario, cell.world_size)):
        if reads in ("samples", cell.scenario.objective.reads):  # a fault of rollouts needs a cell with rollouts
            yield dataclasses.replace(cell, faults=(fault.name,))


def without_faults(cells: Sequence[Cell], seed: int, tiers: Sequence[PrecisionName], count: int) -> list[Job]:
    """Returns jobs for at least ``count`` of the cells with this seed: up to MOST that share an oracle, of each tier in
    turn."""
    groups: dict[tuple[str, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[(cell.scenario.precision, *map(str, cell.oracle_request))].append(
            dataclasses.replace(cell, scenario=dataclasses.replace(cell.scenario, seed=seed))
        )
    draw = random.Random(seed)
    order = [draw.sample(group, min(len(group), MOST)) for group in draw.sample(list(groups.values()), len(groups))]
    by_tier = [[group for group in order if group[0].scenario.precision == tier] for tier in tiers]
    jobs: list[Job] = []
    for group in chain.from_iterable(filter(None, some) for some in zip_longest(*by_tier)):
        for cell in group if len(jobs) < count else ():
            row = Row(
                fault="", predicted="", backend=cell.backend, tier=cell.scenario.precision, cell=str(cell), state=""
            )
            jobs.append(Job(row=row, cells=(cell,), claimed_as=group[0].slug))
    return jobs


def run_workers(jobs: Sequence[Job], out: Path, *, count: int, until: float) -> None:
    """Runs the jobs without a row in up to ``count`` worker processes, and waits for them; for ``until`` see work.
    Ends workers that are at work GRACE seconds later."""
    claims = out / "claims"
    shutil.rmtree(claims, ignore_errors=True)  # claims of an earlier command; its unfinished jobs are run again
    claims.mkdir(parents=True)
    (out / JOBS).write_bytes(pickle.dumps(jobs))  # planning takes every worker seconds
    done = written_rows(out).keys()
    todo = {job.key: job.claim for job in jobs if job.cells}
    left = {claim for key, claim in todo.items() if key not in done}
    minutes = str((until - time.monotonic()) / 60)
    command = [sys.executable, __file__, str(out), "--is-worker", "--minutes", minutes]
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen(command, env=threads) for _ in range(min(count, len(left)))]
    while running := [process for process in processes if process.poll() is None]:
        print(f"{len(written_rows(out).keys() & todo.keys())} of {len(todo)}", file=sys.stderr, flush=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running[0].wait(timeout=10)
        if time.monotonic() > until + GRACE:
            for process in running:
                process.terminate()


def key_of(row: Row) -> Key:
    return row.fault, row.backend, row.tier, "" if row.fault else row.cell


def written_rows(out: Path) -> dict[Key, Row]:
    """Reads the rows of an earlier command and those that workers have written so far, by the jobs' keys."""
    score = read_score(out / JSON)[0].rows if (out / JSON).is_file() else []
    earlier = [vars(row) for row in score if row.state != "infrastructure"]  # those are run again
    lines = [json.loads(line) for file in out.glob("workers/*/rows.jsonl") for line in file.read_text().splitlines()]
    rows = TypeAdapter(list[Row]).validate_python([*earlier, *lines])
    return {key_of(row): row for row in rows if row.state not in ("not_run", BLANK)}


def collected(jobs: Sequence[Job], out: Path) -> list[Row]:
    """Returns the rows of all jobs; a job that no worker has run has the state ``not_run``."""
    done = written_rows(out)
    missing = {job.key: dataclasses.replace(job.row, state="not_run") if job.cells else job.row for job in jobs}
    return [done.get(key, row) for key, row in missing.items()]


def work(jobs: Sequence[Job], out: Path, *, until: float) -> None:
    """Runs the jobs that have no row and that no other worker has claimed, and writes a line of rows.jsonl for each.

    No job is begun after the time ``until`` (time.monotonic, in seconds).
    """
    (out / "workers").mkdir(exist_ok=True)
    folder, done = Path(tempfile.mkdtemp(dir=out / "workers")), written_rows(out)
    sizes, own = Counter(job.claim for job in jobs if job.cells), set()
    # Of claims with as many jobs none comes first by its name, so that a command that ends early has run some of all.
    order = sorted((j for j in jobs if j.cells), key=lambda j: (-sizes[j.claim], crc32(j.claim.encode()), j.claim))
    with Session(SessionConfig(out=folder / "session")) as session, (folder / "rows.jsonl").open("w") as file:
        for job in order:
            if time.monotonic() >= until or job.key in done:
                continue
            if job.claim in own or _claim(out / "claims" / job.claim):
                own.add(job.claim)
                done[job.key] = row = run(session, job)
                print(dumps(vars(row)), file=file, flush=True)


def _claim(claim: Path) -> bool:
    """Claims jobs by creating a file; returns whether no other process has claimed them before."""
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def run(session: Session, job: Job) -> Row:
    """Runs the cells of a job until one catches the fault; the row describes the last cell that was run."""
    row = job.row
    for cell in job.cells:
        verdict = (judged := session.run(cell)).verdict
        reason = verdict.reason.partition("\n")[0]  # without the logs and stacks of this machine
        margins = {stage: float(f"{worst.ratio:.3g}") for stage, worst in verdict.worst.items()}
        row = dataclasses.replace(
            row, cell=str(cell), state=verdict.state, stage=verdict.first_stage, reason=reason, margins=margins
        )
        if row.state == "differs":
            unread = [s.step for s in _steps(session, cell) if is_unread("gradient", s.line)]
            row = dataclasses.replace(row, after_unread=verdict.findings[0].step in unread)
        if judged.completed and row.tier != QUICK and not job.claimed_as:
            row = dataclasses.replace(row, loss=_errors(session, cell, LOSSES), norm=_errors(session, cell, NORMS))
        if (
            row.state in HONEST
            if not row.fault
            else (row.state == "differs" and row.is_as_predicted) or row.tier == QUICK
        ):
            shutil.rmtree(session.folder(cell), ignore_errors=True)
        if row.state == "differs":
            break
    return row


def _steps(session: Session, cell: Cell) -> Sequence[StepRecord]:
    """Returns the steps of the last phase of a cell."""
    return read_record(session.folder(cell) / read_entry(session.folder(cell) / VERDICT).records[-1]).steps


def _errors(session: Session, cell: Cell, keys: Sequence[str]) -> tuple[float, float]:
    """Returns the largest relative errors of the values ``keys`` against the oracle, at the first and the last step."""
    own = _steps(session, cell)
    reference = read_record(session.reference(cell)).steps
    first, last = (max(_off(own[i].value(k), reference[i].value(k)) for k in keys) for i in (0, -1))
    return first, last


def _off(x: float | None, reference: float | None) -> float:
    if x is None or reference is None:  # a policy alone has no critic
        return 0.0
    error = abs(x - reference) / (abs(reference) or 1.0)
    return math.inf if math.isnan(error) else error


if __name__ == "__main__":
    sys.exit(main())
