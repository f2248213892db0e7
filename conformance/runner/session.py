"""Session: runs the legs of each cell in live worlds, waits for its oracle, judges the cell and stores the verdict.

The output folder (docs/architecture.md) has ``summary.json``, ``cells/SLUG/{verdict.json,legs/}``, ``oracle/`` and
``inputs/``. The summary is written before the first cell, repeatedly between cells, and at the end, so that an
interrupted session shows what was not run (claim 9).
"""

import logging
import os
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from conformance.backends.protocol import BackendEntry
from conformance.backends.registry import versions_of
from conformance.core.errors import UsageError
from conformance.core.host_resources import room_of
from conformance.core.paths import resolve
from conformance.data.prepare import FrozenInputs, prepare_inputs
from conformance.judge.expected_differences import judge_cell
from conformance.judge.rejudge import in_both, told_of
from conformance.matrix.cell import Cell
from conformance.models.synthetic import is_large, is_sketched
from conformance.oracle.objectives import functions_of
from conformance.oracle.role_model import is_routed
from conformance.records.header_checks import FLOAT64
from conformance.records.record_format import peak_memory
from conformance.results.bisection import BISECTION, Bisected
from conformance.results.requirements import Floor
from conformance.results.run_results import Attempt, CellSummary, Entry, Run, cell_summary, write_entry, write_summary
from conformance.results.verdict import FAILED, NOT_STARTED, Verdict
from conformance.runner.environment import environment
from conformance.runner.oracle_jobs import Oracles
from conformance.runner.phases import TraceFailed, find_in_traced, run_legs, run_traced, world_config
from conformance.runner.placement import Where
from conformance.runner.preflight import Refusals
from conformance.runner.resource_check import check_room
from conformance.runner.resume import Earlier, before
from conformance.runner.scheduler import Activities, Activity, AtOnce, check_output_folder, lasting, make_folder
from conformance.runtime import Device
from conformance.runtime.gpu_leases import filled
from conformance.runtime.multihost.controller import Hosts
from conformance.spec.known_defects import Known, defects_of
from conformance.spec.objectives import all_observables
from conformance.spec.observables import Observable

TRACED = "traced"  # in a cell's folder, while it is bisected

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """The configuration of a session.

    out: the output folder. profile, command: the profile and the user's command line, for the summary.
    arguments: the arguments that select cells; they become part of the command that reproduces a cell.
    gpus: the GPUs that cells lease, or shares of them, so that they run side by side; empty: one cell after another.
    ranks_per_gpu: how many may share one. hosts: the agents that start ranks, on other hosts; None: ranks are here.
    budget_s: seconds that a leg, or an oracle run, may go without progress. fail_fast: end after the first failure.
    floor, selected: see conformance.matrix.plan. selection: see conformance.results.run_results.Run.
    earlier: the run in ``out`` that this one goes on with.
    """

    out: Path
    device: Device = "cpu"
    profile: str = ""
    command: str = ""
    arguments: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    ranks_per_gpu: int = 1
    hosts: Hosts | None = None
    budget_s: float = 300.0
    fail_fast: bool = False
    floor: Floor = field(default_factory=Floor)
    selected: str = ""
    selection: str = ""
    earlier: Earlier | None = None


@dataclass(frozen=True, kw_only=True)
class JudgedCell:
    """A cell with its verdict. For the other fields see conformance.results.run_results.Entry.

    failed_before: whether an infrastructure failure came before this verdict, in this run.
    """

    cell: Cell
    verdict: Verdict
    seconds: float = 0.0
    completed: bool = False
    records: tuple[str, ...] = ()
    other: Attempt | None = None
    failed_before: bool = False


