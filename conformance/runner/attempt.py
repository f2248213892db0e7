"""Runs a cell in a worker group, judges it and writes its result; repeats it in fresh workers where it differs.

Earlier cells may have left state in the process of a worker. So a cell that differs or fails in such workers runs once
more in fresh ones, and its verdict combines both attempts.

The output folder (docs/reference/file-formats.md) has ``summary.json``, ``cells/SLUG/{verdict.json,legs/}``,
``oracle/`` and ``inputs/``. The summary is written before the first cell, repeatedly between cells, and at the end, so
that an interrupted session shows the cells that did not run.
"""

import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from conformance.core.host import resolve
from conformance.core.process import seconds_of_tree
from conformance.core.timeline import seconds_by_phase, timeline
from conformance.data.inputs import FrozenInputs
from conformance.judge.cells import Judges, combine
from conformance.judge.expected_differences import explained, judge_cell
from conformance.matrix.cell import Cell
from conformance.models.synthetic import is_large
from conformance.oracle.role_model import is_routed
from conformance.records.record_format import peak_memory
from conformance.results.bisection import BISECTION, Bisected
from conformance.results.run_results import (
    Attempt,
    CellSummary,
    Entry,
    OracleVariant,
    Run,
    cell_summary,
    write_entry,
    write_summary,
)
from conformance.results.verdict import Verdict
from conformance.runner.earlier_run import before
from conformance.runner.oracle_jobs import Defects, Oracles
from conformance.runner.phases import TraceFailed, find_in_traced, run_phases, run_traced
from conformance.runner.placement import Activities, SessionConfig, Where
from conformance.runner.preflight import Refusals
from conformance.spec.conventions import Conventions, of_oracle
from conformance.spec.known_defects import Known, bugs, defects_of, means_of_means
from conformance.spec.objectives import all_observables
from conformance.spec.observables import Observable
from conformance.spec.precision import FLOAT64

TRACED = "traced"  # in a cell's folder, while it is bisected


@dataclass(frozen=True, kw_only=True)
class JudgedCell:
    """Holds a cell with its verdict. For the other fields see conformance.results.run_results.Entry.

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
    """Holds the observables in which records of a cell are compared, and the differences that its backend declares.

    unnamed: what to add to the profile, for those that it does not name.
    conventions: those that the backend declares and that could change the cell. undeclared: the other known ones.
    """

    observables: tuple[Observable, ...]
    known: tuple[Known, ...]
    unnamed: str
    conventions: Conventions
    undeclared: Conventions

    @property
    def defects(self) -> tuple[Defects, ...]:
        """Returns the defects of each oracle that the cell is compared with, whatever its numbers are."""
        declared, known = self.conventions, defects_of(self.known)
        own = [declared, *(tuple(one for one in declared if one != left_out) for left_out in declared)]
        return tuple(dict.fromkeys((*of_oracle(some), *more) for some in own for more in dict.fromkeys(((), known))))


class Expectations:
    """Makes and caches the expectation of each cell."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._of_cells: dict[Cell, Expectation] = {}

    def of(self, cell: Cell) -> Expectation:
        if cell not in self._of_cells:
            self._of_cells[cell] = replace(
                expected_of_none(cell),
                known=self._refusals.known(cell),
                unnamed=self._refusals.unnamed(cell),
                conventions=self._refusals.conventions(cell),
                undeclared=self._refusals.undeclared(cell),
            )
        return self._of_cells[cell]


def expected_of_none(cell: Cell) -> Expectation:
    """Returns the expectation of a cell whose backends declare nothing. Asks no backend, which takes milliseconds."""
    scenario, scaled = cell.scenario, cell.scenario.judged_loss_scale is not None
    observables = all_observables(scenario.objective, scaled=scaled, routed=is_routed(resolve(scenario.model)))
    return Expectation(observables=observables, known=(), unnamed="", conventions=(), undeclared=())


