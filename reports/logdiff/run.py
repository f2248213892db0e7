"""Makes a run of a log's rows: its curves under canonical names, each step once and in order.

Blanks: where a log names a metric at a step and says no number, JSON's null or an empty cell of a table. JSON has no
NaN, and serializers write null for it (orjson, JavaScript, pandas; pandas leaves the cell of a CSV empty). The same is
written of a metric that a step does not have, such as an evaluation. The other steps tell: a blank where the metric was
due, on a step that has what it usually comes with, is NaN. Any other blank is no value;
nor is an empty cell of a table whose later cells have numbers: a log that lacks some is not told from pandas' NaN.

Several processes may log each step. Their numbers are averaged, as a trainer averages a loss over ranks, and those of
ranks that the log names are kept as well. Where a log
goes back to a step that it had (a resume), the later lines count.

What had to be put right on the way is kept as notes, in words, and reported with the result.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.core.errors import UsageError
from reports.logdiff.metrics import METRICS, OF_RANK, TOKENS, Place, canonical, is_evaluation, is_known, plain_name
from reports.logdiff.rows import Fixed, Log, Row, times
from reports.wording import plural

FIRST_RANK = "rank 0"
SHOWN = 5  # places of a resume, and names, in a note


def nan_steps(logged: Mapping[str, Set[int]], blank: Mapping[str, Set[int]]) -> dict[str, list[int]]:
    """Of each metric the steps at which its blank is NaN, where there are any.

    ``logged``: the steps at which metrics have numbers; ``blank``: those at which they are named without one.
    """
    found = {metric: _due(metric, logged, steps - logged.get(metric, set())) for metric, steps in blank.items()}
    return {metric: steps for metric, steps in found.items() if steps}


def _due(metric: str, logged: Mapping[str, Set[int]], blank: Set[int]) -> list[int]:
    """The ``blank`` steps at which the metric was due: those at its usual distance from one that has it.

    Distances count the steps of its company. A metric that has a number once or never is due at each of them, unless
    it is an evaluation's.
    """
    own = logged.get(metric, set())
    other_steps = [steps for name, steps in logged.items() if name != metric and not is_evaluation(name)]
    company = sorted(set().union(*(steps for steps in other_steps if not own or steps & own)))
    places = {step: place for place, step in enumerate(company)}
    numbered = [places[step] for step in sorted(own) if step in places]
    if len(numbered) > 1:
        every = median_low([b - a for a, b in pairwise(numbered)])
    elif is_evaluation(metric):
        return []
    else:
        every = 1
    return [step for step in sorted(blank) if step in places and _distance(places[step], numbered) % every == 0]


def _distance(place: int, numbered: list[int]) -> int:
    """From the last place with a number, or to the first one if there is none before; 0 without any."""
    at = bisect_left(numbered, place)
    return abs(place - numbered[max(at - 1, 0)]) if numbered else 0


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """A metric: float64 ``values`` [T] at float64 ``steps`` [T], which rise strictly. Values may be NaN or infinite."""

    steps: Floats
    values: Floats

    @cached_property
    def stride(self) -> float:
        """The distance between two steps, usually."""
        return float(np.median(np.diff(self.steps))) if len(self.steps) > 1 else 1.0


@dataclass(frozen=True, kw_only=True)
class Decimals:
    """The last decimal of a metric that a log prints. half_unit: half a unit of it, in the canonical unit; 0: unknown.

    of_all: whether all its numbers have these decimals; else only its zeros, such as ``0.000``.
    """

    half_unit: float = 0.0
    of_all: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training log. ``tokens`` [T] at steps are cumulative; None if the log counts none,
    and ``tokens_added`` says that the log has each step's own.

    ``decimals``: of metrics whose last decimal is known.
    ``resumed`` are the steps at which the log goes back and begins again. ``ignored`` are columns that are not
    compared, under the log's own names.
    """

    name: str
    format: str
    curves: Mapping[str, Curve]
    tokens: Curve | None
    tokens_added: bool
    averaged: frozenset[str]
    facts: Mapping[str, Any]
    notes: tuple[str, ...]
    resumed: tuple[int, ...]
    ignored: tuple[str, ...]
    decimals: Mapping[str, Decimals]


Points = dict[str, dict[int, dict[str, tuple[int, float]]]]  # metric, step, process: rank of the name, value


