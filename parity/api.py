"""Functions that do what the commands ``parity run`` and ``parity diff`` do, for scripts and notebooks, and ``load``.

``load`` reads an output folder as pandas tables. conformance.results.trust checks the cells, as it does for the
reports: a verdict without complete records is an infrastructure failure. The reports do not use these tables, because
they would hold millions of rows in memory.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from conformance.cli.main import COMMANDS
from conformance.core import packages
from conformance.core.errors import Parser, UsageError
from conformance.records.record_format import Lines, number
from conformance.results.run_results import Run
from conformance.results.trust import CheckedCell, read_cells
from conformance.results.verdict import STATES

if TYPE_CHECKING:
    import pandas as pd

File = str | PathLike[str]


class Comparison(Protocol):
    """All other sides compared with the first one."""

    @property
    def differs(self) -> bool:
        """Whether a side diverges from the first."""
        ...

    @property
    def comparable(self) -> bool:
        """Whether enough was compared for a verdict: False if the sides have too little in common."""
        ...

    def text(self) -> str:
        """What ``parity diff`` prints: plain text, which is Markdown as well."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        ...


def diff(
    a: File | Sequence[File],
    b: File | Sequence[File],
    *more_sides: File | Sequence[File],
    by: str = "step",
    threshold: float | None = None,
    metrics: Sequence[str] = (),
) -> Comparison:
    """Compare training logs, or records of ``parity.record``, with the first of them, as ``parity diff`` does.

    A side is a log, a record, or a list of logs that differ by their seeds. by: what curves of logs are aligned by,
    ``step`` or ``tokens``. threshold: the relative difference that is allowed; None: derived from the precision of
    records, 5 % for logs, and the spread where a side has several logs. metrics: the only ones to compare, such as
    ``loss``. Raises UsageError for logs that cannot be read or compared.

    Example::

        comparison = parity.diff("run-a", "run-b")
        assert not comparison.differs, comparison.text()
    """
    sides = [[side] if isinstance(side, str | PathLike) else side for side in (a, b, *more_sides)]
    with packages.preferred():
        from reports.logdiff.command import compare_sides

        names = [[fspath(one) for one in side] for side in sides]
        return compare_sides(names, by=by, threshold=threshold, metrics=metrics)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended. ``out``: its output folder, for ``parity.load``. ``exit_code``: that of ``parity run``."""

    out: Path
    exit_code: int

    @property
    def passed(self) -> bool:
        """Whether no cell differs, and the run is complete."""
        return self.exit_code == 0


def run(
    *,
    profile: File = "quick",
    backend: str | Sequence[str] = (),
    cells: str | Sequence[str] = (),
    device: str = "cpu",
    out: File | None = None,
    **options: Any,
) -> RunResult:
    """Run cells, judge them and write the reports, as ``parity run`` does; progress goes to standard error.

    profile: a name or a .toml file. backend: names or ``module:Class``; all registered ones if empty. cells: shell
    patterns of cell ids. device: ``cpu`` or ``cuda``. out: a new or empty folder; None: parity-out/DATE_TIME.
    options: all other options of ``parity run``, with underscores and as Python values, such as ``max_len=512``,
    ``faults=["inverted-clip"]`` or ``quiet=True``. Raises UsageError for options that cannot be used. In a script, call
    it below ``if __name__ == "__main__":``.

    Example::

        result = parity.run(backend="my_package.adapter:MyBackend", cells="sft-sgd/llama/*/dp1/exact")
        assert result.passed, parity.load(result.out).cells.reason.tolist()
    """
    common = {"profile": profile, "backend": backend, "cells": cells, "device": device, "out": out}
    arguments = [text for name, value in (common | options).items() for text in _written(name, value)]
    parser = _Parser(prog="parity run")
    COMMANDS["run"].add_arguments(parser)
    parsed = parser.parse_args(arguments)
    parsed.arguments = arguments
    with packages.preferred():
        from conformance.cli.run import run_options

        folder, code = run_options(parsed)
    if code > 128:  # a signal stopped the run, which has written what it had
        raise KeyboardInterrupt(f"stopped by a signal; {shlex.quote(str(folder))} has the cells that were run")
    return RunResult(out=folder, exit_code=code)


class _Parser(Parser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _written(name: str, value: Any) -> list[str]:
    """An option as the command line has it."""
    if value is None or value is False:
        return []
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return [flag]
    values = [value] if isinstance(value, str | PathLike) or not isinstance(value, Sequence) else value
    return [f"{flag}={fspath(one) if isinstance(one, PathLike) else one}" for one in values]


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
    cells: "pd.DataFrame"
    steps: "pd.DataFrame"
    quantities: "pd.DataFrame"


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


def _table(rows: Iterator[tuple[Any, ...]], columns: dict[str, str]) -> "pd.DataFrame":
    import pandas as pd  # only now: `run` and `diff` need no tables

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
