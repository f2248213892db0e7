"""Reads an output folder as pandas tables, for a notebook: ``parity.load(OUT)``.

conformance.results.trust checks the cells, as it does for the reports: a verdict without complete records is an
infrastructure failure. The reports do not use these tables, because they would hold millions of rows in memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from conformance.records.record_format import Lines, number
from conformance.results.run_results import Run
from conformance.results.trust import CheckedCell, read_cells
from conformance.results.verdict import STATES

# Columns and dtypes of each table. A "category" is a text that many rows share.
CELLS = {
    **{"cell": "str", "scenario": "category", "model": "category", "backend": "category", "layout": "category"},
    **{"variant": "category", "state": "category", "reason": "str", "second_class": "category"},
    **{"first_stage": "category", "worst": "float64", "world_size": "int64", "seconds": "float64"},
    **{"attempts": "int64", "folder": "str", "reproduce": "str"},
}
STEPS = {
    **{"cell": "category", "leg": "int64", "step": "int64", "key": "category", "value": "float64", "oracle": "float64"},
}
QUANTITIES = {
    **{"cell": "category", "stage": "category", "tensor": "category", "step": "int64", "observed": "float64"},
    **{"allowed": "float64", "ratio": "float64", "max_abs": "float64", "where": "str", "hint": "str"},
}


@dataclass(frozen=True, kw_only=True)
class Frames:
    """Holds a run as tables.

    run: the fields of ``summary.json`` about the run as a whole.
    cells: a row for each cell, in the planned order. ``state`` is a category in the order of
        conformance.results.verdict. ``second_class`` is the implementation that was the reference, empty for the
        oracle's own. ``worst`` is observed / allowed of ``Verdict.closest`` (NaN if nothing was compared).
        ``first_stage`` is the first stage that differs, or empty. ``attempts`` is the number of runs of the cell.
    steps: a row for each number that a backend reported at an optimizer step. ``value`` is the backend's number,
        ``oracle`` that of the float64 oracle (NaN if it has none).
    quantities: a row for each judged number (conformance.results.verdict.Quantity). ``step`` is -1 for loaded weights.
        ``ratio`` is observed / allowed, infinite if the tolerance is 0.
    """

    run: Run
    cells: pd.DataFrame
    steps: pd.DataFrame
    quantities: pd.DataFrame


def load(out: str | Path) -> Frames:
    """Reads the output folder of ``parity run`` as pandas tables. No tensor is read.

    Raises UsageError for a folder that is not a run's output, was cut short or edited, or contradicts itself.

    Example::

        cells = parity.load("parity-out/2026-11-22_03-12-00").cells
        cells[cells.state == "differs"].sort_values("worst")
    """
    run, cells = read_cells(Path(out))
    table = _table((_cell(cell) for cell in cells), CELLS)
    table["state"] = table["state"].cat.set_categories(list(STATES), ordered=True)
    return Frames(
        run=run,
        cells=table,
        steps=_table((row for cell in cells for row in _steps(cell)), STEPS),
        quantities=_table((row for cell in cells for row in _quantities(cell)), QUANTITIES),
    )


def _table(rows: Iterator[tuple[Any, ...]], columns: dict[str, str]) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=list(columns)).astype(columns)


def _cell(cell: CheckedCell) -> tuple[Any, ...]:
    entry, verdict = cell.entry, cell.entry.verdict
    worst = verdict.closest.ratio if verdict.closest else None
    attempts = (1 if entry.records else 0) + (1 if entry.other else 0) + len(entry.before)
    return (
        *(entry.cell, entry.scenario, entry.model, entry.backend, entry.layout),
        *(entry.variant, verdict.state, verdict.reason, verdict.second_class, verdict.first_stage, number(worst)),
        *(entry.world_size, entry.seconds, attempts, entry.folder, entry.reproduce),
    )


def _steps(cell: CheckedCell) -> Iterator[tuple[Any, ...]]:
    reference = _values(cell.oracle) if cell.oracle else {}
    for phase, lines in enumerate(cell.phases):
        for (step, key), value in _values(lines).items():
            yield cell.entry.cell, phase, step, key, value, reference.get((step, key), float("nan"))


def _values(lines: Lines) -> dict[tuple[int, str], float]:
    """Returns the numbers of a record by step and key."""
    return {(line["step"], key): number(value) for line in lines.steps for key, value in line.get("values", {}).items()}


def _quantities(cell: CheckedCell) -> Iterator[tuple[Any, ...]]:
    for q in cell.entry.verdict.quantities:
        at = (cell.entry.cell, q.stage, q.tensor, q.step)
        yield *at, q.observed, q.allowed, q.ratio, number(q.max_abs), q.where, q.hint
