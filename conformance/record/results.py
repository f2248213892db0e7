"""Results: verdicts and the summary of a run on disk; read and written here and nowhere else, without torch.

docs/architecture.md has the fields of ``summary.json`` and ``verdict.json``. What follows from quantities (findings,
worst of a stage, the verdict of a run) is worked out when it is asked for and never read from a file, so that no file
can claim more than it shows.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import conformance
from conformance.observable import Observable, observables_from_json, observables_to_json, stages
from conformance.record.coverage import Floor, States, claims, floor_from_json
from conformance.record.format import dumps, number
from conformance.record.states import STATES, RunVerdict, State, overall
from conformance.validation import UsageError

SUMMARY, VERDICT = "summary.json", "verdict.json"
SCHEMA = 2
_NOT_PLAIN = ("verdict", "observables", "other")  # fields of an entry that JSON holds in another form
_COLUMNS = ("stage", "tensor", "step", "observed", "allowed", "max_abs", "where", "hint")


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One judged number: how far it is from the reference, and how far it may be.

    observed: the relative error. allowed: its bound. tensor: what was compared, within its stage. step: -1 is as
    loaded.
    max_abs, where: the largest absolute difference and its place, where they are known. hint: a guess at the cause, of
    a finding.
    """

    stage: str
    tensor: str
    step: int
    observed: float
    allowed: float
    max_abs: float | None = None
    where: str = ""
    hint: str = ""

    @property
    def ratio(self) -> float:
        """Observed / allowed; infinite for NaN, and for any error where none is allowed."""
        if self.observed == 0:
            return 0.0
        if math.isnan(self.observed) or not self.allowed > 0:
            return math.inf
        return self.observed / self.allowed

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        size = f"{self.observed:.2e} off, allowed {self.allowed:.2e}"
        return f"{self.stage}, step {self.step}: {self.tensor} is {size}{hint}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is said of one cell. ``quantities``: all that was compared, by step and then in causal order."""

    state: State
    reason: str
    quantities: tuple[Quantity, ...] = ()

    @property
    def findings(self) -> tuple[Quantity, ...]:
        """The quantities outside their tolerance."""
        return tuple(q for q in self.quantities if not q.ratio <= 1)

    @property
    def first_stage(self) -> str:
        """Stage of the first finding; empty if there is none."""
        return self.findings[0].stage if self.findings else ""

    @property
    def worst(self) -> dict[str, Quantity]:
        """The quantity with the highest ratio of each stage that was compared, in the order of their appearance."""
        worst: dict[str, Quantity] = {}
        for q in self.quantities:
            if q.stage not in worst or q.ratio > worst[q.stage].ratio:
                worst[q.stage] = q
        return worst


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One of the times that a cell was run, and the verdict of that one alone; a file keeps no quantities of it.

    fresh: the ranks had seen no other cell. records: of its legs, in the cell's folder, as far as they came. completed:
    all legs came to their end.
    """

    fresh: bool
    verdict: Verdict
    completed: bool
    records: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One cell of a run, as it stands in the output folder.

    cell: its id; scenario, model, backend, layout and variant (precision, program, seed, faults) are the parts of it.
    folder: of the cell, in the output folder. records: of its legs, in the cell's folder, as far as they came; oracle:
    the folder of the oracle's records, from the cell's folder. completed: all legs came to their end. expected: what
    the backend says must differ. reproduce: a command. other: of a cell that was run once more, in fresh ranks, the
    attempt that the records are not of.
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
    expected: dict[str, Any] | None
    reproduce: str
    observables: tuple[Observable, ...] = ()
    verdict: Verdict
    other: Attempt | None = None

    @property
    def stages(self) -> tuple[str, ...]:
        """All stages in causal order, whether anything of them was observed or not."""
        return stages(self.observables)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What ``summary.json`` says of the run as a whole. ``finished`` is None while it goes on, or if it was cut
    short.
    """

    started: str
    finished: str | None
    seconds: float
    profile: str
    device: str
    command: str
    environment: Mapping[str, Any] = field(default_factory=dict)
    floor: Floor = field(default_factory=Floor)

    def verdict(self, entries: Sequence[Entry]) -> RunVerdict:
        """One word for the run, worked out from its cells."""
        states = states_of(entries)
        return overall(states.values(), complete=self.finished is not None and not self.floor.unmet(states))


def states_of(entries: Sequence[Entry]) -> States:
    """The states of the cells, by id."""
    return {entry.cell: entry.verdict.state for entry in entries}


def write_entry(out: Path, entry: Entry) -> None:
    """Write the ``verdict.json`` of one cell."""
    folder = out / entry.folder
    folder.mkdir(parents=True, exist_ok=True)
    values = {f.name: getattr(entry, f.name) for f in fields(entry) if f.name not in _NOT_PLAIN}
    verdict = entry.verdict
    rows = [[getattr(q, column) for column in _COLUMNS] for q in verdict.quantities]
    values |= {
        "observables": observables_to_json(entry.observables),
        "state": verdict.state,
        "reason": verdict.reason,
        "other": _attempt_to_json(entry.other) if entry.other else None,
        "quantities": {"columns": _COLUMNS, "data": rows},
    }
    replace_json(folder / VERDICT, {"schema": SCHEMA, **values}, indent=None)


