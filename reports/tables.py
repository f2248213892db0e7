"""Computes the tables of the reports: resumes, planted faults, and pairs of backends.

The cells of one table of resumes differ only in the layout or backend that saved (row) and that loaded (column).

A planted fault is caught if its cell differs and its control, the same cell without the fault, conforms. If the cell
does not differ, the fault changes nothing in it, or the suite missed the fault.

A group of at most MATRIX members has a square for every pair. A larger group has one line for every two backends, with
their furthest pair; ``side_by_side.json`` has all pairs.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

from conformance.results.requirements import TO
from conformance.results.side_by_side import Difference, Group, Pair
from conformance.results.verdict import State
from reports.load import Cell, Report
from reports.side_by_side import PAIRS, pair_name
from reports.wording import first_finding

LEAST = 4  # minimum number of cells of a table; fewer cells are only in the matrix


@dataclass(frozen=True, kw_only=True)
class Table:
    """Holds a table of resumes.

    rows, columns: the backends or layouts that saved, and that loaded. cells: by (row, column); unplanned combinations
    are missing.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: dict[tuple[str, str], Cell]

    @property
    def conform(self) -> int:
        return sum(cell.state == "conforms" for cell in self.cells.values())


def tables(report: Report) -> list[Table]:
    """Returns the tables from backend to backend, and from layout to layout within each backend, for each program,
    scenario, model and precision. Tables of fewer than LEAST cells, or without a change of backend or layout, are left
    out."""
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
    """Returns the backend or layout that saved and the one that loaded; None for more than two phases."""
    parts = chain.split(TO)
    return (parts[0], parts[-1]) if len(parts) <= 2 else None


def _table(title: str, cells: dict[tuple[str, str], Cell]) -> Table:
    order = [*(ends[0] for ends in cells), *(ends[1] for ends in cells)]
    rows, columns = (tuple(sorted({ends[side] for ends in cells}, key=order.index)) for side in (0, 1))
    return Table(title=title, rows=rows, columns=columns, cells=cells)


PREFIX = "fault-"
TOGETHER = " + "  # joins the names of faults that were planted in the same cells
AGREES = ("conforms", "partly_observed")
NOT_PLANTED = ("unsupported", "not_run")


@dataclass(frozen=True, kw_only=True)
class Planted:
    """Holds the cells of one backend with one fault, or with several faults planted together.

    controls: states of the run's cells by id.
    """

    fault: str
    backend: str
    cells: tuple[Cell, ...]
    controls: Mapping[str, State]

    @property
    def caught(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.state == "differs" and self._control(cell) in AGREES)

    @property
    def unproven(self) -> tuple[Cell, ...]:
        """Returns the cells that differ and whose control does not conform, or gave no answer."""
        return tuple(cell for cell in self.cells if cell.state == "differs" and self._control(cell) not in AGREES)

    @property
    def silent(self) -> tuple[Cell, ...]:
        """Returns the cells in which the fault was planted and called, but nothing differs."""
        return tuple(cell for cell in self.cells if cell.state != "differs" and _was_compared(cell))

    @property
    def unanswered(self) -> tuple[Cell, ...]:
        """Returns the cells in which the fault could not be planted or was never called, or that gave no answer."""
        return tuple(cell for cell in self.cells if cell.state != "differs" and not _was_compared(cell))

    def _control(self, cell: Cell) -> State | None:
        return self.controls.get("/".join(part for part in cell.id.split("/") if not part.startswith(PREFIX)))

    @property
    def stages(self) -> tuple[str, ...]:
        """Returns the stages at which the fault was found first."""
        return tuple(dict.fromkeys(found.stage for cell in self.caught if (found := first_finding(cell))))


def _was_compared(cell: Cell) -> bool:
    """Whether the cell was compared with the oracle (conformance.judge.expected_differences)."""
    return bool(cell.entry.verdict.quantities)


