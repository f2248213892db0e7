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

from conformance.peers.agreement import ORACLE, Member, agreement
from conformance.peers.pairs import Bounds, Difference, column_of, compare_lines, compare_tensors
from conformance.record.tensors import Record, RecordError, read_lines, read_record
from conformance.record.results import Entry, read_results, replace_json

FILE = "side_by_side.json"
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class _Observed:
    """What is left of a cell's record. ``lines`` are those of its steps; without tensors there is no ``record``."""

    digest: str = ""
    lines: tuple[dict[str, Any], ...] = ()
    record: Record | None = None
    problem: str = ""


def write_side_by_side(out: Path) -> None:
    """Compare the backends of the run in ``out`` with each other and write ``out/side_by_side.json``.

    Raises ValueError for a folder that is not a run's output.
    """
    groups: dict[str, list[Entry]] = {}
    for entry in read_results(out)[1]:
        scenario, model, _, _, *variant = entry.details["cell"].split("/")  # variant: precision, seed, planted faults
        if entry.verdict.state != "unsupported":
            groups.setdefault("/".join([scenario, model, *variant]), []).append(entry)
    several = {n: entries for n, entries in groups.items() if len({e.details["backend"] for e in entries}) > 1}
    values = [_group(out, name, entries) for name, entries in several.items()]
    replace_json(out / FILE, {"schema": SCHEMA, "groups": values})


def _group(out: Path, name: str, entries: Sequence[Entry]) -> dict[str, Any]:
    oracle = next((path for entry in entries if (path := _oracle(out, entry))), None)
    reference = _read(oracle) if oracle else _Observed(problem="no cell of this scenario has a record")
    observed = [_observe(out, entry, oracle, reference) for entry in entries]
    bounds: Bounds = {
        (q["stage"], q["tensor"], q["step"]): q["allowed"] for entry in entries for q in entry.verdict.quantities
    }  # the same for all: the rule, and the noise that it measures, belong to the scenario and its precision
    with_lines = [number for number, one in enumerate(observed) if one.lines]
    pairs: dict[tuple[int, int], dict[str, Difference]] = {}
    lines = compare_lines([observed[n].lines for n in with_lines], reference.lines, bounds=bounds)
    for (a, b), columns in lines.items():
        pairs[with_lines[a], with_lines[b]] = columns
    if reference.record:
        records = {number: one.record for number, one in enumerate(observed) if one.record}
        numbers = list(records)
        for (a, b), columns in compare_tensors(list(records.values()), reference.record, bounds=bounds).items():
            pairs[numbers[a], numbers[b]] |= columns
    members = [_member(entry, one) for entry, one in zip(entries, observed, strict=True)]
    found = agreement(members, pairs)
    cells = [entry.details["cell"] for entry in entries]
    return {
        "group": name,
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
                "record": one.digest,
                "problem": one.problem,
                "oracle": _columns(member.oracle),
            }
            for cell, one, member in zip(cells, observed, members, strict=True)
        ],
        "pairs": [{"members": list(pair), "columns": _columns(columns)} for pair, columns in pairs.items()],
    }


def _oracle(out: Path, entry: Entry) -> Path | None:
    path = entry.details["oracle"]
    return (out / entry.details["folder"] / path).resolve() if path else None


def _observe(out: Path, entry: Entry, oracle: Path | None, reference: _Observed) -> _Observed:
    if not entry.details["record"] or not entry.details["completed"] or not entry.verdict.quantities:
        return _Observed(problem=entry.verdict.reason.partition("\n")[0])
    if _oracle(out, entry) != oracle:
        return _Observed(problem="it is of another scenario with the same name")
    one = _read(out / entry.details["folder"] / entry.details["record"])
    if one.problem or not reference.problem:
        return one
    return _Observed(digest=one.digest, lines=one.lines, problem=f"of the oracle, {reference.problem}")


def _read(path: Path) -> _Observed:
    try:
        header, *steps, footer = read_lines(path)
    except RecordError as error:
        return _Observed(problem=str(error))
    assert header["type"] == "header"
    lines = tuple(step for step in steps if step["step"] >= 0)
    try:
        return _Observed(digest=footer["sha256"], lines=lines, record=read_record(path))
    except RecordError as error:
        problem = f"only its loss and gradient norm were, for its tensors are not there: {error}"
        return _Observed(digest=footer["sha256"], lines=lines, problem=problem)


def _member(entry: Entry, observed: _Observed) -> Member:
    found: dict[str, list[Difference]] = defaultdict(list)
    for q in entry.verdict.quantities:
        if column := column_of(q["stage"], q["tensor"]):
            one = Difference(observed=q["observed"], allowed=q["allowed"], tensor=q["tensor"], step=q["step"])
            found[column].append(one)
    worst = {
        column: replace(
            max(differences, key=lambda one: one.ratio),
            since=min((one.step for one in differences if one.ratio > 1), default=None),
        )
        for column, differences in found.items()
    }
    return Member(
        backend=entry.details["backend"],
        layout=entry.details["layout"],
        state=entry.verdict.state,
        oracle=worst,
        elsewhere=entry.verdict.first_stage,
        problem=observed.problem,
    )


def _columns(columns: Any) -> dict[str, dict[str, Any]]:
    return {name: {**asdict(difference), "ratio": difference.ratio} for name, difference in columns.items()}
