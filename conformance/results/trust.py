"""Reads the cells of an output folder and checks whether their verdicts can be trusted. Does not import torch.

A passing verdict needs complete records of the cell and of its oracle, and a quantity for each required observable at
each step at which it applies, for the same tensors at every step. Otherwise the cell is an infrastructure failure,
whatever its file says (see docs/principles.md#9-incomplete-is-never-green). The command line and the reports both read
cells with this module, so the exit code and the report agree. No tensor is read, because tensors may have been removed.

Folders can be copied, swapped and renamed. So a record counts as a cell's only if its header names this cell, and as
the oracle's only if its header names the oracle with the requested precision and defects.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from conformance.core.errors import UsageError, shown
from conformance.records.record_format import Line, Lines, RecordError, read_lines
from conformance.results.bisection import Bisection, read_bisection
from conformance.results.run_results import Entry, Run, inside, read_run
from conformance.results.verdict import NO_FAULT, STATES, Quantity
from conformance.spec.conventions import of_oracle
from conformance.spec.known_defects import Defect, defects_of, defects_to_json
from conformance.spec.observables import Observable, is_unread
from conformance.spec.precision import FLOAT64

AGAIN = "Run it again."
ORACLE = "oracle"  # the name of both the cell and the backend in the headers of the oracle's records


def distrust_reason(entry: Entry, phases: Sequence[Lines], oracle: Lines | None) -> str:
    """Returns why a passing verdict cannot be trusted, in words; empty if it can."""
    if not entry.records:
        return f"there is no record of the cell. {AGAIN}"
    if not entry.completed:
        return f"the cell did not run to its end. {AGAIN}"
    if not entry.verdict.quantities:
        return "nothing was compared. Judge it again."
    if oracle is None:
        return ""
    quantities = entry.verdict.quantities
    gaps = [*_not_judged(quantities, phases, oracle)]
    if entry.verdict.state == "conforms":
        gaps += _not_shown(quantities, oracle.observables)
    return f"{gaps[0]}. {AGAIN}" if gaps else ""


def _not_judged(quantities: Sequence[Quantity], phases: Sequence[Lines], oracle: Lines) -> Iterator[str]:
    """Yields required observables without a quantity, and tensors that were judged only at some steps."""
    judged = {(q.stage, q.tensor, q.step) for q in quantities}
    lines = {line["step"]: line for phase in phases for line in phase.steps}
    names: dict[tuple[str, int], set[str]] = {}
    for q in quantities:
        names.setdefault((q.stage, q.step), set())
        if " " not in q.tensor:  # else the quantity has an annotation after the name
            names[q.stage, q.step].add(q.tensor)
    for o in oracle.observables:
        if not o.required or o.kind == "evidence":
            continue
        steps = [
            line["step"] for line in (oracle.loaded, *oracle.steps) if o.applies(line["step"]) and not _lost(o, line)
        ]
        for step in steps:
            there = (o.stage, step) in names if o.kind == "tensors" else (o.stage, o.judged_as, step) in judged
            if not there and not is_unread(o.key, lines.get(step, {})):
                yield f"{o.stage} ({o.key}) of step {step} was not judged, but its record requires it"
        if o.kind == "tensors":
            read = [step for step in steps if not is_unread(o.key, lines.get(step, {}))]
            shown = [step for step in read if (o.stage, step) in names]
            for before, after in pairwise(shown):
                if unpaired := names[o.stage, before] ^ names[o.stage, after]:
                    gap = f"{o.stage} of steps {before} and {after} were not judged for the same tensors"
                    yield f"{gap}, such as {min(unpaired)}"


def _not_shown(quantities: Sequence[Quantity], observables: Sequence[Observable]) -> Iterator[str]:
    """Yields optional observables that were judged neither directly nor by their effect: the cell conforms only
    partly."""
    judged, stages = {(q.stage, q.tensor) for q in quantities}, {q.stage for q in quantities}
    for o in observables:
        if o.required or o.kind == "evidence" or o.when == "handover" or o.effect_at in stages:
            continue
        keys = ((o.stage, o.key), (o.stage, o.judged_as))
        if o.stage not in stages if o.kind == "tensors" else judged.isdisjoint(keys):
            yield f"the verdict is 'conforms', but {o.stage} ({o.key}) was not judged"


def _lost(observable: Observable, line: Line) -> bool:
    """Whether the observable has no value at this step because the update was skipped."""
    return bool(observable.lost_if and line.get("values", {}).get(observable.lost_if))


def check_cell(folder: Path, header: Line, *, cell: str) -> None:
    """Raises RecordError if the record in ``folder`` does not belong to ``cell``."""
    if (found := header.get("cell")) != cell:
        raise RecordError(
            f"{folder} is a record of {found or 'an unnamed cell'} and not of {cell}: folders were mixed up; "
            f"put the cell's own record there, or run the cell again"
        )


def check_oracle(folder: Path, header: Line, *, precision: str, defects: tuple[Defect, ...] = ()) -> None:
    """Raises RecordError if the record in ``folder`` is not the oracle's with this precision and these defects."""
    backend = header.get("backend", {})
    found = header.get("cell"), backend.get("name"), backend.get("precision")
    if found != (ORACLE, ORACLE, precision):
        what = f"one of {found[0]} in {found[2]}" if found[0] == ORACLE else f"a record of {found[0] or 'nothing'}"
        raise RecordError(
            f"{folder} should be the oracle's record in {precision}, and is {what}: folders were mixed up; run the "
            f"cell again"
        )
    if backend.get("defects") != (requested := defects_to_json(defects)):
        observed = _describe(backend["defects"]) if "defects" in backend else "an unknown list of defects"
        raise RecordError(
            f"{folder} should be the oracle's record with {_describe(requested)}, and is one with {observed}: "
            f"folders were mixed up; run the cell again"
        )