def run_of(log: Log, *, name: str) -> Run:
    """The curves of ``log``. Raises UsageError if it has no metric that is compared."""
    rows, resumed, order = _by_process(log.rows)
    notes = [*log.notes, *order]
    points: Points = {}
    blank: dict[str, set[int]] = {}
    ignored: dict[str, None] = {}
    printed: dict[str, set[tuple[float, bool, bool]]] = {}
    highest, again = -1, False
    for row in rows:
        assert row.step is not None
        again = row.step < highest or (again and row.step == highest)
        highest = max(highest, row.step)
        for own, value in row.values.items():
            if (place := _place(own)) is None:
                ignored[own] = None
                continue
            if isinstance(value, Fixed):
                form = times(value.half_unit, place.unit), value.is_padded, not value
                printed.setdefault(place.metric, set()).add(form)
            elif math.isfinite(value):
                printed.setdefault(place.metric, set()).add((0.0, False, False))
            processes = points.setdefault(place.metric, {}).setdefault(row.step, {})
            if row.process not in processes or place.rank <= processes[row.process][0]:
                processes[row.process] = place.rank, times(value, place.unit)
        for own in row.blank:
            if place := canonical(own):
                blank.setdefault(place.metric, set()).add(row.step)
                if again:  # of a step that is logged twice, the later line counts
                    points.get(place.metric, {}).pop(row.step, None)
    differing = _differing_steps(points)
    notes += _notes_on_processes(points, differing, named=any(row.process.split(" ")[0] for row in rows))
    found = {
        metric: {step: float(np.mean([value for _, value in one.values()])) for step, one in steps.items()}
        for metric, steps in points.items()
    }
    tokens = _curve(found.pop("tokens")) if "tokens" in found else None
    added = tokens is not None and not _grows(tokens)
    if tokens and added:
        tokens = Curve(tokens.steps, np.cumsum(tokens.values))
    lost = nan_steps({metric: set(steps) for metric, steps in found.items()}, blank)
    if "CSV" in log.format:
        gaps = {
            metric: [step for step in steps if step < max(found.get(metric, [0]))] for metric, steps in lost.items()
        }
        lost = {metric: steps[len(gaps[metric]) :] for metric, steps in lost.items() if len(steps) > len(gaps[metric])}
        notes += [
            f"{metric} has no number at {plural(len(steps), 'step')}, but later ones; not compared there"
            for metric, steps in gaps.items()
            if steps
        ]
    for metric, steps in lost.items():
        found.setdefault(metric, {}).update(dict.fromkeys(steps, math.nan))
        notes.append(
            f"{metric} has no number at {plural(len(steps), 'step')} that have all else; it was taken to be NaN there"
        )
    curves = {
        metric: _curve(found[metric])
        for metric in (*METRICS, *(m for m in found if not is_known(m)))
        if found.get(metric)
    }
    curves |= {
        f"{metric}{OF_RANK}{rank}": _curve(steps)
        for metric in differing
        for rank, steps in _of_ranks(points[metric]).items()
    }
    if not curves:
        names = ", ".join(list(ignored)[:12]) or "nothing"
        raise UsageError(
            f"{name}: no metric that can be compared ({', '.join(METRICS)}, or a name with loss, norm, reward or lr);"
            f" it has {names}"
        )
    return Run(
        name=name,
        format=log.format,
        curves=curves,
        tokens=tokens,
        tokens_added=added,
        averaged=log.averaged,
        facts=log.facts,
        notes=tuple(notes),
        resumed=resumed,
        ignored=tuple(ignored),
        decimals={metric: _decimals(forms) for metric, forms in printed.items()},
    )


def _decimals(forms: Set[tuple[float, bool, bool]]) -> Decimals:
    """Of a metric, by its numbers' half units, whether they are padded, and whether they are 0."""
    (half_unit, *others) = {unit for unit, _, _ in forms}
    if not others and half_unit and any(is_padded for _, is_padded, _ in forms):
        return Decimals(half_unit=half_unit, of_all=True)
    return Decimals(half_unit=max((unit for unit, is_padded, is_zero in forms if is_padded and is_zero), default=0.0))


def _place(own: str) -> Place | None:
    name = plain_name(own)
    return Place("tokens", TOKENS.index(name), 1.0) if name in TOKENS else canonical(own)


def _differing_steps(points: Points) -> dict[str, int]:
    """Of each metric in which processes differ, the number of steps at which they do."""
    counts = {
        metric: sum(len({value for _, value in one.values() if value == value}) > 1 for one in steps.values())
        for metric, steps in points.items()
    }
    return {metric: count for metric, count in counts.items() if count}


def _notes_on_processes(points: Points, differing: Mapping[str, int], *, named: bool) -> list[str]:
    """A note on metrics that are logged several times at a step. ``named``: lines name the process that they are of.

    Lines that differ and name none may as well be of micro-batches.
    """
    counts = {metric: [len(one) for one in steps.values()] for metric, steps in points.items()}
    most = max((max(one, default=0) for one in counts.values()), default=0)
    if most < 2:
        return []
    merged = max(sum(one) - len(one) for one in counts.values())
    what = ", ".join(f"{metric} at {count} of {len(points[metric])} steps" for metric, count in differing.items())
    if not differing:
        return [f"{most} processes log each step: {merged} lines that repeat others were merged"]
    who = f"{most} processes log each step" if named else f"{most} lines of each step, of micro-batches or processes,"
    return [f"{who}{' and' * named} differ in {what}: their means are compared"]


