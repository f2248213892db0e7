"""Reads the output folder of a run: what ``conformance.record`` reads, and beside it what only a reader wants to see.

Serves claim 9 (what could not be judged is never green): a cell whose verdict rests on no complete record, or on no
quantity, is shown as a failure of the infrastructure whatever its verdict file says. Only JSON and logs are read here,
never a tensor.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from conformance.record.coverage import Change
from conformance.record.format import Lines, RecordError, read_lines
from conformance.record.results import SUMMARY, Entry, Quantity, Run, inside, read_json, read_run, states_of
from conformance.record.states import NO_FAULT, STATES, RunVerdict, State

LOG_LINES = 40  # of each rank, counted from the end
LOG_BYTES = 6000
ReadLines = Callable[[Path], tuple[Lines | None, str]]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell as a reader sees it.

    entry: what its verdict says; an infrastructure failure where that rests on nothing.
    legs: the lines of its records, of each as much as could be read. oracle: those of the oracle's record.
    problem: what is wrong with these records; empty if nothing is.
    logs: the last lines of each rank, of a cell that does not conform.
    """

    entry: Entry
    legs: tuple[Lines, ...] = ()
    oracle: Lines | None = None
    problem: str = ""
    logs: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.entry.cell

    @property
    def state(self) -> State:
        return self.entry.verdict.state

    @property
    def reason(self) -> str:
        return self.entry.verdict.reason

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The lines of the optimizer steps of all legs."""
        return [line for leg in self.legs for line in leg.steps]

    @cached_property
    def findings(self) -> tuple[Quantity, ...]:
        """The quantities outside their tolerance."""
        return self.entry.verdict.findings

    @cached_property
    def worst(self) -> Quantity | None:
        """The quantity with the highest ratio of all."""
        return max(self.entry.verdict.quantities, key=lambda q: q.ratio, default=None)


@dataclass(frozen=True, kw_only=True)
class Report:
    """A whole run: what is said about it, and its cells in the order in which they were planned.

    version: of the suite that wrote the folder.
    """

    run: Run
    version: str
    cells: tuple[Cell, ...]

    @property
    def counts(self) -> dict[State, int]:
        states = [cell.state for cell in self.cells]
        return {state: states.count(state) for state in STATES}

    @property
    def several_backends(self) -> bool:
        return len({c.entry.backend for c in self.cells if c.state != "unsupported"}) > 1

    @property
    def verdict(self) -> RunVerdict:
        """One word for the run, worked out from the cells as they are shown."""
        return self.run.verdict([cell.entry for cell in self.cells])

    @property
    def unmet(self) -> tuple[str, ...]:
        """What was demanded of the run and is missing, a sentence each."""
        return self.run.floor.unmet(states_of([cell.entry for cell in self.cells]))

    @property
    def changes(self) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
        """Coverage that was lost and that was gained since the earlier run that it was compared with."""
        return self.run.floor.changes(states_of([cell.entry for cell in self.cells]))


def read_report(out: Path) -> Report:
    """Read the output folder ``out`` of ``parity run``. Raises UsageError for one that cannot be trusted."""
    run, entries = read_run(out)
    oracle_lines = cache(_read_lines)  # many cells share an oracle
    version = str(read_json(out / SUMMARY).get("suite_version", ""))
    return Report(run=run, version=version, cells=tuple(_read_cell(out, entry, oracle_lines) for entry in entries))


def _read_cell(out: Path, entry: Entry, oracle_lines: ReadLines) -> Cell:
    folder = out / entry.folder
    found = [_read_lines(inside(out, folder / record)) for record in entry.records]
    legs = tuple(lines for lines, _ in found if lines)
    problem = next((problem for _, problem in found if problem), "") or _gap(legs)
    oracle = None
    if entry.oracle:
        oracle, theirs = oracle_lines(inside(out, folder / entry.oracle / "float64"))
        problem = problem or (f"of the oracle: {theirs}" if theirs else "")
    verdict = entry.verdict
    if verdict.state in NO_FAULT and (damage := problem or _nothing(entry)):
        reason = f"Judged as {STATES[verdict.state].name}, but that cannot be trusted: {damage}"
        entry = replace(entry, verdict=replace(verdict, state="infrastructure", reason=reason))
    logs = {} if entry.verdict.state in ("conforms", "partly_observed") else _read_logs(out, folder)
    return Cell(entry=entry, legs=legs, oracle=oracle, problem=problem, logs=logs)


def _read_lines(folder: Path) -> tuple[Lines | None, str]:
    """The lines of a record; of a damaged one those that are left, and what is wrong with it."""
    try:
        return read_lines(folder), ""
    except RecordError as error:
        return error.left, str(error)


def _gap(legs: tuple[Lines, ...]) -> str:
    """What is wrong with the order of complete legs: each goes on where the one before it ended."""
    steps = [line["step"] for leg in legs for line in leg.steps]
    if all(step == number for number, step in enumerate(steps, start=steps[0] if steps else 0)):
        return ""
    return f"the steps of its legs, {steps}, do not follow one another. Run it again."


def _nothing(entry: Entry) -> str:
    """Why a verdict that is not a failure rests on nothing; empty when it is sound."""
    if not entry.records:
        return "there is no record of the cell. Run it again."
    if not entry.completed:
        return "the cell did not come to its end. Run it again."
    return "" if entry.verdict.quantities else "nothing was compared. Judge it again."


def _read_logs(out: Path, folder: Path) -> dict[str, str]:
    """The last lines of each rank's log, without terminal colours; of several legs, by leg and rank.

    Those of a repetition in fresh ranks come last.
    """
    files = sorted(folder.glob("legs/*/logs/rank-*.log"), key=lambda file: (len(str(file)), str(file)))
    files += sorted(folder.glob("fresh/*/logs/rank-*.log"), key=lambda file: (len(str(file)), str(file)))
    several = len({file.parent for file in files}) > 1
    logs = {}
    for file in files:
        text = inside(out, file).read_bytes()[-LOG_BYTES:].decode("utf-8", errors="replace")
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
        name = f"leg {file.parts[-3]}, {file.stem}" if several else file.stem
        logs[f"fresh {name}" if file.parts[-4] == "fresh" else name] = "\n".join(text.splitlines()[-LOG_LINES:])
    return logs
