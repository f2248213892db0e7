"""Compares the cells of one scenario on several backends with the oracle and with each other.

Reads the verdicts and records of a run and writes ``side_by_side.json`` (conformance.results.side_by_side). Needs no
GPU, no backend and no workers. A cell without a complete record is listed with the reason, and is left out of the
comparisons that need the missing part.

Compared are losses, unclipped gradients, norms and updates. Every distance is relative to the norm of the oracle's
tensor; the oracle is not used otherwise, so two records that are wrong in the same way agree. With one unit for all
pairs, the distance is symmetric and obeys the triangle inequality: two records are never further apart than the sum of
their errors against the oracle. So the bound of a pair is twice the bound of a cell (docs/explanations/tolerances.md).
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from conformance.core.errors import UsageError
from conformance.core.process import map_in_forks
from conformance.judge.agreement import ORACLE, MemberPair, agreement, declared, member
from conformance.judge.cells import one_thread
from conformance.judge.tensor_views import Lazy, StepViews, Tensors, TensorView, floor_of_tensors
from conformance.records.record_format import Line, Lines, RecordError, number, read_lines
from conformance.records.step_tensors import Record, StepRecord, read_record
from conformance.results.run_results import Entry, inside, read_run
from conformance.results.side_by_side import Difference, Group, Pair, read_groups, write_groups
from conformance.results.trust import check_cell, check_oracle
from conformance.results.verdict import NOT_SEEN
from conformance.spec.known_defects import defects_of
from conformance.spec.observables import Observable, columns, is_unread
from conformance.spec.precision import FLOAT64

# The differences of two records by column; a record is named by its cell and the digests of its phases. A record alone
# has its differences from the oracle, if it was judged by an oracle with conventions.
Compared = dict[frozenset[tuple[str, ...]], dict[str, Difference]]
Bounds = Mapping[tuple[str, str, int], float]
PER_FORK = 50  # cells whose comparison takes as long as the start of some processes
BYTES_PER_FORK = 2**29  # of records, likewise
CACHED = 2**14  # numbers of each member that are compared at a time
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
    members = [entry for entries in several.values() for entry in entries]
    forks = len(members) // PER_FORK + sum(map(partial(_bytes, out), members)) // BYTES_PER_FORK
    found = dict(zip(longest_first, map_in_forks(compared, longest_first, most=forks), strict=True))
    write_groups(out, [found[name] for name in several])


def _bytes(out: Path, entry: Entry) -> int:
    """Returns the size of the files of steps of a cell; 0 if its records are not inside ``out``."""
    try:
        folders = [inside(out, out / entry.folder / record) for record in entry.records]
    except UsageError:
        return 0  # _read reports it
    return sum(file.lstat().st_size for folder in folders for file in folder.glob("*"))


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
        member(entry, one.digests, one.problem, pairs.get((ORACLE, number), {}) if declared(entry) else None)
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
    against = [reference] if any(declared(entry) for entry in entries) else []
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
            elif len(members) > 1 or declared(entries[slim[0]]):
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


def compare_lines(
    members: Sequence[Sequence[Line]], oracle: Sequence[Line], *, observables: Sequence[Observable], bounds: Bounds
) -> dict[MemberPair, dict[str, Difference]]:
    """Compares the scalars of every two members. Returns the worst difference by pair and column.

    members: the step lines of each member. bounds: the bound of a cell against the oracle by (stage, tensor, step).
    """
    found = {o.column: _Worst(len(members)) for o in observables if o.column and o.kind == "scalar"}
    for o in observables:
        if o.column not in found or o.kind != "scalar":
            continue
        for step, reference in enumerate(oracle):
            if o.lost_if and number(reference["values"][o.lost_if]):
                continue
            lines = [steps[step] if step < len(steps) else {} for steps in members]
            values = [line.get("values", {}).get(o.key) for line in lines]
            scalars = [None if value is None else torch.tensor(number(value), dtype=torch.float64) for value in values]
            allowed = 2 * bounds.get((o.stage, o.key, step), 0.0)
            unit = abs(number(reference["values"][o.scale or o.key]))
            distances = _pairwise_distances(scalars, unit=unit)
            found[o.column].update(distances, allowed=allowed, tensor=o.key, step=step)
        for index, steps in enumerate(members):
            if all(line.get("values", {}).get(o.key) is None for line in steps):  # a backend may report no norm
                found[o.column].leave_out(index)
    return _by_pair(found)


def compare_tensors(
    members: Sequence[Sequence[Record]], oracle: Record, *, bounds: Bounds
) -> dict[MemberPair, dict[str, Difference]]:
    """Compares the tensors of every two members. Returns the worst difference by pair and column.

    members: the records of the phases of each member. bounds: as in ``compare_lines``. One tensor of each member is in
    memory at a time.
    """
    shown = [o for o in oracle.observables if o.column and o.kind == "tensors"]
    found = {o.column: _Worst(len(members)) for o in shown}
    start = StepViews(oracle.loaded.tensors())
    steps = [{step.step: step for phase in phases for step in phase.steps} for phases in members]
    with _open_files(phases[0].loaded for phases in members) as starts:
        for reference in oracle.steps:
            expected, at = StepViews(reference.tensors()), reference.step
            with _open_files(own.get(at) for own in steps) as files:
                for o in shown:
                    if not o.applies(at) or any(own.get(at) and is_unread(o.key, own[at].line) for own in steps):
                        continue
                    views = [expected[o.key], *(_view(file, o.key) for file in files)]
                    if o.change:
                        before = [start[o.key], *(_view(file, o.key) for file in starts)]
                        views = list(map(TensorView.since, views, before))
                    reference_tensors, *own = (view.tensors for view in views)
                    for name, unit in _units(reference_tensors, own):
                        allowed = 2 * bounds.get((o.stage, name, at), 0.0)
                        distances = _pairwise_distances([tensors.get(name) for tensors in own], unit=unit)
                        found[o.column].update(distances, allowed=allowed, tensor=name, step=at)
    return _by_pair(found)


@contextlib.contextmanager
def _open_files(steps: Iterable[StepRecord | None]) -> Iterator[list[Any]]:
    """Opens the file of one step of each member; None for a member that did not record this step."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(step.open()) if step else None for step in steps]


