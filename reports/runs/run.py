"""A run: the curves of one training log, under canonical names, each step once and in order.

What had to be put right on the way (steps logged twice after a resume, lines out of order, a log without a step
counter) is kept as notes, in words, and told with the result.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.validation import UsageError
from reports.runs.blanks import nan_steps
from reports.runs.metrics import EVALUATION, METRICS, TOKENS, canonical

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """What a log says at one step, under its own names. ``step`` is None in logs that count no steps.

    ``blank``: names that have no number there, but JSON's null or an empty cell: NaN, as many programs write it, or
    nothing (blanks.py).
    """

    step: int | None
    values: Mapping[str, float]
    blank: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Log:
    """What a reader found: rows in the order of the file.

    ``averaged``: canonical names whose values are means over the steps since the line before. ``facts``: what the log
    says of how it was made, such as its options. ``notes``: sentences about what could not be read.
    """

    format: str
    rows: list[Row]
    averaged: frozenset[str] = frozenset()
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


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
class Run:
    """One training log. ``tokens`` [T] at steps are cumulative; None if the log counts none,
    and ``tokens_added`` says that the log has each step's own.

    ``resumed`` are the steps at which the log goes back and begins again.
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


def run_of(log: Log, *, name: str) -> Run:
    """The curves of ``log``. Raises UsageError if it has none of the metrics that are compared."""
    rows, notes = _counted(log.rows)
    resumed, order = _resumes(rows)
    notes = [*log.notes, *notes, *order]
    found: dict[str, dict[int, tuple[int, float]]] = {}
    ignored: dict[str, None] = {}
    blank: dict[str, set[int]] = {}
    highest, again = -1, False
    for row in rows:
        assert row.step is not None
        again = row.step < highest or (again and row.step == highest)
        highest = max(highest, row.step)
        for own, value in row.values.items():
            place = ("tokens", TOKENS.index(own.lower()), 1.0) if own.lower() in TOKENS else canonical(own)
            if place is None:
                ignored[own] = None
                continue
            metric, rank, unit = place
            points = found.setdefault(metric, {})
            if row.step not in points or rank <= points[row.step][0]:
                points[row.step] = rank, value * unit
        for own in row.blank:
            if place := canonical(own):
                blank.setdefault(place[0], set()).add(row.step)
                if again:  # of a step that is logged twice, the later line counts
                    found.get(place[0], {}).pop(row.step, None)
    tokens = _curve(found.pop("tokens")) if "tokens" in found else None
    added = tokens is not None and not _grows(tokens)
    if tokens and added:
        tokens = Curve(tokens.steps, np.cumsum(tokens.values))
    lost = nan_steps({metric: set(points) for metric, points in found.items()}, blank)
    for metric, steps in lost.items():
        found.setdefault(metric, {}).update(dict.fromkeys(steps, (0, math.nan)))
        notes.append(f"{metric} has no number at {len(steps)} steps that have all else; it was taken to be NaN there")
    curves = {metric: _curve(found[metric]) for metric in METRICS if found.get(metric)}
    if not curves:
        known = ", ".join(METRICS)
        names = ", ".join(list(ignored)[:12]) or "nothing"
        raise UsageError(f"{name}: no metric that can be compared ({known}); it has {names}")
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
    )


def _counted(rows: list[Row]) -> tuple[list[Row], list[str]]:
    """The rows with steps. Without a counter, each line that says more than an evaluation is a step: 1, 2, 3, ..."""
    if all(row.step is not None for row in rows):
        return rows, []
    step, counted = 0, []
    for row in rows:
        named = {place[0] for own in row.values if (place := canonical(own))}
        step += any(not name.startswith(EVALUATION) for name in named)
        counted.append(replace(row, step=step))
    return counted, ["the log counts no steps: its lines are counted instead (1, 2, 3, ...)"]


def _resumes(rows: Iterable[Row]) -> tuple[tuple[int, ...], list[str]]:
    """Where the log begins again at a step that it already had, and sentences about that and about disorder."""
    seen: dict[int, set[str]] = {}
    highest, resumed, twice, behind = -1, [], 0, 0
    again = False
    for row in rows:
        assert row.step is not None
        metrics = {own for own in row.values if canonical(own)}
        repeats = not seen.get(row.step, set()).isdisjoint(metrics)
        if repeats:
            twice += 1
            if not again:
                resumed.append(row.step)
        elif row.step < highest:
            behind += 1
        again = repeats or (again and row.step <= highest)
        seen.setdefault(row.step, set()).update(metrics)
        highest = max(highest, row.step)
    notes = []
    if twice:
        places = ", ".join(map(str, resumed))
        notes.append(f"{twice} steps are logged twice, beginning at step {places} (a resume); the later lines count")
    if behind:
        notes.append(f"{behind} lines are out of order; they were sorted by step")
    return tuple(resumed), notes


def _curve(points: Mapping[int, tuple[int, float]]) -> Curve:
    steps = sorted(points)
    return Curve(np.array(steps, dtype=np.float64), np.array([points[step][1] for step in steps], dtype=np.float64))


def _grows(tokens: Curve) -> bool:
    """Whether these are tokens so far, which grow as steps do, and not those of each step."""
    if len(tokens.values) == 1:
        return True
    grown, steps = tokens.values[-1] / tokens.values[0], tokens.steps[-1] / max(tokens.steps[0], 1.0)
    return bool((np.diff(tokens.values) > 0).all() and grown > 0.75 * steps)
