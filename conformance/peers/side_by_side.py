"""Side by side: the cells of one scenario on several backends, against the oracle and against each other.

Reads the verdicts and records of a run and writes ``side_by_side.json`` (docs/architecture.md has its fields); needs no
GPU, no backend and no ranks. Whoever has no complete record is listed with the reason and takes part in nothing that
would need one.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from conformance.observable import columns
from conformance.peers.agreement import ORACLE, Member, agreement
from conformance.peers.pairs import Bounds, Difference, column_of, compare_lines, compare_tensors
from conformance.record.format import Line, Lines, RecordError, read_lines
from conformance.record.results import SCHEMA, Entry, inside, read_run, replace_json
from conformance.record.tensors import Record, read_record

FILE = "side_by_side.json"


@dataclass(frozen=True, kw_only=True)
class _Observed:
    """The records of a cell's legs as far as they can be read: the lines of all steps, and the records with tensors
    only if the files are intact; ``problem`` says what is missing."""

    digests: tuple[str, ...] = ()
    lines: tuple[Line, ...] = ()
    records: tuple[Record, ...] = ()
    problem: str = ""


def write_side_by_side(out: Path) -> None:
    """Compare the backends of the run in ``out`` with each other and write ``out/side_by_side.json``.

    Raises UsageError for a folder that is not a run's output.
    """
    groups: dict[str, list[Entry]] = {}
    for entry in read_run(out)[1]:
        if entry.verdict.state != "unsupported":
            groups.setdefault("/".join([entry.scenario, entry.model, entry.variant]), []).append(entry)
    several = {name: entries for name, entries in groups.items() if len({e.backend for e in entries}) > 1}
    values = [_group(out, name, entries) for name, entries in several.items()]
    replace_json(out / FILE, {"schema": SCHEMA, "groups": values}, indent=None)


def _group(out: Path, name: str, entries: Sequence[Entry]) -> dict[str, Any]:
    folder = next((path for entry in entries if (path := _oracle(out, entry))), None)
    reference = _read([folder / "float64"]) if folder else _Observed(problem="no cell of this scenario has a record")
    observed = [_observe(out, entry, folder, reference) for entry in entries]
    observables = entries[0].observables
    shown = columns(observables)
    bounds: Bounds = {
        (q.stage, q.tensor, q.step): q.allowed for entry in entries for q in entry.verdict.quantities
    }  # the same for all: the rule, and the noise that it measures, belong to the scenario and its precision
    with_lines = [number for number, one in enumerate(observed) if one.lines]
    pairs: dict[tuple[int, int], dict[str, Difference]] = {}
    lines = [observed[number].lines for number in with_lines]
    for (a, b), worst in compare_lines(lines, reference.lines, observables=observables, bounds=bounds).items():
        pairs[with_lines[a], with_lines[b]] = worst
    if reference.records:
        records = {number: one.records for number, one in enumerate(observed) if one.records}
        numbers = list(records)
        for (a, b), worst in compare_tensors(list(records.values()), reference.records[0], bounds=bounds).items():
            pairs[numbers[a], numbers[b]] |= worst
    members = [_member(entry, one) for entry, one in zip(entries, observed, strict=True)]
    found = agreement(members, pairs, shown)
    cells = [entry.cell for entry in entries]
    return {
        "group": name,
        "columns": list(shown),
        "state": found.state,
        "text": found.text,
        "families": {
            column: [["oracle" if n == ORACLE else cells[n] for n in family] for family in families]
            for column, families in found.families.items()
        },
        "members": [
            {
                "cell": cell,
                "state": member.state,
                "records": one.digests,
                "problem": one.problem,
                "oracle": _columns(member.oracle),
            }
            for cell, one, member in zip(cells, observed, members, strict=True)
        ],
        "pairs": [{"members": list(pair), "columns": _columns(worst)} for pair, worst in pairs.items()],
    }


def _oracle(out: Path, entry: Entry) -> Path | None:
    return inside(out, out / entry.folder / entry.oracle).resolve() if entry.oracle else None


def _observe(out: Path, entry: Entry, oracle: Path | None, reference: _Observed) -> _Observed:
    if not entry.records or not entry.completed or not entry.verdict.quantities:
        return _Observed(problem=entry.verdict.reason.partition("\n")[0])
    if _oracle(out, entry) != oracle:
        return _Observed(problem="it is of another scenario with the same name")
    one = _read([inside(out, out / entry.folder / record) for record in entry.records])
    if one.problem or not reference.problem:
        return one
    return replace(one, records=(), problem=f"of the oracle, {reference.problem}")


def _read(paths: Sequence[Path]) -> _Observed:
    try:
        legs: list[Lines] = [read_lines(path) for path in paths]
    except RecordError as error:
        return _Observed(problem=str(error))
    lines = tuple(line for leg in legs for line in leg.steps)
    digests = tuple(leg.digest for leg in legs)
    try:
        return _Observed(digests=digests, lines=lines, records=tuple(read_record(path) for path in paths))
    except RecordError as error:
        problem = f"only its loss and gradient norm were, for its tensors are not there: {error}"
        return _Observed(digests=digests, lines=lines, problem=problem)


def _member(entry: Entry, observed: _Observed) -> Member:
    found: dict[str, list[Difference]] = defaultdict(list)
    for q in entry.verdict.quantities:
        if column := column_of(entry.observables, q.stage, q.tensor):
            one = Difference(observed=q.observed, allowed=q.allowed, tensor=q.tensor, step=q.step)
            found[column].append(one)
    worst = {
        column: replace(
            max(differences, key=lambda one: one.ratio),
            since=min((one.step for one in differences if one.ratio > 1), default=None),
        )
        for column, differences in found.items()
    }
    return Member(
        backend=entry.backend,
        layout=entry.layout,
        state=entry.verdict.state,
        oracle=worst,
        elsewhere=entry.verdict.first_stage,
        problem=observed.problem,
    )


def _columns(worst: Any) -> dict[str, dict[str, Any]]:
    return {name: {**asdict(difference), "ratio": difference.ratio} for name, difference in worst.items()}
