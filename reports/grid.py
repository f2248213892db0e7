"""Grid: the tables that the page shows for one group of the comparison of backends.

A group of at most MATRIX members has a square for every pair. A larger group has instead one line for every two
backends, with their furthest pair; all pairs are in ``side_by_side.json``.
"""

from itertools import combinations_with_replacement
from typing import Any

from conformance.record.verdict import Quantity
from reports.load import Report
from reports.side_by_side import PAIRS, Group, Pair

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