class CellRunner:
    """Runs and judges cells that can be run and whose oracles were requested. Writes records, but no verdicts."""

    def __init__(
        self,
        config: SessionConfig,
        *,
        where: Where,
        oracles: Oracles,
        expectations: Expectations,
        activities: Activities,
        judges: Judges | None = None,
    ) -> None:
        """judges: None: cells are judged in this process."""
        self._config, self._where, self._judges = config, where, judges
        self._oracles, self._expectations, self._activities = oracles, expectations, activities
        self._controlled: set[tuple[str | None, ...]] = set()

    def judged(self, cell: Cell, inputs: FrozenInputs) -> JudgedCell:
        """Runs and judges a cell, again in fresh workers if earlier cells may have affected the first attempt."""
        folder = self._config.folder(cell)
        for left in ("legs", "fresh"):  # by an earlier run
            shutil.rmtree(folder / left, ignore_errors=True)
        (folder / BISECTION).unlink(missing_ok=True)
        own, repeat = self._attempt(cell, inputs, fresh=False)
        if not repeat:
            return JudgedCell(cell=cell, verdict=own.verdict, completed=own.completed, records=own.records)
        used, shared = own, self._where.is_packed or self._where.is_leased
        fresh, _ = self._attempt(cell, inputs, fresh=True, alone=repeat == "alone")
        own, other, verdict = combine(used, fresh, leased=shared)
        judged = JudgedCell(cell=cell, verdict=verdict, completed=own.completed, records=own.records)
        return replace(judged, other=other, failed_before=shared and not used.completed)

    def _attempt(
        self, cell: Cell, inputs: FrozenInputs, *, fresh: bool, alone: bool = False
    ) -> tuple[Attempt, Literal["", "beside others", "alone"]]:
        """Runs the phases and judges them. Also returns how the cell should run again in fresh workers; "": not at all.

        A cell with a planted fault is expected to differ, and a cell that hung has used up its budget; neither runs
        again. On leased slots every failed cell runs again, because drivers and links sometimes fail; beside other
        cells each one whose ranks did not raise, because memory may have been scarce: alone, which ends all idle
        worker groups. One whose ranks raised, or lost the daemon of MPS, does not need that. alone: while no other
        cell runs.
        """
        folder = self._config.folder(cell)
        records = folder / ("fresh" if fresh else "legs")
        # A large oracle has to release its memory first; and a cell that waits for two whole GPUs reserves an idle one.
        if is_large(cell.scenario) or (self._where.queues_oracles and not self._where.is_packed):
            self._activities.phase("waiting for the oracle")
            if missing := self._missing_oracle(cell):
                return Attempt(fresh=fresh, verdict=_failed(missing), completed=False), ""
        self._activities.phase("waiting for the oracle's choices of experts")
        inputs = self._oracles.replayed(cell, inputs)
        self._activities.phase("running fresh ranks" if fresh else "running ranks")
        ended = run_phases(
            self._where.pool,
            cell,
            inputs,
            records,
            device=self._config.device,
            budget_s=self._config.budget_s,
            fresh=fresh,
            alone=alone,
            aside=self._oracles.withheld / "cells" / cell.slug,
            hidden=folder / "legs" if fresh else None,
            controlled=self._is_controlled(cell),
        )
        paths = [records / str(number) / "record" for number in range(len(cell.phases))]
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
        is_crowded = self._where.is_packed and ended.kind in ("killed", "exited", "out of memory")
        used = ended.used or (failed and (self._where.is_leased or is_crowded))
        if ended.kind == "MPS":
            return attempt, "beside others"
        if not used or cell.faults or not (failed or verdict.state == "differs"):
            return attempt, ""
        is_alone = self._where.is_packed and ended.failure and ended.kind != "raised"
        return attempt, "alone" if is_alone else "beside others"

    def _is_controlled(self, cell: Cell) -> bool:
        """Whether the phases of a cell load once more as a control: in the first cell of its backends and handovers."""
        kind = (cell.backend, *(phase.save for phase in cell.phases))
        is_first = kind not in self._controlled
        self._controlled.add(kind)
        return is_first and not is_large(cell.scenario)

    def _missing_oracle(self, cell: Cell) -> str:
        """Waits for the oracle's runs; returns why some of them failed, or ""."""
        return self._oracles.wait(cell, *self._expectations.of(cell).defects)

    def _judge(self, cell: Cell, records: Sequence[Path], inputs: FrozenInputs) -> Verdict:
        """Judges the records. If they differ with the noise of one run, or cannot be judged because rounding decided
        otherwise in it (conformance.judge.clips), makes the further noise runs and judges again."""
        expected = self._expectations.of(cell)

        def oracle_with(defects: Defects) -> Path | None:
            self._oracles.request(cell, inputs, defects)
            return None if self._oracles.wait(cell, defects) else self._oracles.folder(cell, defects)

        options: Any = {
            "conventions": expected.conventions,
            "oracles": oracle_with,
            "observables": expected.observables,
        }
        verdict = self._judged_by_oracles(cell, records, **options)
        # Also for cells with planted faults: the bounds of all other cells have to find the faults.
        if verdict.state in ("differs", "infrastructure") and self._oracles.more_noise(cell, inputs, expected.defects):
            verdict = self._judged_by_oracles(cell, records, **options)
        if verdict.state == "differs" and expected.unnamed:
            return replace(verdict, reason=f"{verdict.reason}; {expected.unnamed}")
        if verdict.state != "differs" or expected.known or cell.faults or cell.scenario.tier.is_half:
            return verdict
        layout = cell.phases[0].layout
        tried = () if is_large(cell.scenario) else bugs(cell.scenario, layout)  # each needs a run of the oracle
        options |= {"candidates": expected.undeclared, "means": means_of_means(cell.scenario, layout), "bugs": tried}
        return explained(verdict, str(cell), records, **options)

    def _judged_by_oracles(self, cell: Cell, records: Sequence[Path], **options: Any) -> Verdict:
        """Judges the records, in a process beside this one if there are judges."""
        expected = self._expectations.of(cell)
        if self._judges is not None:
            oracles = {defects: self._oracles.folder(cell, defects) for defects in ((), *expected.defects)}
            given = {**options, "oracles": oracles, "known": expected.known, "slug": cell.slug}
            if (verdict := self._judges.judge(str(cell), records, **given)) is not None:
                return verdict
        return judge_cell(str(cell), records, known=expected.known, **options)

    def trace(self, cell: Cell, inputs: FrozenInputs, step: int) -> Path:
        """Runs a cell of one phase again up to ``step``, captures its activations, and returns their folder.

        Raises TraceFailed. See conformance.runner.phases.run_traced.
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
        """Compares the captured activations of a cell with the oracle. Raises TraceFailed."""
        inputs = self._oracles.replayed(cell, inputs)
        if missing := self._missing_oracle(cell):
            raise TraceFailed(missing)
        declared = of_oracle(self._expectations.of(cell).conventions)
        oracle, traced = self._oracles.folder(cell, declared) / FLOAT64, self._config.folder(cell) / TRACED
        return find_in_traced(self._where.pool, cell, inputs, traced, oracle, step=step, budget_s=self._config.budget_s)


def _failed(reason: str) -> Verdict:
    return Verdict(state="infrastructure", reason=reason)


class ResultWriter:
    """Writes entries and summaries.

    The cells of an earlier run keep their verdicts until they have new ones, unless their backend has other code.
    """

    def __init__(
        self,
        config: SessionConfig,
        *,
        environment: Mapping[str, Any],
        mps: Callable[[], Mapping[str, str]],
        leased: Callable[[], Mapping[str, float]],
        gpu_active: Callable[[], Mapping[str, float]],
        oracles: Oracles,
        expectations: Expectations,
    ) -> None:
        """leased, gpu_active: see conformance.results.run_results.Run. mps: see Where."""
        self._config, self._oracles, self._expectations = config, oracles, expectations
        self._leased, self._gpu_active, self._mps = leased, gpu_active, mps
        self.inputs: Mapping[str, str] = config.inputs
        self.environment = {**(config.earlier.run.environment if config.earlier else {}), **environment}
        earlier = config.earlier.entries if config.earlier else ()
        self.outdated: Sequence[Cell] = config.earlier.outdated if config.earlier else ()
        outdated = {str(cell) for cell in self.outdated}
        self.earlier: Mapping[str, Entry] = {entry.cell: entry for entry in earlier if entry.cell not in outdated}
        self._summaries: dict[str, CellSummary] = {entry.cell: cell_summary(entry) for entry in earlier}
        self._started, self._clock = datetime.now(UTC), time.monotonic()
        self._summary_due = 0.0

    def store(self, judged: JudgedCell, *, expected: Expectation | None = None) -> None:
        """Writes the entry of a cell, with its verdict. expected: None: asks the cell's backends."""
        cell = judged.cell
        expected = expected or self._expectations.of(cell)
        folder = self._config.folder(cell)
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
            oracle=os.path.relpath(self._oracles.published(cell), folder) if judged.records else None,
            expected=expected.known,
            conventions=expected.conventions,
            variants=self._variants(cell, folder) if judged.records else (),
            reproduce=shlex.join(["parity", "run", *self._config.arguments, "--cells", str(cell)]),
            observables=expected.observables,
            verdict=judged.verdict,
            other=judged.other,
            memory=memory,
            host_memory=host_memory,
            before=(*before(self.earlier.get(str(cell))), *(("infrastructure",) if judged.failed_before else ())),
        )
        self._summaries[str(cell)] = cell_summary(entry)
        write_entry(self._config.out, entry)

    def _variants(self, cell: Cell, folder: Path) -> tuple[OracleVariant, ...]:
        """Returns the oracles that the cell was compared with, other than the correct one."""
        return tuple(
            OracleVariant(defects=defects, folder=os.path.relpath(path, folder))
            for defects, path in self._oracles.variants(cell).items()
        )

    def write_summary_if_due(self) -> None:
        """Writes the summary, but spends at most a twentieth of the time on it: its length grows with the cells."""
        began = time.monotonic()
        if began >= self._summary_due:
            self.write_summary(finished=False)
            now = time.monotonic()
            self._summary_due = now + 20 * (now - began)

    def write_summary(self, *, finished: bool) -> None:
        """Writes ``summary.json`` with the results so far."""
        config, earlier = self._config, self._config.earlier
        run = Run(
            started=earlier.run.started if earlier else self._started.isoformat(timespec="seconds"),
            finished=datetime.now(UTC).isoformat(timespec="seconds") if finished else None,
            seconds=round(time.monotonic() - self._clock + (earlier.run.seconds if earlier else 0), 2),
            profile=config.profile,
            device=config.device,
            command=config.command or shlex.join(["parity", "run", *config.arguments]),
            environment={**self.environment, **self._mps()},
            leased=self._leased(),
            phases=seconds_by_phase(timeline.spans),
            cpu_seconds=round(seconds_of_tree(os.getpid()), 2),
            gpu_active=self._gpu_active(),
            repeated=(*(earlier.run.repeated if earlier else ()), *self._oracles.repeated),
            floor=config.floor,
            selected=config.selected,
            selection=config.selection,
            inputs=self.inputs,
        )
        write_summary(config.out, run, list(self._summaries.values()))