def write_summary(out: Path, run: Run, entries: Sequence[Entry]) -> None:
    """Write ``summary.json``."""
    cells = [
        {
            "id": entry.cell,
            "state": entry.verdict.state,
            "reason": entry.verdict.reason,
            "world_size": entry.world_size,
            "seconds": round(entry.seconds, 3),
            "ratios": {stage: worst.ratio for stage, worst in entry.verdict.worst.items()},
            "folder": entry.folder,
        }
        for entry in entries
    ]
    states = states_of(entries)
    counts = dict.fromkeys(STATES, 0) | Counter(states.values())
    head = {"schema": SCHEMA, "suite_version": conformance.__version__, "verdict": run.verdict(entries)}
    lost, gained = run.floor.changes(states)
    told = {
        "counts": counts,
        "unmet": run.floor.unmet(states),
        "coverage": {"lost": [vars(change) for change in lost], "gained": [vars(change) for change in gained]},
        "claims": claims({entry.cell: (entry.verdict.state, entry.verdict.reason) for entry in entries}),
        "cells": cells,
    }
    replace_json(out / SUMMARY, {**head, **vars(run), "floor": asdict(run.floor), **told}, indent=1)


def read_run(out: Path) -> tuple[Run, list[Entry]]:
    """A run and its cells, in the order in which they were planned.

    Raises UsageError for a folder that is not a run's output, was cut short or edited, or contradicts itself.
    """
    run, entries = read_verdicts(out)
    said = {cell["id"]: cell.get("state") for cell in read_json(out / SUMMARY)["cells"]}
    for entry in entries:
        if (state := said[entry.cell]) != entry.verdict.state:
            raise UsageError(
                f"{out / entry.folder / VERDICT} says {entry.verdict.state}, the summary says {state}: one of them was "
                f"edited or comes from another run; run the cells again"
            )
    return run, entries


def read_verdicts(out: Path) -> tuple[Run, list[Entry]]:
    """As ``read_run``, where the summary may be behind the verdicts: several processes write these, and none that."""
    summary = read_json(out / SUMMARY)
    try:
        run = Run(**{f.name: summary[f.name] for f in fields(Run)} | {"floor": floor_from_json(summary["floor"])})
        listed = [(str(cell["id"]), out / cell["folder"]) for cell in summary["cells"]]
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{out / SUMMARY} lacks {error}: it was not written by `parity run`, or edited") from None
    twice = [cell for cell, count in Counter(cell for cell, _ in listed).items() if count > 1]
    if twice:
        raise UsageError(f"{out / SUMMARY} names {', '.join(twice)} twice; run into an empty folder")
    entries = []
    for cell, folder in listed:
        entry = read_entry(inside(out, folder) / VERDICT)
        if entry.cell != cell:
            raise UsageError(
                f"{folder / VERDICT} is about {entry.cell}, the summary says {cell}: one of them was edited or comes "
                f"from another run; run the cells again"
            )
        entries.append(entry)
    return run, entries


def read_entry(file: Path) -> Entry:
    """The cell whose ``verdict.json`` is ``file``. Raises UsageError for a file that cannot be trusted."""
    values = read_json(file)
    try:
        quantities = tuple(_quantity(values["quantities"]["columns"], row) for row in values["quantities"]["data"])
        if values["state"] not in STATES:
            raise UsageError(f"{file} has state {values['state']!r}; known: {', '.join(STATES)}. Update backend-parity")
        verdict = Verdict(state=values["state"], reason=values["reason"], quantities=quantities)
        known = {f.name: values[f.name] for f in fields(Entry) if f.name not in (*_NOT_PLAIN, "records")}
        observables = observables_from_json(values["observables"])
        other = _attempt(values["other"]) if values["other"] else None
        entry = Entry(**known, records=tuple(values["records"]), observables=observables, verdict=verdict, other=other)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{file} is not as the suite wrote it ({error!r}): it was edited; run the cells again"
        ) from None
    if verdict.state in ("conforms", "partly_observed") and (outside := verdict.findings):
        raise UsageError(
            f"{entry.cell} is said to conform, yet {outside[0].stage} of {outside[0].tensor} is outside its tolerance: "
            f"{file} was edited; run the cells again"
        )
    return entry


def _attempt_to_json(attempt: Attempt) -> dict[str, Any]:
    kept = {name: getattr(attempt, name) for name in ("fresh", "completed", "records")}
    return {**kept, "state": attempt.verdict.state, "reason": attempt.verdict.reason}


def _attempt(values: dict[str, Any]) -> Attempt:
    """Raises KeyError or TypeError for what ``write_entry`` has not written."""
    if values["state"] not in STATES:
        raise TypeError(f"a state, not {values['state']!r}")
    return Attempt(
        fresh=bool(values["fresh"]),
        verdict=Verdict(state=values["state"], reason=str(values["reason"])),
        completed=bool(values["completed"]),
        records=tuple(map(str, values["records"])),
    )


def _quantity(columns: Sequence[str], row: Sequence[Any]) -> Quantity:
    values = dict(zip(columns, row, strict=True))
    for name in ("observed", "allowed"):
        values[name] = number(values[name])
    if values["max_abs"] is not None:
        values["max_abs"] = number(values["max_abs"])
    return Quantity(**values)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file of an output folder. Raises UsageError where it is missing, cut short, or of another version."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no {file}; give the complete --out folder of a parity run") from None
    except ValueError as error:
        raise UsageError(
            f"{file} is not valid JSON ({error}): it was cut short or edited; run the cells again"
        ) from None
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        found = values.get("schema") if isinstance(values, dict) else type(values).__name__
        raise UsageError(
            f"{file} has schema {found}, this version reads {SCHEMA}; use the version of the suite that wrote it"
        )
    return values


def inside(out: Path, path: Path) -> Path:
    """``path``, provided that it lies in the output folder: nothing else of this machine is read or shown."""
    if not path.resolve().is_relative_to(out.resolve()):
        raise UsageError(f"{path} lies outside of {out}: the folder was edited; run again")
    return path


def replace_json(file: Path, values: Any, *, indent: int | None) -> None:
    """Write a JSON file whole or not at all."""
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(dumps(values, indent=indent), encoding="utf-8")
    unfinished.rename(file)