@dataclass(frozen=True, kw_only=True)
class MutationScore:
    """Holds the rows by fault and backend; those that were not caught come first."""

    rows: tuple[Planted, ...]

    @property
    def counted(self) -> tuple[Planted, ...]:
        """Returns the rows of one fault that was planted in at least one cell, whether it gave an answer or not.

        Faults that were planted together prove no single one.
        """
        planted = (row for row in self.rows if any(cell.state not in NOT_PLANTED for cell in row.cells))
        return tuple(row for row in planted if TOGETHER not in row.fault)

    @property
    def caught(self) -> tuple[Planted, ...]:
        return tuple(row for row in self.counted if row.caught)


def mutation_score(report: Report) -> MutationScore | None:
    """Computes the mutation score of a run with planted faults; None for other runs."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in report.cells:
        parts = cell.entry.variant.split("/")
        faults = [part.removeprefix(PREFIX) for part in parts if part.startswith(PREFIX)]
        if faults:
            groups.setdefault((TOGETHER.join(faults), cell.entry.backend), []).append(cell)
    controls = {cell.id: cell.state for cell in report.cells}
    rows = [
        Planted(fault=fault, backend=backend, cells=tuple(cells), controls=controls)
        for (fault, backend), cells in groups.items()
    ]
    rows.sort(key=lambda row: (bool(row.caught), not (row.silent or row.unproven), row.fault, row.backend))
    return MutationScore(rows=tuple(rows)) if rows else None


MATRIX = 12


def group_data(group: Group, report: Report) -> dict[str, Any]:
    """Returns the tables of one group as JSON values, and the numbers of the cells whose curves are drawn."""
    small = len(group.members) <= MATRIX
    members = {member.cell for member in group.members}
    numbers = {cell.id: number for number, cell in enumerate(report.cells) if cell.id in members}
    return {
        "name": group.group,
        "columns": group.columns,
        "members": [
            {
                "number": numbers.get(member.cell),
                "backend": member.backend,
                "layout": member.layout,
                "state": member.state,
                "worst": [_difference(member.oracle.get(column)) for column in group.columns],
            }
            for member in group.members
        ],
        "squares": [_square(group, pair) for pair in group.pairs] if small else None,
        "between": [] if small else _between(group),
        "outside": [[pair_name(group, pair), _difference(pair.furthest)] for pair in group.outside[:PAIRS]],
        "more": len(group.outside[PAIRS:]),
        "drawn": [number for number in numbers.values() if report.cells[number].phases],
    }


def furthest(group: Group) -> Difference | None:
    """Returns the difference with the highest ratio, over all pairs and columns."""
    return max(filter(None, map(group.worst_over_pairs, group.columns)), key=lambda one: one.ratio, default=None)


def _square(group: Group, pair: Pair) -> list[Any]:
    """Returns two members and their differences by column; None instead if they were not compared in all columns."""
    compared = not any(group.members[number].problem for number in pair.members)
    columns = [_difference(pair.columns.get(column)) for column in group.columns]
    return [*pair.members, columns if compared and pair.columns else None]


def _between(group: Group) -> list[list[Any]]:
    """Returns one line for every two backends, and for the layouts of each backend, with the pair that is furthest
    furthest_difference."""
    lines: list[list[Any]] = []
    for one, other in combinations_with_replacement(group.backends, 2):
        pairs = [
            (furthest_difference.ratio, pair)
            for pair in group.pairs
            if {group.members[number].backend for number in pair.members} == {one, other}
            and (furthest_difference := pair.furthest)
        ]
        if pairs:
            worst = max(pairs, key=lambda found: found[0])[1]
            between = f"layouts of {one}" if one == other else f"{one} and {other}"
            lines.append([between, len(pairs), pair_name(group, worst), _difference(worst.furthest)])
    return lines


def _difference(worst: Difference | None) -> dict[str, Any] | None:
    """Returns the fields of a difference as JSON values; ``stage`` is the name of the column."""
    if worst is None:
        return None
    names = {"stage": "column", "tensor": "tensor", "step": "step", "observed": "observed", "allowed": "allowed"}
    return {name: getattr(worst, field) for name, field in names.items()}
