"""Planted: the mutation score of a run with planted faults (``--faults``): which were caught, where, and first at what.

Serves claim 8. A planted fault is caught if its cell differs and its control, the same cell without the fault,
conforms: what differs without the fault as well was not shown to be seen. Where nothing differs, the fault changes
nothing in this cell, or the suite did not see it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from conformance.record.states import State
from reports.load import Cell, Report
from reports.words import first_finding

PREFIX = "fault-"
AGREES = ("conforms", "partly_observed")
NOT_PLANTED = ("unsupported", "not_run")


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One fault, or several planted together, in cells of one backend. controls: states of cells without a fault."""

    fault: str
    backend: str
    cells: tuple[Cell, ...]
    controls: Mapping[str, State]

    @property
    def caught(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.state == "differs" and self._control(cell) in AGREES)

    @property
    def unproven(self) -> tuple[Cell, ...]:
        """Cells that differ, and whose control does not conform, or gave no answer."""
        return tuple(cell for cell in self.cells if cell.state == "differs" and self._control(cell) not in AGREES)

    @property
    def silent(self) -> tuple[Cell, ...]:
        """Cells in which it was planted and called, and nothing differs."""
        return tuple(cell for cell in self.cells if cell.state != "differs" and _was_compared(cell))

    @property
    def unanswered(self) -> tuple[Cell, ...]:
        """Cells in which it could not be planted, was never called, or that gave no answer."""
        return tuple(cell for cell in self.cells if cell.state != "differs" and not _was_compared(cell))

    def _control(self, cell: Cell) -> State | None:
        return self.controls.get("/".join(part for part in cell.id.split("/") if not part.startswith(PREFIX)))

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages at which it was found first."""
        return tuple(dict.fromkeys(found.stage for cell in self.caught if (found := first_finding(cell))))


def _was_compared(cell: Cell) -> bool:
    """Whether it was held against the oracle; then nothing was found in it (conformance.judge.expected)."""
    return bool(cell.entry.verdict.quantities)


@dataclass(frozen=True, kw_only=True)
class MutationScore:
    """``rows``: by fault and backend, those that were not caught first."""

    rows: tuple[Planted, ...]

    @property
    def told(self) -> tuple[Planted, ...]:
        """Those that were planted in at least one cell, whether it gave an answer or not."""
        return tuple(row for row in self.rows if any(cell.state not in NOT_PLANTED for cell in row.cells))

    @property
    def caught(self) -> tuple[Planted, ...]:
        return tuple(row for row in self.told if row.caught)


def mutation_score(report: Report) -> MutationScore | None:
    """None for a run without planted faults."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in report.cells:
        parts = cell.entry.variant.split("/")
        faults = [part.removeprefix(PREFIX) for part in parts if part.startswith(PREFIX)]
        if faults:
            groups.setdefault((" + ".join(faults), cell.entry.backend), []).append(cell)
    controls = {cell.id: cell.state for cell in report.cells}
    rows = [
        Planted(fault=fault, backend=backend, cells=tuple(cells), controls=controls)
        for (fault, backend), cells in groups.items()
    ]
    rows.sort(key=lambda row: (bool(row.caught), not (row.silent or row.unproven), row.fault, row.backend))
    return MutationScore(rows=tuple(rows)) if rows else None
