"""Handover: tables of cells that save in one layout or backend and continue in another one (claim 5).

The cells of one table differ only in where they saved (the row) and where they loaded (the column). Cells that are in
no such table are only in the matrix of all cells.

Planted: the mutation score of a run with planted faults (``--faults``): which were caught, where, and first at what.

Serves claim 8. A planted fault is caught if its cell differs and its control, the same cell without the fault,
conforms: what differs without the fault as well was not shown to be seen. Where nothing differs, the fault changes
nothing in this cell, or the suite did not see it.

Grid: the tables that the page shows for one group of the comparison of backends.

A group of at most MATRIX members has a square for every pair. A larger group has instead one line for every two
backends, with their furthest pair; all pairs are in ``side_by_side.json``.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

from conformance.results.requirements import TO
from conformance.results.verdict import Quantity, State
from reports.load import Cell, Report
from reports.side_by_side import PAIRS, Group, Pair
from reports.wording import first_finding

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
    """Whether it was held against the oracle; then nothing was found in it (conformance.judge.expected_differences)."""
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


MATRIX = 12


def group_data(group: Group, report: Report) -> dict[str, Any]:
    """The tables of one group as JSON values, and the numbers of the cells whose curves are drawn."""
    small = len(group.members) <= MATRIX
    members = {member.cell for member in group.members}
    numbers = {cell.id: number for number, cell in enumerate(report.cells) if cell.id in members}
    return {
        "name": group.name,
        "columns": group.columns,
        "members": [
            {
                "number": numbers.get(member.cell),
                "backend": member.backend,
                "layout": member.layout,
                "state": member.state,
                "worst": [_difference(member.worst.get(column)) for column in group.columns],
            }
            for member in group.members
        ],
        "squares": [_square(group, pair) for pair in group.pairs] if small else None,
        "between": [] if small else _between(group),
        "outside": [[_names(group, pair), _difference(pair.furthest)] for pair in group.outside[:PAIRS]],
        "more": len(group.outside[PAIRS:]),
        "drawn": [number for number in numbers.values() if report.cells[number].legs],
    }


def furthest(group: Group) -> Quantity | None:
    """The difference with the highest ratio of observed to allowed, over all pairs and columns."""
    return max(filter(None, map(group.worst_over_pairs, group.columns)), key=lambda q: q.ratio, default=None)


def _square(group: Group, pair: Pair) -> list[Any]:
    """The two members and their difference in each column; None instead if they were not compared in all columns."""
    compared = not any(group.members[number].problem for number in (pair.a, pair.b))
    columns = [_difference(pair.worst.get(column)) for column in group.columns]
    return [pair.a, pair.b, columns if compared and pair.worst else None]


def _between(group: Group) -> list[list[Any]]:
    """One line for every two backends, and for the layouts of each backend, with the pair that is furthest apart."""
    lines: list[list[Any]] = []
    for one, other in combinations_with_replacement(group.backends, 2):
        pairs = [
            (apart.ratio, pair)
            for pair in group.pairs
            if {group.members[pair.a].backend, group.members[pair.b].backend} == {one, other}
            and (apart := pair.furthest)
        ]
        if pairs:
            worst = max(pairs, key=lambda found: found[0])[1]
            between = f"layouts of {one}" if one == other else f"{one} and {other}"
            lines.append([between, len(pairs), _names(group, worst), _difference(worst.furthest)])
    return lines


def _names(group: Group, pair: Pair) -> str:
    return f"{group.members[pair.a]} and {group.members[pair.b]}"


def _difference(quantity: Quantity | None) -> dict[str, Any] | None:
    """The fields of a quantity as JSON values; ``stage`` is the name of the column."""
    if quantity is None:
        return None
    fields = ("stage", "tensor", "step", "observed", "allowed")
    return {field: getattr(quantity, field) for field in fields}