def _describe(defects: Any) -> str:
    return shown(defects) if defects else "no defect"


def second_class(header: Line) -> object:
    """Returns whose implementation computed an oracle's record with this header; empty for the suite's own oracle."""
    resolved = header.get("resolved")
    return resolved.get("second_class", "") if isinstance(resolved, dict) else ""


ReadLines = Callable[[Path], tuple[Lines | None, str]]
CheckHeader = Callable[[Path, Line], None]


@dataclass(frozen=True, kw_only=True)
class CheckedCell:
    """Holds one cell after the check.

    entry: the cell with its verdict; the verdict is an infrastructure failure if the stored one cannot be trusted.
    phases: the lines of the records of its phases, as far as they could be read.
    oracle: the lines of the oracle's record; None if there are none.
    problem: the first defect of these records; empty if they are intact.
    bisection: the findings of the bisection; None if the cell was not bisected, or does not differ.
    """

    entry: Entry
    phases: tuple[Lines, ...] = ()
    oracle: Lines | None = None
    problem: str = ""
    bisection: Bisection | None = None


def read_cells(out: Path) -> tuple[Run, list[CheckedCell]]:
    """Reads a run and its cells, in the planned order.

    Raises UsageError for a folder that is not a run's output, was cut short or edited, or contradicts itself.
    """
    run, entries = read_run(out)
    oracle_lines = cache(_read_lines)  # many cells share an oracle
    return run, [_check_entry(out, entry, oracle_lines) for entry in entries]


def _check_entry(out: Path, entry: Entry, oracle_lines: ReadLines) -> CheckedCell:
    folder = out / entry.folder
    is_own, is_oracle = partial(check_cell, cell=entry.cell), partial(check_oracle, precision=FLOAT64)
    found = [_read_checked(out, folder / record, _read_lines, is_own) for record in entry.records]
    phases = tuple(lines for lines, _ in found if lines)
    problem = next((problem for _, problem in found if problem), "") or _step_gap(phases)
    oracle = None
    if entry.oracle:
        oracle, oracle_problem = _read_checked(out, folder / entry.oracle / FLOAT64, oracle_lines, is_oracle)
        problem = problem or (f"of the oracle: {oracle_problem}" if oracle_problem else "")
    for one in entry.variants:
        has_them = partial(check_oracle, precision=FLOAT64, defects=one.defects)
        _, oracle_problem = _read_checked(out, folder / one.folder / FLOAT64, oracle_lines, has_them)
        kinds = " and ".join(defect.kind for defect in one.defects)
        problem = problem or (f"of the oracle with {kinds}: {oracle_problem}" if oracle_problem else "")
    needed = (*of_oracle(entry.conventions), *defects_of(entry.expected))
    if needed and entry.records and needed not in {one.defects for one in entry.variants}:
        kinds = " and ".join(defect.kind for defect in needed)
        problem = problem or f"there is no record of the oracle with {kinds}"
    problem = problem or _conventions_problem(entry)
    verdict = entry.verdict
    if oracle and verdict.second_class != second_class(oracle.header):
        problem = problem or "it names another reference than the oracle's record"
    if verdict.state in NO_FAULT and (damage := problem or distrust_reason(entry, phases, oracle)):
        reason = f"Judged as {STATES[verdict.state].name}, but that cannot be trusted: {damage}"
        entry = replace(entry, verdict=replace(verdict, state="infrastructure", reason=reason))
    bisection = None
    if verdict.state == "differs":
        digests = tuple(lines.digest for lines in phases)
        bisection = read_bisection(inside(out, folder), cell=entry.cell, records=digests)
    return CheckedCell(entry=entry, phases=phases, oracle=oracle, problem=problem, bisection=bisection)


def _conventions_problem(entry: Entry) -> str:
    """Returns what contradicts the conventions that the verdict shows; empty if nothing does.

    A cell shows a convention by differing from the oracle without it. So its backend declares the convention, and there
    is a record of that oracle.
    """
    declared, made = {str(one): one for one in entry.conventions}, {one.defects for one in entry.variants}
    for name in entry.verdict.conventions:
        if name not in declared:
            return f"its verdict shows the convention {name}, which the backend does not declare"
        others = of_oracle(tuple(one for one in entry.conventions if one != declared[name]))
        if (without := (*others, *defects_of(entry.expected))) and entry.records and without not in made:
            return f"its verdict shows the convention {name}, but there is no record of the oracle without it"
    return ""


def _read_checked(out: Path, folder: Path, read: ReadLines, check: CheckHeader) -> tuple[Lines | None, str]:
    """Calls ``read``; returns (None, problem) for a record outside of ``out``, or one that ``check`` rejects."""
    try:
        lines, problem = read(inside(out, folder))
        if lines:
            check(folder, lines.header)
    except (UsageError, RecordError) as error:
        return None, str(error)
    return lines, problem


def _read_lines(folder: Path) -> tuple[Lines | None, str]:
    """Returns the lines of a record and its problem. The problem of an intact record is empty; a damaged record gives
    its readable lines."""
    try:
        return read_lines(folder), ""
    except RecordError as error:
        return error.left, str(error)


def _step_gap(phases: tuple[Lines, ...]) -> str:
    """Returns the problem if the steps of the phases are not consecutive; empty if they are."""
    steps = [line["step"] for phase in phases for line in phase.steps]
    if all(step == number for number, step in enumerate(steps, start=steps[0] if steps else 0)):
        return ""
    return f"the steps of its phases, {steps}, are not consecutive. Run it again."
