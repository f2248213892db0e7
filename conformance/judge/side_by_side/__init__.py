"""Compares the cells of one scenario on several backends with the oracle and with each other.

Reads the verdicts and records of a run and writes ``side_by_side.json`` (conformance.results.side_by_side). Needs no
GPU, no backend and no workers. A cell without a complete record is listed with the reason, and is left out of the
comparisons that need the missing part.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from conformance.core.errors import UsageError
from conformance.core.process import map_in_forks
from conformance.judge.cells import one_thread
from conformance.judge.side_by_side.agreement import ORACLE, agreement
from conformance.judge.side_by_side.distances import Bounds, column_of, compare_lines, compare_tensors
from conformance.records.record_format import Line, Lines, RecordError, read_lines
from conformance.records.step_tensors import Record, read_record
from conformance.results.run_results import Entry, inside, read_run
from conformance.results.side_by_side import Difference, Group, Member, Pair, read_groups, write_groups
from conformance.results.trust import check_cell, check_oracle
from conformance.results.verdict import NOT_SEEN
from conformance.spec.conventions import of_oracle
from conformance.spec.known_defects import defects_of
from conformance.spec.observables import Observable, columns
from conformance.spec.precision import FLOAT64

# The differences of two records by column; a record is named by its cell and the digests of its phases. A record alone
# has its differences from the oracle, if it was judged by an oracle with conventions.
Compared = dict[frozenset[tuple[str, ...]], dict[str, Difference]]
PER_FORK = 50  # cells whose comparison takes as long as the start of some processes
NOT_KEPT = "only its scalars were compared with some others, because its tensors were not kept (--keep all keeps them)"


@dataclass(frozen=True, kw_only=True)
class _Observed:
    """The records of a cell's phases, as far as they can be read.

    lines: the lines of all steps. records: the records with their tensors; empty unless all files are intact.
    problem: what is missing; empty if the records are complete.
    """

    observables: tuple[Observable, ...] = ()
    digests: tuple[str, ...] = ()
    lines: tuple[Line, ...] = ()
    records: tuple[Record, ...] = ()
    problem: str = ""


@one_thread()
def write_side_by_side(out: Path, *, parts: Sequence[Path] = ()) -> None:
    """Compares the backends of the run in ``out`` with each other and writes ``out/side_by_side.json``.

    Where tensors were not kept, an earlier comparison of the same records counts, from the run or from its ``parts``.
    Raises UsageError for a folder that is not a run's output.
    """
    groups: dict[str, list[Entry]] = {}
    for entry in read_run(out)[1]:
        if entry.verdict.state != "unsupported":
            groups.setdefault("/".join([entry.scenario, entry.model, entry.variant]), []).append(entry)
    several = {name: entries for name, entries in groups.items() if len({e.backend for e in entries}) > 1}
    earlier = {key: found for folder in (*parts, out) for key, found in _read_earlier(folder).items()}

    def compared(name: str) -> Group:
        return _group(out, name, several[name], earlier)

    longest_first = sorted(several, key=lambda name: len(several[name]), reverse=True)
    forks = sum(map(len, several.values())) // PER_FORK
    found = dict(zip(longest_first, map_in_forks(compared, longest_first, most=forks), strict=True))
    write_groups(out, [found[name] for name in several])


def _read_earlier(out: Path) -> Compared:
    """Returns the differences between every two records in ``side_by_side.json``; empty without that file."""
    try:
        groups = read_groups(out) or ()
    except UsageError:
        return {}
    return {
        frozenset((group.members[n].cell, *group.members[n].records) for n in numbers): dict(found)
        for group in groups
        for numbers, found in [
            *((pair.members, pair.columns) for pair in group.pairs),
            *(((n,), member.oracle) for n, member in enumerate(group.members) if member.conventions),
        ]
    }


def _group(out: Path, name: str, entries: Sequence[Entry], earlier: Compared) -> Group:
    folder = next((path for entry in entries if entry.verdict.quantities and (path := _oracle(out, entry))), None)
    reference = _read_oracle(out, folder) if folder else _Observed(problem="no cell of this scenario was judged")
    observed = [_observe(out, entry, folder, reference) for entry in entries]
    observables = reference.observables or entries[0].observables
    shown = columns(observables)
    bounds: Bounds = {
        (q.stage, q.tensor, q.step): q.allowed
        for entry in sorted(entries, key=lambda entry: not entry.conventions)
        if not _is_of_a_defect(entry)
        for q in entry.verdict.quantities
    }  # those without conventions have the same bounds, because these depend only on the scenario and its precision
    pairs = _compared(entries, observed, reference, bounds, earlier)
    members = [
        _member(entry, one, pairs.get((ORACLE, number), {}) if _declared(entry) else None)
        for number, (entry, one) in enumerate(zip(entries, observed, strict=True))
    ]
    found = agreement(members, pairs, shown, elsewhere=[entry.verdict.first_stage for entry in entries])
    cells = [entry.cell for entry in entries]
    return Group(
        group=name,
        columns=shown,
        state=found.state,
        text=" ".join([found.text, *_reference_note(entries)]),
        families={
            column: tuple(tuple("oracle" if n == ORACLE else cells[n] for n in family) for family in families)
            for column, families in found.families.items()
        },
        members=tuple(members),
        pairs=tuple(Pair(members=pair, columns=worst) for pair, worst in pairs.items() if pair[0] != ORACLE),
    )


def _compared(
    entries: Sequence[Entry], observed: list[_Observed], reference: _Observed, bounds: Bounds, earlier: Compared
) -> dict[tuple[int, int], dict[str, Difference]]:
    """Compares every two members. Where tensors were not kept and ``earlier`` does not help, says so in ``observed``.

    If oracles with conventions judged some members, all are also compared with the oracle without them.
    """
    against = [reference] if any(_declared(entry) for entry in entries) else []
    compared = [(number, one) for number, one in enumerate([*against, *observed], start=-len(against)) if one.lines]
    numbers, lines = [number for number, _ in compared], [one.lines for _, one in compared]
    observables = reference.observables or entries[0].observables
    found = compare_lines(lines, reference.lines, observables=observables, bounds=bounds)
    pairs = {(numbers[a], numbers[b]): worst for (a, b), worst in found.items()}
    if reference.records:
        records = {number: one.records for number, one in compared if one.records}
        numbers = list(records)
        for (a, b), worst in compare_tensors(list(records.values()), reference.records[0], bounds=bounds).items():
            pairs[numbers[a], numbers[b]] |= worst
    for pair, worst in pairs.items():
        members = [number for number in pair if number != ORACLE]
        if slim := [number for number in members if entries[number].slim]:
            keys = frozenset((entries[number].cell, *observed[number].digests) for number in members)
            if known := earlier.get(keys):
                worst |= {column: difference for column, difference in known.items() if column not in worst}
            elif len(members) > 1 or _declared(entries[slim[0]]):
                observed[slim[0]] = replace(observed[slim[0]], problem=NOT_KEPT)
    return pairs


def _reference_note(entries: Sequence[Entry]) -> list[str]:
    """Warns if the reference is not written from the papers."""
    authors = sorted({entry.verdict.second_class for entry in entries} - {""})
    return [f"The reference is {' and '.join(authors)}: {NOT_SEEN}."] if authors else []


def _is_of_a_defect(entry: Entry) -> bool:
    """Whether the verdict's quantities come from the oracle with a defect (conformance.judge.expected_differences)."""
    return bool(defects_of(entry.expected)) and entry.verdict.state == "differs"