class Session:
    """Runs and judges cells. Use it in a ``with`` statement, at whose end all its processes are ended.

    ``check`` raises if a signal stopped the run. It is called before a verdict is written, or what bisecting found,
    because a library may have made a failure of what the signal raised: then that says nothing of the cell.
    """

    def __init__(self, config: SessionConfig, *, check: Callable[[], None] = lambda: None) -> None:
        self.config, self.check = config, check
        earlier = config.earlier.entries if config.earlier else ()
        self._earlier = {entry.cell: entry for entry in earlier}
        self._summaries: dict[str, CellSummary] = {entry.cell: cell_summary(entry) for entry in earlier}
        self._summary_due = 0.0
        self._activities = Activities()
        self._begun: dict[Cell, Future[JudgedCell]] = {}
        self._asking = threading.RLock()  # inputs, oracles and backends are asked for by one thread at a time

    def __enter__(self) -> "Session":
        self._started = datetime.now(UTC)
        self._clock = time.monotonic()
        self._environment = environment(ranks_per_gpu=(shared := self.config.ranks_per_gpu))
        make_folder(self.config.out)
        device, out = self.config.device, self.config.out
        self._where = Where(device=device, gpus=self.config.gpus, hosts=self.config.hosts, work_dir=out / "worlds")
        self._pool, self._at_once = self._where.pool, AtOnce(self._where.width)
        self._refusals = Refusals(device, ranks_per_gpu=shared, fleet=self._where.fleet)
        budget_s, leased = self.config.budget_s, self._pool if self._where.is_leased else None
        self._oracles = Oracles(root=out, device=device, budget_s=budget_s, leased=leased, gpus=self._where.gpus)
        return self

    def __exit__(self, *_: object) -> None:
        self._at_once.cancel()
        if self._at_once.is_parallel and self._activities.are_any:  # the session was stopped: nobody waits for them
            self._pool.abort()
        self._oracles.__exit__()
        self._at_once.join()
        self._where.close()

    def run_all(self, cells: Sequence[Cell], *, progress: Callable[[JudgedCell], None]) -> None:
        """Run and judge the cells, while oracles are computed. ``progress`` gets each result.

        Raises UsageError if this machine has no room for them, and Unwritable if the output folder cannot be written to
        any more.
        """
        self.announce(cells)
        with lasting(self.config.out):
            self._run_announced(cells, progress)

    def _run_announced(self, cells: Sequence[Cell], progress: Callable[[JudgedCell], None]) -> None:
        self._prepare(cells)
        try:
            for judged in self._at_once.run(cells, self._timed):
                self.check()
                self._store_verdict(judged)
                check_output_folder(self.config.out)
                self._write_summary_if_due()
                progress(judged)
                if self.config.fail_fast and judged.verdict.state in FAILED:
                    return self.write_summary(finished=False)
        except KeyboardInterrupt:
            self.write_summary(finished=False)
            raise
        self.write_summary(finished=True)

    def _prepare(self, cells: Sequence[Cell]) -> None:
        """Wait for the agents, if there are any to wait for, look at the room, and ask for oracles."""
        if self._where.fleet is not None:
            self._where.fleet.wait(limit_s=self.config.budget_s)
            self._at_once = AtOnce(self._where.width)
        waiting = self._activities.waiting = tuple(cell for cell in cells if not self.refusal(cell))
        room, device = room_of(self.config.out), self.config.device
        check_room(waiting, room, device=device, warn=logger.warning, agents=self._where.agents)
        for said in filled(self.config.gpus) if self._where.queues_oracles else ():
            logger.warning(said)
        for cell in self._at_once.ordered(waiting):
            if not is_large(cell.scenario):
                self._request(cell)

    def begin(self, cells: Sequence[Cell]) -> None:
        """Begin to run the cells side by side, for ``run`` to wait for them. Raises UsageError as ``run_all`` does."""
        self._prepare(cells)
        self._begun = self._at_once.begin(cells, self._timed)

    def _import_ahead(self, waiting: Iterable[Cell]) -> None:
        """Start to import the backends of the first waiting cell, and of the next cell that has other backends."""
        backends: set[BackendEntry] = set()
        for cell in waiting:
            new = {leg.backend: leg for leg in cell.legs if leg.backend not in backends}
            for leg in new.values():
                self._pool.prepare(world_config(leg, self.config.device))
            if backends and new:
                return
            backends |= new.keys()

    def announce(self, cells: Sequence[Cell]) -> None:
        """Write every cell to the output folder as not run, so that none is missing if the session is interrupted.

        The cells of an earlier run keep their verdicts until they have new ones.
        """
        self._environment |= versions_of(list(dict.fromkeys(leg.backend for cell in cells for leg in cell.legs)))
        for cell in cells:
            if str(cell) not in self._earlier:
                self._store_verdict(JudgedCell(cell=cell, verdict=Verdict(state="not_run", reason=NOT_STARTED)))
        self.write_summary(finished=False)

    def run(self, cell: Cell) -> JudgedCell:
        """Run one cell, leg after leg, judge it, and write its verdict. Waits for one that was begun."""
        judged = self._begun.pop(cell).result() if cell in self._begun else self._timed(cell)
        self.check()
        self._store_verdict(judged)
        return judged

    def _timed(self, cell: Cell) -> JudgedCell:
        began = time.monotonic()
        with self._asking:
            if any(one is cell for one in self._activities.waiting):
                self._import_ahead(self._activities.waiting)
            self._activities.begin(cell)
        judged = self.judged(cell)
        self._activities.end()
        return replace(judged, seconds=time.monotonic() - began)

    def judged(self, cell: Cell) -> JudgedCell:
        """Run and judge one cell without writing a verdict; its records are in its folder."""
        if refused := self.refusal(cell):
            return JudgedCell(cell=cell, verdict=refused)
        inputs = self._request(cell)
        for left in ("legs", "fresh"):  # by an earlier run
            shutil.rmtree(self.folder(cell) / left, ignore_errors=True)
        (self.folder(cell) / BISECTION).unlink(missing_ok=True)
        first, is_doubtful = self._attempt(cell, inputs, fresh=False)
        told, verdict, other, failed = first, first.verdict, None, False
        if is_doubtful:
            again, _ = self._attempt(cell, inputs, fresh=True)
            failed = self._where.is_leased and verdict.state == "infrastructure"  # which tells of the machine
            told, other = (again, first) if failed else told_of(first, again)
            verdict = again.verdict if failed else in_both(first.verdict, again.verdict)
        judged = JudgedCell(cell=cell, verdict=verdict, completed=told.completed, records=told.records)
        return replace(judged, other=other, failed_before=failed)

    def _attempt(self, cell: Cell, inputs: FrozenInputs, *, fresh: bool) -> tuple[Attempt, bool]:
        """Run the legs and judge them. Also returns whether the cell should be run again in fresh ranks, because a
        failure or a difference may be the effect of cells that its ranks had run before.

        A cell with a planted fault, which is expected to differ, and a cell that hung, which has used up its budget,
        are not run again. On leased places all that fail are, in whatever ranks: drivers and links fail at times.
        """
        folder = self.folder(cell)
        legs, device, budget_s = folder / ("fresh" if fresh else "legs"), self.config.device, self.config.budget_s
        # A large oracle's memory has to be free again; and a cell that waits for two GPUs reserves the one that idles.
        if is_large(cell.scenario) or self._where.queues_oracles:
            self._activities.phase("waiting for the oracle")
            if missing := self._oracles.wait(cell, defects_of(self._refusals.known(cell))):
                verdict = Verdict(state="infrastructure", reason=missing)
                return Attempt(fresh=fresh, verdict=verdict, completed=False), False
        self._activities.phase("waiting for the oracle's choices of experts")
        inputs = self._oracles.replayed(cell, inputs)
        self._activities.phase("starting fresh ranks" if fresh else "starting ranks")
        ended = run_legs(self._pool, cell, inputs, legs, device=device, budget_s=budget_s, fresh=fresh)
        paths = [legs / str(number) / "record" for number in range(len(cell.legs))]
        self._activities.phase("waiting for the oracle")
        if missing := self._oracles.wait(cell, defects_of(self._refusals.known(cell))):
            verdict, failed = Verdict(state="infrastructure", reason=missing), False
        elif ended.failure:
            verdict = Verdict(state="infrastructure", reason=ended.failure)
            failed = self._where.is_leased or ended.kind != "hung"
        else:
            self._activities.phase("judging")
            verdict, failed = self._judge(cell, paths, inputs), False
        if verdict.state in ("conforms", "partly_observed"):
            for path in paths:
                shutil.rmtree(path.with_name("saved"), ignore_errors=True)  # kept only for cells that differ
        records = tuple(str(path.relative_to(folder)) for path in paths if path.is_dir())
        attempt = Attempt(fresh=fresh, verdict=verdict, completed=not ended.failure, records=records)
        used = ended.used or (failed and self._where.is_leased)
        return attempt, used and not cell.faults and (failed or verdict.state == "differs")

    def _judge(self, cell: Cell, records: Sequence[Path], inputs: FrozenInputs) -> Verdict:
        """Judge the records; if they differ by the first noise run, make the further ones, and judge again."""
        known = self._refusals.known(cell)

        def judged() -> Verdict:
            return judge_cell(
                str(cell),
                records,
                oracle=self._oracles.folder(cell),
                known=known,
                defective=self._defective(cell, known),
                observables=self._observables(cell),
            )

        verdict = judged()
        # Cells with planted faults too: they have to be found by the bounds that everybody is judged by.
        if verdict.state == "differs" and self._oracles.more_noise(cell, inputs, defects_of(known)):
            return judged()
        return verdict

    def _observables(self, cell: Cell) -> tuple[Observable, ...]:
        scaled = cell.scenario.judged_loss_scale is not None
        return all_observables(cell.scenario.objective, scaled=scaled, routed=is_routed(resolve(cell.scenario.model)))

    def activity(self) -> Activity | None:
        """What the session does at the moment; None between cells. For another thread, to show it."""
        return self._activities.now(lambda: self._pool.phase())  # there is no pool before there are cells

    def trace(self, cell: Cell, step: int) -> Path:
        """Run a cell of one leg again up to ``step`` with its activations captured
        (conformance.runner.phases.run_traced).

        Returns the folder. Raises TraceFailed.
        """
        inputs, folder = self._oracles.replayed(cell, self._request(cell)), self.folder(cell) / TRACED
        device, budget_s = self.config.device, self.config.budget_s
        run_traced(self._pool, cell, inputs, folder, step=step, device=device, budget_s=budget_s)
        return folder

    def compare_traced(self, cell: Cell, step: int) -> tuple[Bisected, ...]:
        """Hold what ``trace`` has captured of a cell against the oracle's. Raises TraceFailed."""
        inputs = self._oracles.replayed(cell, self._request(cell))
        if missing := self._oracles.wait(cell, defects_of(self._refusals.known(cell))):
            raise TraceFailed(missing)
        oracle, traced = self._oracles.folder(cell) / FLOAT64, self.folder(cell) / TRACED
        return find_in_traced(self._pool, cell, inputs, traced, oracle, step=step, budget_s=self.config.budget_s)

    def _defective(self, cell: Cell, known: Sequence[Known]) -> Path | None:
        """The folder of the oracle's records with the cell's expected defects; None if it has no such defects."""
        defects = defects_of(known)
        return self._oracles.folder(cell, defects) if defects else None

    def _request(self, cell: Cell) -> FrozenInputs:
        with self._asking:
            inputs = prepare_inputs(cell.scenario, self.config.out)
            self._oracles.request(cell, inputs, defects_of(self._refusals.known(cell)))
        return inputs

    def refusal(self, cell: Cell) -> Verdict | None:
        """The verdict of a cell that cannot be run at all; None if it can be.

        Raises UsageError for a model, data set or objective that cannot be used, because no backend could run it.
        """
        if is_sketched(cell.scenario) and any(leg.save == "merge" for leg in cell.legs):
            raise UsageError(
                f"{cell} merges an adapter, which is judged by whole matrices, and its records keep sketches of them; "
                f"give --sketch a number that no matrix exceeds, or select other cells"
            )
        with self._asking:
            functions_of(cell.scenario.objective)
            inputs = prepare_inputs(cell.scenario, self.config.out, draws=False)
            return self._refusals.refusal(cell, next(iter(inputs.models.values())))

    def folder(self, cell: Cell) -> Path:
        """What belongs to the cell, its verdict as well."""
        return self.config.out / "cells" / cell.slug

    def _store_verdict(self, judged: JudgedCell) -> None:
        cell, folder = judged.cell, self.folder(judged.cell)
        known = self._refusals.known(cell)
        defective = self._defective(cell, known) if judged.records else None
        memory, host_memory = peak_memory(folder / record for record in judged.records)
        entry = Entry(
            cell=str(cell),
            scenario=cell.scenario.name,
            model=cell.scenario.model_name,
            backend=cell.backend,
            layout=cell.layout,
            variant=cell.variant,
            world_size=cell.world_size,
            seconds=judged.seconds,
            folder=f"cells/{cell.slug}",
            completed=judged.completed,
            records=judged.records,
            oracle=os.path.relpath(self._oracles.folder(cell), folder) if judged.records else None,
            expected=known,
            defective=os.path.relpath(defective, folder) if defective else None,
            reproduce=shlex.join(["parity", "run", *self.config.arguments, "--cells", str(cell)]),
            observables=self._observables(cell),
            verdict=judged.verdict,
            other=judged.other,
            memory=memory,
            host_memory=host_memory,
            before=(*before(self._earlier.get(str(cell))), *(("infrastructure",) if judged.failed_before else ())),
        )
        self._summaries[str(cell)] = cell_summary(entry)
        write_entry(self.config.out, entry)

    def _write_summary_if_due(self) -> None:
        """Write the summary, but spend at most a twentieth of the time on it: its length grows with the cells."""
        began = time.monotonic()
        if began >= self._summary_due:
            self.write_summary(finished=False)
            now = time.monotonic()
            self._summary_due = now + 20 * (now - began)

    def write_summary(self, *, finished: bool) -> None:
        """Write ``summary.json`` with what is known so far."""
        earlier = self.config.earlier
        run = Run(
            started=earlier.run.started if earlier else self._started.isoformat(timespec="seconds"),
            finished=datetime.now(UTC).isoformat(timespec="seconds") if finished else None,
            seconds=round(time.monotonic() - self._clock + (earlier.run.seconds if earlier else 0), 2),
            profile=self.config.profile,
            device=self.config.device,
            command=self.config.command or shlex.join(["parity", "run", *self.config.arguments]),
            environment=self._environment,
            leased=self._where.leased,
            floor=self.config.floor,
            selected=self.config.selected,
            selection=self.config.selection,
        )
        write_summary(self.config.out, run, list(self._summaries.values()))
