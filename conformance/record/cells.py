"""Cells: reads the cells of an output folder and checks whether their verdicts can be trusted; without torch.

Serves claim 9 (what could not be judged is never green): a verdict without complete records of the cell and of its
oracle, or without quantities, is an infrastructure failure, whatever its file says. The command line and the reports
both read cells with this module, so that the exit code and the report agree. No tensor is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from conformance.defect import defects_of
from conformance.record.bisection import Bisection, not_told, read_bisection
from conformance.record.format import Line, Lines, RecordError, read_lines
from conformance.record.founded import why_unfounded
from conformance.record.identity import FLOAT64, check_cell, check_oracle, second_class
from conformance.record.plausible import implausible
from conformance.record.results import Entry, Run, inside, read_run, states_of
from conformance.record.states import NO_FAULT, STATES, State
from conformance.validation import UsageError

ReadLines = Callable[[Path], tuple[Lines | None, str]]
CheckHeader = Callable[[Path, Line], None]


@dataclass(frozen=True, kw_only=True)
class BelievedCell:
    """One cell, after the check.

    entry: the cell with its verdict; the verdict is an infrastructure failure if the stored one cannot be trusted.
    legs: the lines of the records of its legs, as far as they could be read.
    oracle: the lines of the oracle's record; None if there are none.
    problem: what is wrong with these records; empty if nothing is.
    bisection: what bisecting the cell has found; None if it was not bisected, or does not differ.
    """

    entry: Entry
    legs: tuple[Lines, ...] = ()
    oracle: Lines | None = None
    problem: str = ""
    bisection: Bisection | None = None


def read_cells(out: Path) -> tuple[Run, list[BelievedCell]]:
    """A run and its cells, in the order in which they were planned.

    Raises UsageError for a folder that is not a run's output, was cut short or edited, or contradicts itself.
    """
    run, entries = read_run(out)
    oracle_lines = cache(_read_lines)  # many cells share an oracle
    states = states_of(entries)
    return run, [_believe(out, entry, oracle_lines, states) for entry in entries]


def _believe(out: Path, entry: Entry, oracle_lines: ReadLines, states: Mapping[str, State]) -> BelievedCell:
    folder = out / entry.folder
    is_own, is_oracle = partial(check_cell, cell=entry.cell), partial(check_oracle, precision=FLOAT64)
    found = [_read_checked(out, folder / record, _read_lines, is_own) for record in entry.records]
    legs = tuple(lines for lines, _ in found if lines)
    problem = next((problem for _, problem in found if problem), "") or _step_gap(legs)
    oracle = None
    if entry.oracle:
        oracle, oracle_problem = _read_checked(out, folder / entry.oracle / FLOAT64, oracle_lines, is_oracle)
        problem = problem or (f"of the oracle: {oracle_problem}" if oracle_problem else "")
    if entry.defective:
        has_them = partial(check_oracle, precision=FLOAT64, defects=defects_of(entry.expected))
        _, oracle_problem = _read_checked(out, folder / entry.defective / FLOAT64, oracle_lines, has_them)
        problem = problem or (f"of the oracle with the expected defects: {oracle_problem}" if oracle_problem else "")
    verdict = entry.verdict
    if oracle and verdict.second_class != second_class(oracle.header):
        problem = problem or "it names another reference than the oracle's record"
    if verdict.state in NO_FAULT and (damage := problem or why_unfounded(entry, legs, oracle)):
        reason = f"Judged as {STATES[verdict.state].name}, but that cannot be trusted: {damage}"
        entry = replace(entry, verdict=replace(verdict, state="infrastructure", reason=reason))
    bisection = None
    if verdict.state == "differs":
        digests = tuple(lines.digest for lines in legs)
        bisection = read_bisection(inside(out, folder), cell=entry.cell, records=digests)
        if bisection and legs and bisection.stage and (why := implausible(bisection, entry, legs[0].header, states)):
            bisection = not_told(entry.cell, digests, why)
    return BelievedCell(entry=entry, legs=legs, oracle=oracle, problem=problem, bisection=bisection)


def _read_checked(out: Path, folder: Path, read: ReadLines, check: CheckHeader) -> tuple[Lines | None, str]:
    """Call ``read``; returns (None, problem) for a record outside of ``out``, or one that ``check`` refuses."""
    try:
        lines, problem = read(inside(out, folder))
        if lines:
            check(folder, lines.header)
    except (UsageError, RecordError) as error:
        return None, str(error)
    return lines, problem


def _read_lines(folder: Path) -> tuple[Lines | None, str]:
    """The lines of a record and the problem with it; the problem is empty for an intact record, and of a damaged one
    the readable lines are returned."""
    try:
        return read_lines(folder), ""
    except RecordError as error:
        return error.left, str(error)


def _step_gap(legs: tuple[Lines, ...]) -> str:
    """The problem if the steps of the legs are not consecutive; empty if they are."""
    steps = [line["step"] for leg in legs for line in leg.steps]
    if all(step == number for number, step in enumerate(steps, start=steps[0] if steps else 0)):
        return ""
    return f"the steps of its legs, {steps}, do not follow one another. Run it again."
