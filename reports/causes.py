"""Causes: cells that failed alike, so that nine cells with one cause are read once.

Cells that differ have one cause if the same tensors of the same stage differ first, whatever the layer. Cells without
an answer have one cause if they say the same, but for numbers. The smallest world is the cheapest to look into, so it
stands for the others.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from conformance.record.states import NO_ANSWER, STATES
from reports.load import Cell, Report
from reports.words import first_finding, first_line


@dataclass(frozen=True, kw_only=True)
class Cause:
    """``cells``: at least one, the smallest world first, and of these the plainest layout."""

    cells: tuple[Cell, ...]

    @property
    def first(self) -> Cell:
        return self.cells[0]

    @property
    def others(self) -> tuple[Cell, ...]:
        return self.cells[1:]

    @cached_property
    def urgency(self) -> tuple[int, int, int, float]:
        """Sorts causes: by state, then the earliest stage, the smallest world, and the highest ratio."""
        finding, stages = first_finding(self.first), self.first.entry.stages
        stage = stages.index(finding.stage) if finding and finding.stage in stages else len(stages)
        worst = max((cell.worst.ratio for cell in self.cells if cell.worst), default=0.0)
        return list(STATES).index(self.first.state), stage, self.first.entry.world_size, -worst


def causes(report: Report) -> list[Cause]:
    """The causes of all cells that need attention: of those that differ, then of those that were not judged."""
    groups: dict[object, list[Cell]] = defaultdict(list)
    for cell in report.cells:
        if cell.state in ("differs", *NO_ANSWER):
            groups[_key(cell)].append(cell)
    found = [Cause(cells=tuple(sorted(cells, key=_effort))) for cells in groups.values()]
    return sorted(found, key=lambda cause: cause.urgency)


def _effort(cell: Cell) -> tuple[int, int]:
    """How much there is to a cell: its ranks, and the parts of its layout."""
    return cell.entry.world_size, cell.entry.layout.count(".") + cell.entry.layout.count("-")


def _key(cell: Cell) -> object:
    planted = tuple(part for part in cell.entry.variant.split("/") if part.startswith("fault-"))
    first = first_finding(cell) if cell.state == "differs" else None
    if not first:
        return cell.state, planted, re.sub(r"\d+", "N", first_line(cell.reason))
    tensors = {f.tensor for f in cell.findings if (f.stage, f.step) == (first.stage, first.step)}
    return cell.state, planted, first.stage, frozenset(re.sub(r"\.\d+\.|\d+", ".N.", tensor) for tensor in tensors)
