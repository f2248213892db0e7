"""Runs the cells of a session, sequentially or in parallel, while their oracles are computed.

conformance.runner.attempt runs and judges one cell, and writes the results of all cells.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from conformance.backends.registry import versions_of
from conformance.core.errors import UsageError
from conformance.core.host import host_resources_of, resolve
from conformance.core.io import make_folder
from conformance.core.process import import_uncollected
from conformance.core.timeline import WAIT, timeline
from conformance.data.inputs import FrozenInputs, check_trained, checked_model, prepare_inputs
from conformance.judge.cells import Judges, one_thread
from conformance.matrix.cell import Cell
from conformance.models.families import is_written
from conformance.models.folder_checks import check_model_folder
from conformance.models.synthetic import is_large, is_sketched, is_without_weights
from conformance.oracle.objectives import functions_of
from conformance.oracle.role_model import decoder_of
from conformance.results.bisection import Bisected
from conformance.results.verdict import FAILED, FAILED_BEFORE, NOT_STARTED, OTHER_CODE, Verdict
from conformance.runner.attempt import CellRunner, Expectations, JudgedCell, ResultWriter, expected_of_none
from conformance.runner.earlier_run import environment
from conformance.runner.oracle_jobs import Oracles
from conformance.runner.phases import import_ahead
from conformance.runner.placement import (
    Activities,
    Activity,
    AtOnce,
    SessionConfig,
    Where,
    check_output_folder,
    lasting,
)
from conformance.runner.preflight import Refusals, check_resources, workers_that_fit
from conformance.runtime.gpu_inventory import ActivityMeter
from conformance.runtime.gpu_leases import unleased_use
from conformance.spec.conventions import Conventions
from conformance.spec.precision import FLOAT64

logger = logging.getLogger(__name__)
TOKENIZERS = "transformers.models.auto.tokenization_auto"  # most of the time until the first inputs are prepared
ONLY_WRITTEN = "are judged only for families that the oracle computes itself (docs/reference/models.md); leave them out"


class Session:
    """Runs and judges cells. Use it in a ``with`` statement; all processes end at its end.

    check: raises if a signal stopped the run. It is called before a verdict or a bisection is written, because a
    library may have turned the exception of the signal into a failure that is not the cell's.
    """

    def __init__(self, config: SessionConfig, *, check: Callable[[], None] = lambda: None) -> None:
        self.config, self.check = config, check
        self._activities = Activities()
        self._checked: dict[tuple[str, str], Path] = {}  # folders of models, by scenario and model
        self._begun: dict[Cell, Future[JudgedCell]] = {}
        self._one_thread = one_thread()  # for what this process judges and prepares
        self._asking = threading.RLock()  # one thread at a time prepares inputs, requests oracles, queries backends

    def __enter__(self) -> "Session":
        config, device = self.config, self.config.device
        started = environment(ranks_per_gpu=config.ranks_per_gpu)
        make_folder(config.out)
        where = Where(config)
        self._where, self._pool, self._at_once = where, where.pool, AtOnce(where.width)
        self._refusals = Refusals(device, ranks_per_gpu=config.ranks_per_gpu, fleet=where.fleet)
        budget_s, leased = config.budget_s, self._pool if where.is_leased else None
        self._oracles = Oracles(
            root=config.out,
            device=device,
            budget_s=budget_s,
            lanes=config.oracle_lanes,
            leased=leased,
            gpus=where.oracles,
            packed=where.is_packed,
        )
        self._expectations = Expectations(self._refusals)
        several = self._at_once.is_parallel and config.oracle_lanes > 1
        self._judges = self._made_judges() if several else None
        self._runner = CellRunner(
            config,
            judges=self._judges,
            where=where,
            oracles=self._oracles,
            expectations=self._expectations,
            activities=self._activities,
        )
        self.results = ResultWriter(
            config,
            environment=started,
            mps=lambda: where.mps,
            leased=lambda: where.leased,
            gpu_active=ActivityMeter(config.gpus).shares,
            oracles=self._oracles,
            expectations=self._expectations,
        )
        self._one_thread.__enter__()
        return self

    def _made_judges(self) -> Judges:
        work_dir, logs = self.config.out / "worlds", self._oracles.withheld / "judged"
        lanes = self.config.oracle_lanes
        return Judges(lanes=lanes, work_dir=work_dir, logs=logs, budget_s=self.config.budget_s)

    def __exit__(self, *_: object) -> None:
        self._one_thread.__exit__(None, None, None)
        self._at_once.cancel()
        if self._at_once.is_parallel and self._activities.are_any:  # the session was stopped: they are not needed
            self._pool.abort()
            if self._judges is not None:
                self._judges.abort()
        self._oracles.__exit__()
        self._at_once.join()
        if self._judges is not None:
            self._judges.close()
        self._where.close()

    def run_all(
        self,
        cells: Sequence[Cell],
        *,
        progress: Callable[[JudgedCell], None],
        begun: Callable[[], None] = lambda: None,
        inputs: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """Runs and judges the cells while oracles are computed. progress: gets each result. begun: called before the
        first cell, when the inputs are checked. inputs: gives digests of what a new run reads, when the cells fit.

        Raises UsageError if memory or disk do not suffice, and Unwritable if the output folder is not writable any
        more.
        """
        self._oracles.prepare()
        timeline.switch("announce")
        import_uncollected(TOKENIZERS)  # while the adapters import
        self.announce(cells)
        timeline.switch("prepare")
        if self._pool.is_shared:  # all backends import while their adapters are asked
            known = [cell for cell in cells if self._refusals.can_be_asked(cell)]
            import_ahead(self._pool, known, self.config.device)
        with lasting(self.config.out):
            self._prepare(cells)
            self.results.inputs = self.results.inputs or inputs()
            begun()
            self._run_announced(cells, progress)

    def _run_announced(self, cells: Sequence[Cell], progress: Callable[[JudgedCell], None]) -> None:
        timeline.switch(f"{WAIT}cells")
        try:
            for judged in self._at_once.run(cells, self._timed, ready=self._ready):
                timeline.switch("write")
                self.check()
                self.results.store(judged)
                check_output_folder(self.config.out)
                self.results.write_summary_if_due()
                progress(judged)
                timeline.switch(f"{WAIT}cells")
                if self.config.fail_fast and judged.verdict.state in FAILED:
                    return self.results.write_summary(finished=False)
        except KeyboardInterrupt:
            self.results.write_summary(finished=False)
            raise
        self.results.write_summary(finished=True)

    def _prepare(self, cells: Sequence[Cell]) -> None:
        """Waits for hosts, checks memory and disk, and starts to import backends.

        Cells side by side start as soon as their own inputs are ready.
        """
        if self._where.fleet is not None:
            self._where.fleet.wait(limit_s=self.config.budget_s)
            self._at_once = AtOnce(self._where.width)
        refused = self.refused_unread if self._at_once.is_parallel else self.refusal
        waiting = self._activities.waiting = tuple(cell for cell in cells if not refused(cell))
        import_ahead(self._pool, self._at_once.ordered(waiting), self.config.device)
        resources, device = host_resources_of(self.config.out), self.config.device
        check_resources(waiting, resources, device=device, warn=logger.warning, hosts=self._where.hosts)
        if waiting and not self._where.is_leased and self._at_once.is_parallel:
            fitting = workers_that_fit(waiting, resources, most=self._where.width)
            if fitting < self._where.width:
                logger.warning("memory suffices for %d cells at once, not for %d", fitting, self._where.width)
            self._at_once = AtOnce(fitting)
        for message in unleased_use(self.config.gpus) if self._where.queues_oracles else ():
            logger.warning(message)
        for cell in () if self._at_once.is_parallel else waiting:
            self._ready(cell)

    def _ready(self, cell: Cell) -> None:
        """Prepares the inputs of a cell that will run, and requests its oracles; a thread could not limit templates.

        Large oracles need the memory of a host without GPUs, so there each begins with its first cell.
        """
        if not self.refusal(cell) and (self._where.queues_oracles or not is_large(cell.scenario)):
            self._request(cell)

    def begin(self, cells: Sequence[Cell]) -> None:
        """Starts the cells in parallel; ``run`` waits for them. Raises UsageError as ``run_all`` does."""
        self._oracles.prepare()
        self._prepare(cells)
        self._begun = dict(self._at_once.begin(cells, self._timed, ready=self._ready))

    def announce(self, cells: Sequence[Cell]) -> None:
        """Writes every cell to the output folder as not run, so that none is missing if the session is interrupted.

        The cells of an earlier run keep their verdicts until they have new ones, unless their backend has other code.
        """
        self.results.environment |= versions_of(
            list(dict.fromkeys(phase.backend for cell in cells for phase in cell.phases))
        )
        to_run = set(map(str, cells))
        failed = self.config.earlier.failed if self.config.earlier else ()
        for cell in dict.fromkeys((*cells, *self.results.outdated)):
            if str(cell) not in self.results.earlier:
                reason = NOT_STARTED if str(cell) in to_run else OTHER_CODE
                reason = FAILED_BEFORE if str(cell) in failed else reason
                announced = JudgedCell(cell=cell, verdict=Verdict(state="not_run", reason=reason))
                self.results.store(announced, expected=expected_of_none(cell))
        self.results.write_summary(finished=False)

    def run(self, cell: Cell) -> JudgedCell:
        """Runs one cell, phase after phase, judges it, and writes its verdict. Waits for a cell that was started."""
        judged = self._begun.pop(cell).result() if cell in self._begun else self._timed(cell)
        self.check()
        self.results.store(judged)
        return judged

    def _timed(self, cell: Cell) -> JudgedCell:
        began = time.monotonic()
        with self._asking:
            if not self._at_once.is_parallel and any(one is cell for one in self._activities.waiting):
                import_ahead(self._pool, self._activities.waiting, self.config.device)
            self._activities.begin(cell)
        judged = self.judged(cell)
        self._activities.end()
        return replace(judged, seconds=time.monotonic() - began)

    def judged(self, cell: Cell) -> JudgedCell:
        """Runs and judges one cell without writing a verdict; its records are in its folder."""
        if refused := self.refusal(cell):
            return JudgedCell(cell=cell, verdict=refused)
        return self._runner.judged(cell, self._request(cell))

    def activity(self) -> Activity | None:
        """Returns the current activity, for another thread to show it; None between cells."""
        return self._activities.now(lambda: self._pool.phase())  # the pool does not exist before the first cell

    def trace(self, cell: Cell, step: int) -> Path:
        """See conformance.runner.attempt.CellRunner."""
        return self._runner.trace(cell, self._request(cell), step)

    def compare_traced(self, cell: Cell, step: int) -> tuple[Bisected, ...]:
        """See conformance.runner.attempt.CellRunner."""
        return self._runner.compare_traced(cell, self._request(cell), step)

    def _request(self, cell: Cell) -> FrozenInputs:
        """Prepares the inputs of a cell, and requests its oracles."""
        with self._asking:
            inputs = prepare_inputs(cell.scenario, self.config.out)
            self._oracles.request(cell, inputs, *self._expectations.of(cell).defects)
        return inputs

    def refused_unread(self, cell: Cell) -> Verdict | None:
        """Returns ``refusal``, without reading data: only models are checked."""
        with self._asking:
            if (key := (cell.scenario.name, cell.scenario.model)) not in self._checked:
                self._checked[key], _ = checked_model(cell.scenario, self.config.out)
            return self._unwritten(cell) or self._refusals.refusal(cell, self._checked[key])

    def refusal(self, cell: Cell, *, plans: bool = False) -> Verdict | None:
        """Returns the verdict of a cell that cannot run; None if it can.

        ``plans``: the cell is not run, so a model may be a configuration without weights and tokenizer. Raises
        UsageError for a model, data set or objective that cannot be used, because no backend could run it.
        """
        if refused := self._unwritten(cell):
            return refused
        with self._asking:
            if plans and is_without_weights(model := resolve(cell.scenario.model)):
                check_model_folder(model)
                check_trained(cell.scenario, decoder_of(cell.scenario, model))
                return self._refusals.refusal(cell, model)
            inputs = prepare_inputs(cell.scenario, self.config.out, draws=False)
            return self._refusals.refusal(cell, next(iter(inputs.models.values())))

    @staticmethod
    def _unwritten(cell: Cell) -> Verdict | None:
        """Returns the verdict of a cell whose options the oracle lacks for its model; None for another one."""
        if is_sketched(cell.scenario) and any(phase.save == "merge" for phase in cell.phases):
            raise UsageError(
                f"{cell} merges an adapter, which is judged by whole matrices, but its records keep only sketches; "
                f"give --sketch a number that no matrix exceeds, or select other cells"
            )
        if (cell.scenario.lora or cell.scenario.balances_routers) and not is_written(resolve(cell.scenario.model)):
            option = "adapters" if cell.scenario.lora else "a z-loss or updates of biases of routers"
            return Verdict(state="unsupported", reason=f"{option} {ONLY_WRITTEN}")
        functions_of(cell.scenario.objective)
        return None

    def conventions(self, cell: Cell) -> Conventions:
        """Returns the conventions that the cell's backends declare and that could change it."""
        return self._expectations.of(cell).conventions

    def reference(self, cell: Cell) -> Path:
        """Returns the oracle's float64 record, which lies outside of the output folder until the session ends."""
        return self._oracles.folder(cell) / FLOAT64

    def folder(self, cell: Cell) -> Path:
        """Returns the folder of a cell, with its verdict and its records."""
        return self.config.folder(cell)