def _oracle(out: Path, entry: Entry) -> Path | None:
    return Path(os.path.normpath(out / entry.folder / entry.oracle)) if entry.oracle else None


def _observe(out: Path, entry: Entry, oracle: Path | None, reference: _Observed) -> _Observed:
    """Reads the records of a cell that was judged: the judge has checked that these are complete."""
    if not entry.records or not entry.completed or not entry.verdict.quantities:
        return _Observed(problem=entry.verdict.reason.partition("\n")[0])
    if _is_of_a_defect(entry):
        return _Observed(problem="it also differs from the oracle with its expected defect, and was judged by that one")
    if _oracle(out, entry) != oracle:
        return _Observed(problem="it belongs to another scenario with the same name")
    folder = out / entry.folder
    paths = [folder / record for record in entry.records]
    one = _read(out, paths, partial(check_cell, cell=entry.cell), tensors=not entry.slim)
    if one.problem or entry.slim or not reference.problem:
        return one
    return replace(one, records=(), problem=f"of the oracle, {reference.problem}")


def _read_oracle(out: Path, folder: Path) -> _Observed:
    return _read(out, [folder / FLOAT64], partial(check_oracle, precision=FLOAT64))


def _read(out: Path, paths: Sequence[Path], check: Callable[[Path, Line], None], *, tensors: bool = True) -> _Observed:
    try:
        phases: list[Lines] = [read_lines(inside(out, path)) for path in paths]
        for path, phase in zip(paths, phases, strict=True):
            check(path, phase.header)
    except (RecordError, UsageError) as error:
        return _Observed(problem=str(error))
    observed = _Observed(
        observables=phases[0].observables,
        digests=tuple(phase.digest for phase in phases),
        lines=tuple(line for phase in phases for line in phase.steps),
    )
    if not tensors:
        return observed
    try:
        return replace(observed, records=tuple(read_record(path) for path in paths))
    except RecordError as error:
        problem = f"only its scalars were compared, because its tensors cannot be read: {error}"
        return replace(observed, problem=problem)


def _declared(entry: Entry) -> tuple[str, ...]:
    """Returns the names of the conventions of the oracle that judged the cell: those that show, or if it differs,
    all."""
    declared = [str(one) for one in of_oracle(entry.conventions)]
    shown = declared if entry.verdict.state == "differs" else entry.verdict.conventions
    return tuple(name for name in declared if name in shown)


def _member(entry: Entry, observed: _Observed, against: Mapping[str, Difference] | None) -> Member:
    """Describes a member. against: its differences from the oracle, if one with conventions judged it."""
    found: dict[str, list[Difference]] = defaultdict(list)
    for q in entry.verdict.quantities:
        if column := column_of(entry.observables, q.stage, q.tensor):
            one = Difference(column=column, observed=q.observed, allowed=q.allowed, tensor=q.tensor, step=q.step)
            found[column].append(one)
    worst = {
        column: replace(
            max(differences, key=lambda one: one.ratio),
            since=min((one.step for one in differences if one.ratio > 1), default=None),
        )
        for column, differences in found.items()
    }
    return Member(
        cell=entry.cell,
        state=entry.verdict.state,
        records=observed.digests,
        problem=observed.problem,
        oracle=worst if against is None else against,
        conventions=_declared(entry),
    )
