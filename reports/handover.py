"""Handover: tables of cells that save in one layout or backend and continue in another one (claim 5).

The cells of one table differ only in where they saved (the row) and where they loaded (the column). Cells that are in
no such table are only in the matrix of all cells.
"""

from collections import defaultdict
from dataclasses import dataclass

from conformance.record.coverage import TO
from reports.load import Cell, Report

LEAST = 4  # fewest cells of a table; fewer cells are only in the matrix


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of handovers. ``rows``, ``columns``: the backends or layouts that saved, and that loaded. ``cells``: by
    (row, column); combinations that were not planned are missing."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: dict[tuple[str, str], Cell]

    @property
    def conform(self) -> int:
        return sum(cell.state == "conforms" for cell in self.cells.values())


def tables(report: Report) -> list[Table]:
    """The tables from backend to backend, and from layout to layout within each backend, for each program, scenario,
    model and precision. Tables of fewer than LEAST cells, or without a change of backend or layout, are left out."""
    groups: dict[str, dict[tuple[str, str], Cell]] = defaultdict(dict)
    for cell in report.cells:
        entry = cell.entry
        of = f"{entry.scenario}, {entry.model}, {entry.variant.replace('/', ', ')}"
        backends, layouts = _ends(entry.backend), _ends(entry.layout)
        if backends and layouts:
            groups[f"{of}: from backend to backend, {entry.layout.replace(TO, ' to ')}"][backends] = cell
            if backends[0] == backends[1]:
                groups[f"{of}: {backends[0]}, from layout to layout"][layouts] = cell
    found = [_table(title, cells) for title, cells in groups.items()]
    return [table for table in found if len(table.cells) >= LEAST and any(one != other for one, other in table.cells)]


def _ends(chain: str) -> tuple[str, str] | None:
    """The backend or layout that saved and the one that loaded; None for more than two legs."""
    parts = chain.split(TO)
    return (parts[0], parts[-1]) if len(parts) <= 2 else None


def _table(title: str, cells: dict[tuple[str, str], Cell]) -> Table:
    order = [*(ends[0] for ends in cells), *(ends[1] for ends in cells)]
    rows, columns = (tuple(sorted({ends[side] for ends in cells}, key=order.index)) for side in (0, 1))
    return Table(title=title, rows=rows, columns=columns, cells=cells)
