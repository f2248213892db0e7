"""Reads and writes the verdicts and the summary of a run; no other module does. Does not import torch.

docs/reference/file-formats.md is generated from the docstrings here. Everything that follows from quantities (findings,
the worst of a stage, the verdict of a run) is computed on demand and never read from a file, so that a file cannot
claim more than its quantities show.
"""

import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

import conformance
from conformance.core.errors import UsageError, shown
from conformance.core.io import Unreadable, Unwritable, read_file, write_file
from conformance.records.record_format import LONGEST, dumps, first_error, parse_strict_json
from conformance.results.baseline import Outcome, outcome, versions_of
from conformance.results.changes import Since, compare, since_to_json
from conformance.results.requirements import Floor, States, claims, floor_from_json
from conformance.results.verdict import STATES, Quantity, RunVerdict, State, Verdict, overall
from conformance.spec.conventions import Conventions
from conformance.spec.known_defects import Defect, Known
from conformance.spec.observables import Observable, observables_to_json, stages

SUMMARY, VERDICT, SIDE_BY_SIDE = "summary.json", "verdict.json", "side_by_side.json"
OUTPUT_SCHEMA = 2
_NOT_PLAIN = (
    "verdict",
    "observables",
    "other",
    "expected",
    "conventions",
    "variants",
)  # fields of an entry that are converted for JSON
_COLUMNS = ("stage", "tensor", "step", "observed", "allowed", "max_abs", "where", "hint")
_FROM_FOLDER = {"--out", "--resume", "--cells"}  # options of a command that a resume takes from the folder
T = TypeVar("T")
CellSummary = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Holds one of the two attempts at a cell that was run twice. ``verdict.json`` does not keep its quantities.

    fresh: whether the workers had run no other cell before. verdict: the verdict of this attempt alone.
    completed: whether all phases ended normally. records: paths of the records of its phases, relative to the cell's
    folder.
    """

    fresh: bool
    verdict: Verdict
    completed: bool
    records: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OracleVariant:
    """Names the folder of the oracle's records with these defects and conventions, relative to the cell's folder."""

    defects: tuple[Annotated[Defect, Field(discriminator="kind")], ...]
    folder: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Holds one cell of a run, as it is stored in the output folder.

    cell: the cell's id, made of the next five fields. scenario: the name of the scenario. model: the name of the model.
    backend: the backend, or the backends of the phases. layout: the layout, or the layouts of the phases.
    variant: precision, program, seed and faults. world_size: the largest number of ranks of a phase.
    seconds: the time that the cell took. folder: the cell's folder, relative to the output folder.
    records: paths of the records of the phases that were started, relative to the cell's folder.
    completed: whether all phases ended normally.
    oracle: the folder of the oracle's records, relative to the cell's folder; null if the cell was not run.
    expected: the differences that the backend declares as expected.
    conventions: the conventions that the backend declares and that could change this cell.
    variants: the records of the oracle with conventions or known defects that the cell was compared with.
    reproduce: the command that runs this cell again. observables: everything that the cell records, in causal order.
    verdict: in the file, its fields are keys of the cell.
    other: if the cell was run again in fresh workers, the attempt that ``records`` does not belong to.
    before: the states in which the cell ended before it was run again (``--resume``, or on GPUs), the earliest first.
    slim: whether the tensors of its records were removed after they were compared (``--keep``).
    memory: the peak memory of a rank in bytes, of its GPU if it had one; 0 if it is not known.
    host_memory: the peak memory of a rank in bytes, of its host; 0 if it is not known.
    """

    cell: str
    scenario: str
    model: str
    backend: str
    layout: str
    variant: str
    world_size: int
    seconds: float
    folder: str
    completed: bool
    records: tuple[str, ...]
    oracle: str | None
    expected: tuple[Known, ...]
    reproduce: str
    conventions: Conventions = ()
    variants: tuple[OracleVariant, ...] = ()
    observables: tuple[Observable, ...] = ()
    verdict: Verdict
    other: Attempt | None = None
    before: tuple[State, ...] = ()
    slim: bool = False
    memory: int = 0
    host_memory: int = 0

    @property
    def stages(self) -> tuple[str, ...]:
        """Returns all stages in causal order. Stages of a resume are included only if they were observed."""
        observed = {quantity.stage for quantity in self.verdict.quantities}
        absent = {o.stage for o in self.observables if o.when == "handover"} - observed
        return tuple(stage for stage in stages(self.observables) if stage not in absent)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Holds the fields of ``summary.json`` about the run as a whole.

    started, finished: UTC times in ISO format; ``finished`` is null while the run continues, or if it was interrupted.
    seconds: the time of all processes and attempts together. profile: the name of the profile. device: cpu or cuda.
    command: the command that started the run. environment: versions, drivers, variables and the commit.
    leased: for each GPU (UUID), or slot of a host, the share of the last attempt's time in which cells and oracles
    used it; empty if nothing was leased, with pytest, and after a merge of several jobs.
    phases: the seconds of the controller, cells, oracle, ranks and worker groups by phase, from the timeline; phases
    that begin with ``wait:`` wait for other processes.
    cpu_seconds: the processor time of all processes of the last attempt.
    gpu_active: by UUID, the share of the time in which the GPU's multiprocessors worked, sampled; by ``UUID kernels``,
    the share in which any kernel ran, where NVML measures no multiprocessors.
    repeated: one sentence for each oracle run that failed and was run again.
    floor: what the run has to judge at least in order to pass.
    selected: a digest that is equal for runs of the same cells.
    selection: what the user selected, as text; equal for runs that a history compares with each other.
    inputs: 16 hexadecimal digits of the SHA-256 of every file of the models and data, by name.
    """

    started: str
    finished: str | None
    seconds: float
    profile: str
    device: str
    command: str
    environment: Mapping[str, Any] = field(default_factory=dict)
    leased: Mapping[str, float] = field(default_factory=dict)
    phases: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    gpu_active: Mapping[str, float] = field(default_factory=dict)
    repeated: tuple[str, ...] = ()
    floor: Floor = field(default_factory=Floor)
    selected: str = ""
    selection: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)

    def how_to_end(self, out: Path) -> str:
        """Returns how the run in ``out`` is completed, for a message; empty if it has ended, or cannot be resumed."""
        if self.finished or not (command := self.resumed(out)):
            return ""
        return f"the run in {out} has not ended; go on with it: {command}"

    def resumed(self, out: Path) -> str:
        """Returns the command that resumes the run in ``out``; empty for what was not started by `parity run`."""
        words = shlex.split(self.command)
        if words[:2] != ["parity", "run"]:
            return ""
        own = [word for before, word in pairwise(["", *words]) if not {before, word.partition("=")[0]} & _FROM_FOLDER]
        return shlex.join([*own, "--resume", str(out)])

    def since(self, outcomes: Mapping[str, Outcome]) -> Since | None:
        """Compares how the cells ended, by id, with the baseline; None if the run has no baseline or is one part of
        several."""
        if not self.floor.baseline or not self.floor.whole:
            return None
        return compare(self.floor.baseline, outcomes, started=self.started, versions=versions_of(self.environment))

    def verdict(self, states: States) -> RunVerdict:
        """Computes the verdict of the run from the states of its cells and the minimum requirements."""
        return overall(states.values(), complete=self.finished is not None and not self.floor.unmet(states))


def states_of(entries: Sequence[Entry]) -> States:
    """Returns the states of the cells by id."""
    return {entry.cell: entry.verdict.state for entry in entries}


def outcomes_of(entries: Sequence[Entry]) -> dict[str, Outcome]:
    """Returns how the cells ended, by id."""
    return {
        entry.cell: outcome(
            state=entry.verdict.state,
            seconds=entry.seconds,
            before=entry.before,
            second_class=entry.verdict.second_class,
            errors=entry.verdict.errors,
        )
        for entry in entries
    }


def write_entry(out: Path, entry: Entry) -> None:
    """Writes ``verdict.json`` of one cell. Raises UsageError for a folder outside of ``out``, and Unwritable."""
    folder = inside(out, out / entry.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unwritable(f"{folder} cannot be created: {error.strerror}") from error
    values = {f.name: getattr(entry, f.name) for f in fields(entry) if f.name not in _NOT_PLAIN}
    verdict = entry.verdict
    rows = [[getattr(q, column) for column in _COLUMNS] for q in verdict.quantities]
    values |= {
        "observables": observables_to_json(entry.observables),
        "state": verdict.state,
        "reason": verdict.reason,
        "second_class": verdict.second_class,
        "shown_conventions": verdict.conventions,
        "code": verdict.code,
        "expected": [asdict(known) for known in entry.expected],
        "conventions": [asdict(one) for one in entry.conventions],
        "variants": [asdict(one) for one in entry.variants],
        "other": _attempt_to_json(entry.other) if entry.other else None,
        "quantities": {"columns": _COLUMNS, "data": rows},
        "strips": [vars(strip) | {"spread": strip.spread and vars(strip.spread)} for strip in verdict.strips],
    }
    write_output_json(folder / VERDICT, {"schema": OUTPUT_SCHEMA, **values}, indent=None)


def write_summary(out: Path, run: Run, cells: Sequence[CellSummary]) -> None:
    """Writes ``summary.json``. Raises Unwritable."""
    head = {"schema": OUTPUT_SCHEMA, "suite_version": conformance.__version__}
    write_output_json(out / SUMMARY, {**head, **summary_of(run, cells)}, indent=1)


def cell_summary(entry: Entry) -> CellSummary:
    """Returns the cell's part of ``summary.json``: its verdict without the quantities.

    id: the cell's id. state, reason: the verdict. second_class: see verdict. conventions: those of the backend that
    change the cell's numbers and that it shows. code: see verdict. world_size: the largest number of ranks.
    seconds: the time that the cell took. memory, host_memory: the peak memory of a rank in bytes; 0 if it is not known.
    ratios: by stage, observed / allowed of ``Verdict.worst``. errors: by stage, the largest relative error
    (``Quantity.is_error``). before: the states in which the cell ended before it was run again.
    folder: the cell's folder, relative to the output folder.
    """
    return {
        "id": entry.cell,
        "state": entry.verdict.state,
        "reason": entry.verdict.reason,
        "second_class": entry.verdict.second_class,
        "conventions": entry.verdict.conventions,
        "code": entry.verdict.code,
        "world_size": entry.world_size,
        "seconds": round(entry.seconds, 3),
        "memory": entry.memory,
        "host_memory": entry.host_memory,
        "ratios": {stage: worst.ratio for stage, worst in entry.verdict.worst.items()},
        "errors": entry.verdict.errors,
        "before": entry.before,
        "folder": entry.folder,
    }


def summary_of(run: Run, cells: Sequence[CellSummary]) -> dict[str, Any]:
    """Returns the content of ``summary.json``, from the run and the summaries of its cells.

    verdict: the verdict of the run. counts: the number of cells by state. unmet: one sentence for each demand of the
    floor that is not met. since: the changes since the last run and the last green run of the baseline, or null.
    claims: by backend, the cells that it claims, and those that it does not support with the reasons.
    cells: one object for each cell.
    """
    states: States = {cell["id"]: cell["state"] for cell in cells}
    counts = dict.fromkeys(STATES, 0) | Counter(states.values())
    names = ("state", "seconds", "before", "second_class", "errors")
    found = {cell["id"]: outcome(**{name: cell[name] for name in names}) for cell in cells}
    since = run.since(found)
    results = {
        "counts": counts,
        "unmet": run.floor.unmet(states),
        "since": since_to_json(since) if since else None,
        "claims": claims({cell["id"]: (cell["state"], cell["reason"]) for cell in cells}),
        "cells": cells,
    }
    return {"verdict": run.verdict(states), **vars(run), "floor": asdict(run.floor), **results}


def _attempt_to_json(attempt: Attempt) -> dict[str, Any]:
    plain = {name: getattr(attempt, name) for name in ("fresh", "completed", "records")}
    return {**plain, "state": attempt.verdict.state, "reason": attempt.verdict.reason}


@dataclass(frozen=True, kw_only=True)
class Listed:
    """Holds a cell of the list in ``summary.json``."""

    id: str
    folder: str
    state: str


@dataclass(frozen=True, kw_only=True)
class _Table:
    """Holds the table of quantities in ``verdict.json``: names of columns, and rows."""

    columns: tuple[str, ...]
    data: tuple[tuple[str, str, int, float, float, float | None, str, str], ...]


_RUN, _CELLS = TypeAdapter(Run), TypeAdapter(tuple[Listed, ...])
_ENTRY, _VERDICT, _TABLE = TypeAdapter(Entry), TypeAdapter(Verdict), TypeAdapter(_Table)


def read_run(out: Path) -> tuple[Run, list[Entry]]:
    """Reads a run and its cells, in the planned order.

    Raises UsageError for a folder that is not a run's output, was cut short or edited, or contradicts itself.
    """
    run, entries = read_verdicts(out)
    states_in_summary = {cell.id: cell.state for cell in read_summary(out)[1]}
    for entry in entries:
        if (state := states_in_summary[entry.cell]) != entry.verdict.state:
            if state == "not_run" and (advice := run.how_to_end(out)):
                raise UsageError(f"{out / SUMMARY} is older than the verdicts: {advice}")
            raise UsageError(
                f"{out / entry.folder / VERDICT} says {entry.verdict.state}, the summary says {state}: one of them was "
                f"edited or comes from another run; run the cells again"
            )
    return run, entries


def read_verdicts(out: Path) -> tuple[Run, list[Entry]]:
    """Reads a run and its cells like ``read_run``, but the summary may have older states than the verdicts.

    During a run with several processes, each process writes verdicts, but none writes the summary. Raises UsageError.
    """
    run, listed = read_summary(out)
    entries = []
    for cell in listed:
        file = inside(out, out / cell.folder) / VERDICT
        entry = read_entry(file)
        if (entry.cell, entry.folder) != (cell.id, cell.folder):
            raise UsageError(
                f"{file} is about {entry.cell} in {entry.folder}, but the summary says {cell.id} in {cell.folder}: one "
                f"of them was edited or comes from another run; run the cells again"
            )
        other_attempt = entry.other.records if entry.other else ()
        variants = [one.folder for one in entry.variants]
        for path in filter(None, (*entry.records, *other_attempt, entry.oracle, *variants)):
            if os.path.relpath(out / entry.folder / path, out).startswith(os.pardir):
                raise UsageError(f"{file} names {path}, which lies outside of {out}: it was edited; run again")
        entries.append(entry)
    return run, entries


def read_summary(out: Path) -> tuple[Run, list[Listed]]:
    """Reads the run and the list of cells from ``summary.json``. Raises UsageError."""
    file = out / SUMMARY
    values = read_output_json(file)
    try:
        floor = floor_from_json(values["floor"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{file} lacks {error}: it was not written by `parity run`, or edited") from None
    known = {f.name: values[f.name] for f in fields(Run) if f.name in values}
    run = validated(_RUN, {**known, "floor": floor}, file)
    cells = validated(_CELLS, values.get("cells"), file)
    if twice := [cell for cell, count in Counter(cell.id for cell in cells).items() if count > 1]:
        raise UsageError(f"{file} names {', '.join(twice)} twice; run into an empty folder")
    return run, list(cells)


def read_entry(file: Path) -> Entry:
    """Reads a cell from the ``verdict.json`` at ``file``. Raises UsageError for a file that cannot be trusted."""
    values = read_output_json(file)
    table = validated(_TABLE, values.get("quantities"), file)
    if table.data and table.columns != _COLUMNS:
        raise UsageError(f"{file} has columns {', '.join(table.columns)} of quantities; judge the folder again")
    known = {f.name: values[f.name] for f in fields(Entry) if f.name in values}
    if isinstance(other := known.get("other"), dict):
        known["other"] = {**other, "verdict": _verdict(other, (), (), file)}
    verdict = _verdict(values, tuple(_quantities(table)), values.get("strips", ()), file)
    entry = validated(_ENTRY, {**known, "verdict": verdict}, file)
    if entry.cell != "/".join([entry.scenario, entry.model, entry.backend, entry.layout, entry.variant]):
        raise UsageError(
            f"{file} is about {entry.cell}, but names other parts of this id: it was edited or comes from another run; "
            f"run the cells again"
        )
    if verdict.state in ("conforms", "partly_observed") and (outside := verdict.findings):
        raise UsageError(
            f"{entry.cell} conforms according to {file}, but {outside[0].stage} of {outside[0].tensor} is outside its "
            f"tolerance: the file was edited; run the cells again"
        )
    _check_strips(verdict, file)
    return entry


def _quantities(table: _Table) -> Iterator[Quantity]:
    """Yields the rows of a table with ``_COLUMNS``. Without dictionaries, because a run has a million rows."""
    for stage, tensor, step, observed, allowed, max_abs, where, hint in table.data:
        yield Quantity(
            stage=stage,
            tensor=tensor,
            step=step,
            observed=observed,
            allowed=allowed,
            max_abs=max_abs,
            where=where,
            hint=hint,
        )


def _check_strips(verdict: Verdict, file: Path) -> None:
    """Raises UsageError for per-token errors without a quantity, or above the bound of a quantity that is within it."""
    judged = {(q.stage, q.tensor, q.step): q for q in verdict.quantities}
    for strip in verdict.strips:
        q = judged.get((strip.stage, strip.tensor, strip.step))
        if q is None or (q.ratio <= 1 and not all(error <= q.allowed for error in strip.errors)):
            raise UsageError(
                f"{file} has per-token errors of {strip.stage}, step {strip.step}, that contradict the judged "
                f"quantities: it was edited; run the cells again"
            )


def _verdict(values: dict[str, Any], quantities: tuple[Quantity, ...], strips: Any, file: Path) -> Verdict:
    if (state := values.get("state")) not in list(STATES):
        raise UsageError(f"{file} has state {state!r}; known: {', '.join(STATES)}. Update backend-parity")
    fields_of_verdict = {"state": state, "quantities": quantities, "strips": strips}
    fields_of_verdict |= {"reason": values.get("reason"), "second_class": values.get("second_class", "")}
    fields_of_verdict |= {"conventions": values.get("shown_conventions", ()), "code": values.get("code", "")}
    return validated(_VERDICT, fields_of_verdict, file)


def validated(adapter: TypeAdapter[T], values: Any, file: Path) -> T:
    """Converts ``values``, which were read from ``file``, with a pydantic adapter. Raises UsageError."""
    try:
        return adapter.validate_python(values)
    except ValidationError as error:
        raise UsageError(
            f"{file} is not as the suite wrote it ({first_error(error)}): it was edited; run the cells again"
        ) from None


def read_output_json(file: Path) -> dict[str, Any]:
    """Reads a JSON file of an output folder. Raises UsageError if it is missing, cut short, or of another version."""
    try:
        values = parse_strict_json(read_file(file, limit=LONGEST))
    except FileNotFoundError:
        raise UsageError(f"there is no {file}; give the complete --out folder of a parity run") from None
    except Unreadable as error:
        raise UsageError(str(error)) from None
    except ValueError as error:
        raise UsageError(
            f"{file} is not valid JSON ({error}): it was cut short or edited; run the cells again"
        ) from None
    if not isinstance(values, dict) or values.get("schema") != OUTPUT_SCHEMA:
        found = values.get("schema") if isinstance(values, dict) else type(values).__name__
        raise UsageError(
            f"{file} has schema {shown(found)}, this version reads {OUTPUT_SCHEMA}; use the version of the suite "
            f"that wrote it"
        )
    return values


def inside(out: Path, path: Path) -> Path:
    """Returns ``path``. Raises UsageError if it lies outside of ``out``: no other file of this machine may be read."""
    try:
        lies_inside = path.resolve().is_relative_to(out.resolve())
    except (OSError, RuntimeError, ValueError) as error:  # an invalid file name, or a circle of links
        raise UsageError(f"{path} cannot be a path ({error}): the folder was edited; run again") from None
    if not lies_inside:
        raise UsageError(f"{path} lies outside of {out}: the folder was edited; run again")
    return path


def write_output_json(file: Path, values: Any, *, indent: int | None) -> None:
    """Writes a JSON file completely or not at all. Raises Unwritable."""
    write_file(file, dumps(values, indent=indent))
