"""Measures the distance between every two of several records of the same scenario: the backends of one run.

Compared are losses, unclipped gradients, norms and updates. Every distance is relative to the norm of the oracle's
tensor; the oracle is not used otherwise, so two records that are wrong in the same way agree. With one unit for all
pairs, the distance is symmetric and obeys the triangle inequality: two records are never further apart than the sum of
their errors against the oracle. So the bound of a pair is twice the bound of a cell
(docs/explanations/tolerances.md).
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch

from conformance.judge.tensor_views import Lazy, StepViews, Tensors, TensorView, floor_of_tensors
from conformance.records.record_format import Line, number
from conformance.records.step_tensors import Record, StepRecord
from conformance.results.side_by_side import Difference
from conformance.spec.observables import AGAINST_REBUILT, Observable, is_unread

Bounds = Mapping[tuple[str, str, int], float]
Pair = tuple[int, int]  # numbers of two members


def column_of(observables: Sequence[Observable], stage: str, tensor: str) -> str | None:
    """Returns the column of a judged quantity; None for settings and for quantities compared within one cell."""
    if tensor.endswith(AGAINST_REBUILT):
        return None
    for observable in observables:
        shown = observable.kind == "tensors" or tensor == observable.key
        if observable.column and observable.stage == stage and shown:
            return observable.column
    return None


def compare_lines(
    members: Sequence[Sequence[Line]], oracle: Sequence[Line], *, observables: Sequence[Observable], bounds: Bounds
) -> dict[Pair, dict[str, Difference]]:
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
        for member, steps in enumerate(members):
            if all(line.get("values", {}).get(o.key) is None for line in steps):  # a backend may report no norm
                found[o.column].leave_out(member)
    return _by_pair(found)


def compare_tensors(
    members: Sequence[Sequence[Record]], oracle: Record, *, bounds: Bounds
) -> dict[Pair, dict[str, Difference]]:
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
        values = [t.double().flatten() for i in same_shape if (t := tensors[i]) is not None]
        if values:  # cdist's faster algorithm, by matrix products, loses distances below 1e-8
            stacked = torch.stack(values)
            distances = torch.cdist(stacked, stacked, compute_mode="donot_use_mm_for_euclid_dist") / (unit or 1.0)
        else:
            distances = torch.full((len(same_shape), len(same_shape)), -1.0, dtype=torch.float64)
        matrix[same_shape[:, None], same_shape] = distances
    return matrix.nan_to_num(nan=math.inf, posinf=math.inf)


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

    def difference(self, pair: Pair, column: str) -> Difference | None:
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


def _by_pair(found: Mapping[str, _Worst]) -> dict[Pair, dict[str, Difference]]:
    members = max((len(worst.ratio) for worst in found.values()), default=0)
    return {
        pair: {column: worst for column, worsts in found.items() if (worst := worsts.difference(pair, column))}
        for pair in combinations(range(members), 2)
    }