def _of_ranks(steps: Mapping[int, Mapping[str, tuple[int, float]]]) -> dict[str, dict[int, float]]:
    """The values of a metric by step, of each rank or host that the log names."""
    found: dict[str, dict[int, float]] = {}
    for step, processes in steps.items():
        for process, (_, value) in processes.items():
            if name := process.removesuffix(" 0 0") if process.endswith(" 0 0") else "":
                found.setdefault(name, {})[step] = value
    return found


def _by_process(rows: Sequence[Row]) -> tuple[list[Row], tuple[int, ...], list[str]]:
    """The rows with the process that each is of; where a process goes back to a step that it had; and notes."""
    if {row.process for row in rows} == {"", FIRST_RANK}:  # which DeepSpeed names in its own lines alone
        rows = [replace(row, process="") for row in rows]
    rows = [replace(row, process=name) for row, name in zip(rows, _chained(rows), strict=True)]
    groups: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(row.process, []).append(place)
    resumed: dict[int, None] = {}
    twice = behind = 0
    for places in groups.values():
        own = [rows[place] for place in places]
        copies = _copies(own)
        for place, copy in zip(places, copies, strict=True):
            rows[place] = replace(rows[place], process=f"{rows[place].process} {copy}")
        again, repeated, disordered = _resumes([row for row, copy in zip(own, copies, strict=True) if not copy])
        resumed |= dict.fromkeys(again)
        twice, behind = max(twice, repeated), behind + disordered
    notes = []
    if twice:
        more = f" and {len(resumed) - SHOWN} more" if len(resumed) > SHOWN else ""
        places_said = ", ".join(map(str, list(resumed)[:SHOWN])) + more
        notes.append(
            f"{twice} steps are logged twice, beginning at step {places_said} (a resume); the later lines count"
        )
    if behind:
        notes.append(f"{behind} lines are out of order; they were sorted by step")
    return rows, tuple(resumed), notes


def _chained(rows: Sequence[Row]) -> list[str]:
    """The process of each row: its ranks, and Ray's process, where processes of Ray that follow each other are one."""
    spans: dict[tuple[str, str], tuple[int, int]] = {}
    for place, row in enumerate(rows):
        first, _ = spans.get((row.process, row.pid), (place, place))
        spans[row.process, row.pid] = first, place
    ends: dict[tuple[str, int], int] = {}
    lanes: dict[tuple[str, str], int] = {}
    for (process, pid), (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        lane = next(lane for lane in range(len(spans)) if ends.get((process, lane), -1) < first)
        ends[process, lane] = last
        lanes[process, pid] = lane
    return [f"{row.process} {lanes[row.process, row.pid]}" for row in rows]


def _copies(rows: Sequence[Row]) -> list[int]:
    """Which of several unnamed processes each row is of: its place among neighbours that repeat a step's metrics.

    All are 0 where fewer than half of the steps are repeated so: then a line was logged again.
    """
    copies, filled = [], set[str]()
    for place, row in enumerate(rows):
        metrics = {own for own in row.values if canonical(own)}
        if not place or row.step != rows[place - 1].step:
            copies.append(0)
            filled = metrics
        elif row.replaces or metrics.isdisjoint(filled):
            copies.append(copies[-1])
            filled |= metrics
        else:
            copies.append(copies[-1] + 1)
            filled = metrics
    steps = {row.step for row in rows}
    repeated = {row.step for row, copy in zip(rows, copies, strict=True) if copy}
    return copies if 2 * len(repeated) > len(steps) else [0] * len(rows)


def _resumes(rows: Iterable[Row]) -> tuple[list[int], int, int]:
    """Where a process begins again at a step that it had; how many steps it logs twice; how many are out of order."""
    logged: dict[int, set[str]] = {}
    highest, resumed, twice, behind = -1, [], 0, 0
    again = False
    for row in rows:
        assert row.step is not None
        metrics = {own for own in row.values if canonical(own)}
        repeats = not logged.get(row.step, set()).isdisjoint(metrics) and not row.replaces
        if repeats:
            twice += 1
            if not again:
                resumed.append(row.step)
        elif row.step < highest:
            behind += 1
        again = repeats or (again and row.step <= highest)
        logged.setdefault(row.step, set()).update(metrics)
        highest = max(highest, row.step)
    return resumed, twice, behind


def _curve(points: Mapping[int, float]) -> Curve:
    steps = sorted(points)
    return Curve(np.array(steps, dtype=np.float64), np.array([points[step] for step in steps], dtype=np.float64))


def _grows(tokens: Curve) -> bool:
    """Whether these are tokens so far, which grow as steps do, and not those of each step."""
    if len(tokens.values) == 1:
        return True
    grown, steps = tokens.values[-1] / tokens.values[0], tokens.steps[-1] / max(tokens.steps[0], 1.0)
    return bool((np.diff(tokens.values) > 0).all() and grown > 0.75 * steps)
