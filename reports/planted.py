"""Planted: the mutation score of a run with planted faults (``--faults``): which were caught, where, and first at what.

Serves claim 8. A planted fault is caught if its cell differs. One that conforms was missed: the suite did not see it.
"""

from dataclasses import dataclass

from reports.load import Cell, Report
from reports.words import first_finding

PREFIX = "fault-"
MISSED = ("conforms", "partly_observed", "expected_difference")
NOT_PLANTED = ("unsupported", "not_run")


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One fault, or several planted together, in cells of one backend."""

    fault: str
    backend: str
    cells: tuple[Cell, ...]

    @property
    def caught(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.state == "differs")

    @property
    def missed(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.state in MISSED)

    @property
    def unanswered(self) -> tuple[Cell, ...]:
        """Cells in which it could not be planted, or that gave no answer."""
        return tuple(cell for cell in self.cells if cell.state != "differs" and cell.state not in MISSED)

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages at which it was found first."""
        return tuple(dict.fromkeys(found.stage for cell in self.caught if (found := first_finding(cell))))


@dataclass(frozen=True, kw_only=True)
class MutationScore:
    """``rows``: by fault and backend, those that were missed first."""

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
    rows = [Planted(fault=fault, backend=backend, cells=tuple(cells)) for (fault, backend), cells in groups.items()]
    rows.sort(key=lambda row: (bool(row.caught), not row.missed, row.fault, row.backend))
    return MutationScore(rows=tuple(rows)) if rows else None
