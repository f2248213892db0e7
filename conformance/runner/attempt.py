"""Runs a cell in a worker group and judges it, and runs it again in fresh workers where earlier cells may be the cause.

A worker that has run other cells may hold what they left in the process. So a cell that differs or fails in such
workers is run once more in fresh ones, and its verdict combines both attempts.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.core.paths import resolve
from conformance.data.prepare import FrozenInputs
from conformance.judge.expected_differences import judge_cell
from conformance.judge.rejudge import combine
from conformance.matrix.cell import Cell
from conformance.models.synthetic import is_large
from conformance.oracle.role_model import is_routed
from conformance.records.header_checks import FLOAT64
from conformance.results.bisection import BISECTION, Bisected
from conformance.results.run_results import Attempt
from conformance.results.verdict import Verdict
from conformance.runner.oracle_jobs import Oracles
from conformance.runner.phases import TraceFailed, find_in_traced, run_legs, run_traced
from conformance.runner.placement import Where
from conformance.runner.preflight import Refusals
from conformance.runner.scheduler import Activities
from conformance.runner.session_config import SessionConfig
from conformance.spec.known_defects import Defect, Known, defects_of
from conformance.spec.objectives import all_observables
from conformance.spec.observables import Observable

TRACED = "traced"  # in a cell's folder, while it is bisected


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


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What the records of a cell are compared in, and the differences that its backend declares.

    defects: those of the known differences that the oracle can have.
    """

    observables: tuple[Observable, ...]
    known: tuple[Known, ...]

    @property
    def defects(self) -> tuple[Defect, ...]:
        return defects_of(self.known)


