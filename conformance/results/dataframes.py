"""Reads an output folder as pandas tables, for a notebook: ``parity.load(OUT)``.

Cells are believed as the reports believe them, because both are read by conformance.results.trust: what rests on no
complete record is an infrastructure failure here as there. The reports share that layer and not these tables: they pack
a cell at a time from its quantities, and a table of all cells would hold millions of rows in memory first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from conformance.records.record_format import Lines, number
from conformance.results.run_results import Run
from conformance.results.trust import BelievedCell, read_cells
from conformance.results.verdict import STATES

# Of each table the columns and their dtypes. A "category" is a text that many rows have.
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
    """A run as tables.

    run: the fields of ``summary.json`` about the run as a whole.
    cells: a row for each cell, in the order in which they were planned. ``state`` is a category in the order of
        conformance.results.verdict; ``second_class`` whose implementation the reference was, empty if it is the
        oracle's own; ``worst`` the highest observed / allowed (NaN if nothing was compared);
        ``first_stage`` the first stage that differs, or empty; ``attempts`` how often it was run.
    steps: a row for each number that a backend reported at an optimizer step: ``value``, and ``oracle``, that of the
        float64 oracle (NaN if it has none).
    quantities: a row for each judged number: see conformance.results.verdict.Quantity. ``step`` is -1 for what was
        loaded; ``ratio`` is observed / allowed, infinite where nothing is allowed.
    """

    run: Run
    cells: pd.DataFrame
    steps: pd.DataFrame
    quantities: pd.DataFrame


def load(out: str | Path) -> Frames:
    """Read the output folder of ``parity run`` as pandas tables. No tensor is read.

    Raises UsageError for a folder that is not a run's output, was cut short or edited, or contradicts itself.

    Example::

        cells = parity.load("parity-out/2026-11-22_03-12-00").cells
        cells[cells.state == "differs"].sort_values("worst")
    """
    run, cells = read_cells(Path(out))
    told = _table((_cell(cell) for cell in cells), CELLS)
    told["state"] = told["state"].cat.set_categories(list(STATES), ordered=True)
    return Frames(
        run=run,
        cells=told,
        steps=_table((row for cell in cells for row in _steps(cell)), STEPS),
        quantities=_table((row for cell in cells for row in _quantities(cell)), QUANTITIES),
    )


def _table(rows: Iterator[tuple[Any, ...]], columns: dict[str, str]) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=list(columns)).astype(columns)


def _cell(cell: BelievedCell) -> tuple[Any, ...]:
    entry, verdict = cell.entry, cell.entry.verdict
    worst = max((q.ratio for q in verdict.quantities), default=None)
    attempts = (1 if entry.records else 0) + (1 if entry.other else 0) + len(entry.before)
    return (
        *(entry.cell, entry.scenario, entry.model, entry.backend, entry.layout),
        *(entry.variant, verdict.state, verdict.reason, verdict.second_class, verdict.first_stage, number(worst)),
        *(entry.world_size, entry.seconds, attempts, entry.folder, entry.reproduce),
    )


def _steps(cell: BelievedCell) -> Iterator[tuple[Any, ...]]:
    theirs = _values(cell.oracle) if cell.oracle else {}
    for leg, lines in enumerate(cell.legs):
        for (step, key), value in _values(lines).items():
            yield cell.entry.cell, leg, step, key, value, theirs.get((step, key), float("nan"))


def _values(lines: Lines) -> dict[tuple[int, str], float]:
    """The numbers of a record by step and key."""
    return {(line["step"], key): number(value) for line in lines.steps for key, value in line.get("values", {}).items()}


def _quantities(cell: BelievedCell) -> Iterator[tuple[Any, ...]]:
    for q in cell.entry.verdict.quantities:
        at = (cell.entry.cell, q.stage, q.tensor, q.step)
        yield *at, q.observed, q.allowed, q.ratio, number(q.max_abs), q.where, q.hint
