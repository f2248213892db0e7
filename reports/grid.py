"""Grid: what the page shows of one group of backends side by side.

Up to MATRIX members, every pair has a square. Of more, nobody reads the squares: then each two backends have a line
with their furthest pair, and all pairs are in ``side_by_side.json``.
"""

from collections.abc import Mapping
from itertools import combinations_with_replacement
from typing import Any

from markupsafe import Markup

from reports import curves
from reports.heatmap import shade
from reports.load import Cell
from reports.side_by_side import COLUMNS, PAIRS, WORDS, Group, Pair
from reports.words import number, place, ratio

MATRIX = 12


def side(group: Group, cells: Mapping[str, Cell]) -> dict[str, Any]:
    """Everything that the section of one group shows."""
    small = len(group.members) <= MATRIX
    drawn = [cell for member in group.members if (cell := cells.get(member.cell)) and cell.run]
    return {
        "group": group,
        "words": WORDS[group.state],
        "columns": COLUMNS,
        "matrix": small,
        "rows": _rows(group, small),
        "between": [] if small else _between(group),
        "outside": [(_names(group, pair), pair.furthest) for pair in group.outside[:PAIRS]],
        "furthest": max(filter(None, map(group.apart, COLUMNS)), key=lambda q: q.ratio, default=None),
        "kinds": _legend(drawn),
        "charts": curves.charts(drawn),
    }


def _rows(group: Group, small: bool) -> list[dict[str, Any]]:
    table = {}
    for pair in group.pairs if small else ():
        table[pair.a, pair.b] = table[pair.b, pair.a] = _square(group, pair)
    numbers = range(len(group.members))
    return [
        {
            "number": row + 1,
            "member": member,
            "worst": [member.worst.get(column) for column in COLUMNS],
            "squares": [table.get((row, other)) for other in numbers] if small else [],
        }
        for row, member in enumerate(group.members)
    ]


def _square(group: Group, pair: Pair) -> dict[str, str] | None:
    gradients, furthest = pair.worst.get("gradients"), pair.furthest
    if not gradients or not furthest:
        return None
    lines = [
        f"{column}: {number(q.observed)}, {ratio(q.ratio)} of what the two may show"
        + (f"\n  {place(q)}" if column in ("gradients", "update") else "")
        for column in COLUMNS
        if (q := pair.worst.get(column))
    ]
    tip = "\n".join([_names(group, pair), *lines])
    return {"text": number(float(f"{gradients.observed:.0e}")), "shade": shade(furthest.ratio), "tip": tip}


def _between(group: Group) -> list[dict[str, Any]]:
    """For each two backends, and for the layouts of each, the pair that is furthest apart."""
    lines = []
    for one, other in combinations_with_replacement(group.backends, 2):
        pairs = [
            (furthest.ratio, pair)
            for pair in group.pairs
            if {group.members[pair.a].backend, group.members[pair.b].backend} == {one, other}
            and (furthest := pair.furthest)
        ]
        if pairs:
            worst = max(pairs, key=lambda found: found[0])[1]
            between = f"layouts of {one}" if one == other else f"{one} and {other}"
            lines.append(
                {
                    "between": between,
                    "count": len(pairs),
                    "names": _names(group, worst),
                    "worst": worst.furthest,
                }
            )
    return lines


def _names(group: Group, pair: Pair) -> str:
    return f"{group.members[pair.a]} and {group.members[pair.b]}"


def _legend(cells: list[Cell]) -> list[tuple[Markup, str]]:
    """Mark and name of each backend."""
    kinds = dict(zip((cell.backend for cell in cells), curves.kinds(cells), strict=True))
    return [(curves.mark(kind), backend) for backend, kind in kinds.items()]