class Expectations:
    """Makes the expectation of each cell once."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._of_cells: dict[Cell, Expectation] = {}

    def of(self, cell: Cell) -> Expectation:
        if cell not in self._of_cells:
            scenario, scaled = cell.scenario, cell.scenario.judged_loss_scale is not None
            routed = is_routed(resolve(scenario.model))
            self._of_cells[cell] = Expectation(
                observables=all_observables(scenario.objective, scaled=scaled, routed=routed),
                known=self._refusals.known(cell),
            )
        return self._of_cells[cell]


class CellRunner:
    """Runs and judges cells that can be run and whose oracles were requested. It writes records, but no verdicts."""

    def __init__(
        self,
        config: SessionConfig,
        *,
        where: Where,
        oracles: Oracles,
        expectations: Expectations,
        activities: Activities,
    ) -> None:
        self._config, self._where = config, where
        self._oracles, self._expectations, self._activities = oracles, expectations, activities

    def judged(self, cell: Cell, inputs: FrozenInputs) -> JudgedCell:
        """Run and judge a cell, again in fresh workers if the first attempt may be the effect of earlier cells."""
        folder = self._config.folder(cell)
        for left in ("legs", "fresh"):  # by an earlier run
            shutil.rmtree(folder / left, ignore_errors=True)
        (folder / BISECTION).unlink(missing_ok=True)
        own, repeat = self._attempt(cell, inputs, fresh=False)
        if not repeat:
            return JudgedCell(cell=cell, verdict=own.verdict, completed=own.completed, records=own.records)
        used, leased = own, self._where.is_leased
        fresh, _ = self._attempt(cell, inputs, fresh=True)
        own, other, verdict = combine(used, fresh, leased=leased)
        judged = JudgedCell(cell=cell, verdict=verdict, completed=own.completed, records=own.records)
        return replace(judged, other=other, failed_before=leased and not used.completed)

    def _attempt(self, cell: Cell, inputs: FrozenInputs, *, fresh: bool) -> tuple[Attempt, bool]:
        """Run the phases and judge them. Also returns whether the cell should be run again in fresh workers.

        A cell with a planted fault, which is expected to differ, and a cell that hung, which has used up its budget,
        are not run again. On leased slots every cell that fails is run again, because drivers and links fail at times.
        """
        folder = self._config.folder(cell)
        records = folder / ("fresh" if fresh else "legs")
        # A large oracle's memory has to be free again; and a cell that waits for two GPUs reserves the one that idles.
        if is_large(cell.scenario) or self._where.queues_oracles:
            self._activities.phase("waiting for the oracle")
            if missing := self._missing_oracle(cell):
                return Attempt(fresh=fresh, verdict=_failed(missing), completed=False), False
        self._activities.phase("waiting for the oracle's choices of experts")
        inputs = self._oracles.replayed(cell, inputs)
        self._activities.phase("starting fresh ranks" if fresh else "starting ranks")
        ended = run_legs(
            self._where.pool,
            cell,
            inputs,
            records,
            device=self._config.device,
            budget_s=self._config.budget_s,
            fresh=fresh,
        )
        paths = [records / str(number) / "record" for number in range(len(cell.legs))]
        failed = False
        self._activities.phase("waiting for the oracle")
        if missing := self._missing_oracle(cell):
            verdict = _failed(missing)
        elif ended.failure:
            verdict, failed = _failed(ended.failure), self._where.is_leased or ended.kind != "hung"
        else:
            self._activities.phase("judging")
            verdict = self._judge(cell, paths, inputs)
        if verdict.state in ("conforms", "partly_observed"):
            for path in paths:
                shutil.rmtree(path.with_name("saved"), ignore_errors=True)  # kept only for cells that differ
        written = tuple(str(path.relative_to(folder)) for path in paths if path.is_dir())
        attempt = Attempt(fresh=fresh, verdict=verdict, completed=not ended.failure, records=written)
        used = ended.used or (failed and self._where.is_leased)
        return attempt, used and not cell.faults and (failed or verdict.state == "differs")

    def _missing_oracle(self, cell: Cell) -> str:
        """Wait for the oracle's runs; returns why some of them failed, or ""."""
        return self._oracles.wait(cell, self._expectations.of(cell).defects)

    def _judge(self, cell: Cell, records: Sequence[Path], inputs: FrozenInputs) -> Verdict:
        """Judge the records; if they differ by the first noise run, make the further ones, and judge again."""
        expected = self._expectations.of(cell)

        def judged() -> Verdict:
            return judge_cell(
                str(cell),
                records,
                oracle=self._oracles.folder(cell),
                known=expected.known,
                defective=self._oracles.folder(cell, expected.defects) if expected.defects else None,
                observables=expected.observables,
            )

        verdict = judged()
        # Cells with planted faults too: they have to be found by the bounds that everybody is judged by.
        if verdict.state == "differs" and self._oracles.more_noise(cell, inputs, expected.defects):
            return judged()
        return verdict

    def trace(self, cell: Cell, inputs: FrozenInputs, step: int) -> Path:
        """Run a cell of one phase again up to ``step`` with its activations captured
        (conformance.runner.phases.run_traced).

        Returns the folder. Raises TraceFailed.
        """
        inputs, folder = self._oracles.replayed(cell, inputs), self._config.folder(cell) / TRACED
        run_traced(
            self._where.pool,
            cell,
            inputs,
            folder,
            step=step,
            device=self._config.device,
            budget_s=self._config.budget_s,
        )
        return folder

    def compare_traced(self, cell: Cell, inputs: FrozenInputs, step: int) -> tuple[Bisected, ...]:
        """Compare what ``trace`` has captured of a cell with the oracle. Raises TraceFailed."""
        inputs = self._oracles.replayed(cell, inputs)
        if missing := self._missing_oracle(cell):
            raise TraceFailed(missing)
        oracle, traced = self._oracles.folder(cell) / FLOAT64, self._config.folder(cell) / TRACED
        return find_in_traced(self._where.pool, cell, inputs, traced, oracle, step=step, budget_s=self._config.budget_s)


def _failed(reason: str) -> Verdict:
    return Verdict(state="infrastructure", reason=reason)