def _view(file: Any, key: str) -> TensorView:
    """Views the tensors of an observable in an open file. They are read on demand."""
    paths = file.keys() if file else ()
    names = sorted(path.removeprefix(f"{key}/") for path in paths if path.startswith(f"{key}/"))
    return TensorView(tensors=Lazy(names, lambda name: file.get_tensor(f"{key}/{name}")))


def _units(reference: Tensors, members: Sequence[Tensors]) -> list[tuple[str, float]]:
    """Returns the name of each tensor that the oracle or a member has, and the norm that its errors are relative to."""
    floor = floor_of_tensors(reference)
    names = {name: None for tensors in members for name in tensors}
    norms = {name: tensor.double().norm().item() for name, tensor in reference.items()}
    return [(name, max(norms.get(name, 0.0), floor)) for name in {**norms, **names}]


def _pairwise_distances(tensors: Sequence[torch.Tensor | None], *, unit: float) -> torch.Tensor:
    """Returns ||x_i - x_j|| / unit for all i, j: float64 (members, members).

    Infinite if only one of the two members has the tensor, if shapes differ, or if a number is not finite. -1 if
    neither of the two has the tensor.
    """
    matrix = torch.full((len(tensors), len(tensors)), math.inf, dtype=torch.float64)
    shapes = [None if tensor is None else tuple(tensor.shape) for tensor in tensors]
    for shape in set(shapes):
        same_shape = torch.tensor([i for i, other in enumerate(shapes) if other == shape])
        values = [t.flatten() for i in same_shape if (t := tensors[i]) is not None]
        if values:
            first, second = same_shape[torch.triu_indices(len(values), len(values), offset=1)]
            matrix[first, second] = matrix[second, first] = _distances(values) / (unit or 1.0)
        else:
            matrix[same_shape[:, None], same_shape] = -1.0
    return matrix.nan_to_num(nan=math.inf, posinf=math.inf)


def _distances(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the distance of every two of these vectors of one length, in the order of torch.pdist: (pairs,) float64.

    Columns are taken in pieces that stay in a processor's cache.
    """
    squares = torch.zeros(math.comb(len(values), 2), dtype=torch.float64)
    for start in range(0, len(values[0]), CACHED):
        piece = torch.stack([value[start : start + CACHED].double() for value in values])  # (members, columns)
        squares += torch.pdist(piece).square()
    return squares.sqrt()


class _Worst:
    """Keeps the worst difference of one column so far, for all pairs at once, in (members, members) tensors."""

    def __init__(self, members: int) -> None:
        self.ratio = torch.full((members, members), -1.0, dtype=torch.float64)
        self.observed, self.allowed = torch.zeros_like(self.ratio), torch.zeros_like(self.ratio)
        self.at = torch.zeros_like(self.ratio, dtype=torch.long)
        self.since = torch.full_like(self.at, -1)
        self.places: list[tuple[str, int]] = []

    def update(self, distances: torch.Tensor, *, allowed: float, tensor: str, step: int) -> None:
        """Folds the pairwise distances (members, members) of one tensor at one step into the worst so far.

        Call it in the order of the steps: ``since`` keeps the first step out of tolerance.
        """
        over = distances / allowed if allowed else torch.full_like(distances, math.inf)
        ratio = torch.where(distances > 0, over, distances)  # 0 and -1 do not depend on the bound
        worse = ratio > self.ratio
        self.ratio[worse], self.observed[worse], self.allowed[worse] = ratio[worse], distances[worse], allowed
        self.at[worse] = len(self.places)
        self.since[(ratio > 1) & (self.since < 0)] = step
        self.places.append((tensor, step))

    def leave_out(self, member: int) -> None:
        """Removes a member: its pairs have no difference in this column."""
        self.ratio[member, :] = self.ratio[:, member] = -1.0

    def difference(self, pair: MemberPair, column: str) -> Difference | None:
        """Returns the worst difference of a pair; None if neither member has the column."""
        if self.ratio[pair] < 0:
            return None
        tensor, step = self.places[int(self.at[pair])]
        return Difference(
            column=column,
            observed=self.observed[pair].item(),
            allowed=self.allowed[pair].item(),
            tensor=tensor,
            step=step,
            since=since if (since := int(self.since[pair])) >= 0 else None,
        )


def _by_pair(found: Mapping[str, _Worst]) -> dict[MemberPair, dict[str, Difference]]:
    members = max((len(worst.ratio) for worst in found.values()), default=0)
    return {
        pair: {column: worst for column, worsts in found.items() if (worst := worsts.difference(pair, column))}
        for pair in combinations(range(members), 2)
    }
