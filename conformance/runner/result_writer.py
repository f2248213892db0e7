"""Writes the results of a session: an entry with the verdict of each cell, and the summary of the run.

The output folder (docs/reference/file-formats.md) has ``summary.json``, ``cells/SLUG/{verdict.json,legs/}``,
``oracle/`` and ``inputs/``. The summary is written before the first cell, repeatedly between cells, and at the end, so
that an interrupted session shows the cells that did not run.
"""

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from conformance.core.process import seconds_of_tree
from conformance.core.timeline import seconds_by_phase, timeline
from conformance.matrix.cell import Cell
from conformance.records.record_format import peak_memory
from conformance.results.run_results import (
    CellSummary,
    Entry,
    OracleVariant,
    Run,
    cell_summary,
    write_entry,
    write_summary,
)
from conformance.runner.attempt import Expectation, Expectations, JudgedCell
from conformance.runner.earlier_run import before
from conformance.runner.oracle_jobs import Oracles
from conformance.runner.placement import SessionConfig


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
