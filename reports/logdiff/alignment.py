"""Puts the curves of several runs on common positions, by step or by tokens.

A counter that begins at 0 in one log and at 1 in another is detected, by the first steps or by the values, and
corrected. A log of every tenth step is compared at its own steps; where it logs means over the steps between (Hugging
Face's Trainer, Megatron), the other run's steps are averaged in the same way. By tokens, curves are compared at the
positions of the run with the fewest; the other curves are interpolated linearly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from conformance.core.errors import UsageError
from reports.logdiff.metrics import (
    METRICS,
    OF_RANK,
    is_cost,
    is_evaluation,
    is_known,
    is_of_rank,
    is_rate,
    plain_name,
)
from reports.logdiff.rows import COUNTED
from reports.logdiff.run import SHOWN, Curve, Floats, Run
from reports.wording import plural

CLEARLY = 2.0  # times nearer: then a metric says whether a counter is shifted
FAR = 10.0  # times nearer: then it says so by itself, whatever the first steps are
SEVERAL = 5  # steps at which a metric leaves SAME, unless the counter is shifted
WIDEST = 128  # lines of a running mean
SAME = 0.05  # relative difference of a metric at the same step of two honest runs


@dataclass(frozen=True, kw_only=True)
class Aligned:
    """One metric of all runs: positions [T] (steps or tokens, rising), and of each side its runs' values [R, T].

    ``exact``: these are rates as they were logged; between the positions of a log they are interpolated.
    """

    metric: str
    positions: Floats
    sides: tuple[Floats, Floats]
    exact: bool


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """All metrics that every run has, aligned; ``notes`` say what had to be done, ``missing`` who lacks what.

    refused: why nothing is aligned; empty if something may be.
    """

    by: str
    metrics: tuple[Aligned, ...] = ()
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    refused: str = ""


def align(sides: tuple[Sequence[Run], Sequence[Run]], *, by: str, chosen: Sequence[str] = ()) -> Alignment:
    """Two sides' runs on common positions. ``by``: ``step`` or ``tokens``; ``chosen``: only these metrics."""
    runs = [*sides[0], *sides[1]]
    if by == "tokens" and (without := [run.name for run in runs if run.tokens is None]):
        raise UsageError(f"{', '.join(without)} counts no tokens; leave out --by tokens, or log them cumulatively")
    notes: list[str] = []
    if by == "step":
        runs, notes, refused = _with_lines_on_steps(runs)
        if refused := refused or _without_steps(runs):
            return Alignment(by=by, refused=refused)
    names = list(chosen or sorted(dict.fromkeys(name for run in runs for name in run.curves), key=_in_order))
    missing, metrics = [], []
    unknown: list[str] = []
    shifts = []
    for run in runs:
        shift, note = (0.0, "") if by == "tokens" else _shift(runs[0], run)
        shifts.append(shift)
        notes += [note] if note else []
        if by == "tokens" and run.tokens_added:
            notes.append(f"{run.name} counts the tokens of each step, not those so far; they were added up")
    last = [_last(run) + shift for run, shift in zip(runs, shifts, strict=True)]
    begins, ends = max(_first(run) + shift for run, shift in zip(runs, shifts, strict=True)), min(last)
    for name in names:
        lacking = [run.name for run in runs if name not in run.curves]
        if is_of_rank(name) and (lacking or len(runs) > 2):
            continue
        if lacking and not is_known(name) and not chosen:
            unknown.append(name)
            continue
        if lacking:
            missing.append(f"{name}: not in {', '.join(lacking)}")
            continue
        curves = [
            _by_tokens(run, name) if by == "tokens" else Curve(run.curves[name].steps + shift, run.curves[name].values)
            for run, shift in zip(runs, shifts, strict=True)
        ]
        averaged = [name.partition(OF_RANK)[0] in run.averaged for run in runs]
        positions, values, note = _common(curves, averaged, by=by)
        lost = _lost(curves, positions, begins=begins, ends=ends) if by == "step" and not note else 0
        if lost:
            note = f"{plural(lost, 'step')} left out, at which one log has a number and another none"
        if note:
            notes.append(f"{name}: {note}")
        if len(positions) == 0:
            missing.append(f"{name}: no {by} in common")
            continue
        if not np.isfinite(values).any():
            missing.append(f"{name}: no finite value in any of them")
            continue
        split = len(sides[0])
        exact = is_rate(name) and by == "step"
        metrics.append(Aligned(metric=name, positions=positions, sides=(values[:split], values[split:]), exact=exact))
    if count := sum(is_of_rank(one.metric) for one in metrics):
        notes.append(f"{plural(count, 'curve')} of single ranks compared as well; those that differ are in the table")
    if unknown:
        missing.append(f"{listed(unknown)}: not in every log, under names that no table knows")
    both = [own for own in runs[0].ignored if all(own in run.ignored for run in runs)]
    if both:
        missing.append(f"{plural(len(both), 'column')} of every log, no loss, norm, reward or rate: {listed(both)}")
    for run in runs:
        if own := sorted((name for name in run.ignored if name not in both), key=is_cost):
            columns = plural(len(own), "column")
            missing.append(f"{columns} of {run.name} alone, no loss, norm, reward or rate: {listed(own)}")
    if by == "step" and max(last) > ends:
        longest, first = runs[last.index(max(last))].name, runs[last.index(ends)].name
        notes.append(f"{first} ends at step {ends:.0f} and {longest} at {max(last):.0f}: what follows is not compared")
    return Alignment(by=by, metrics=tuple(metrics), notes=tuple(notes), missing=tuple(missing))


def _in_order(metric: str) -> int:
    """The place of a metric in the table; those of single ranks come last."""
    return len(METRICS) + is_of_rank(metric) if metric not in METRICS else list(METRICS).index(metric)


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _first(run: Run) -> float:
    """The first step of training; an evaluation may come before it."""
    trained = [curve.steps[0] for name, curve in run.curves.items() if not is_evaluation(name)]
    return float(min(trained or [curve.steps[0] for curve in run.curves.values()]))


def _last(run: Run) -> float:
    """The last step of training."""
    trained = [curve.steps[-1] for name, curve in run.curves.items() if not is_evaluation(name)]
    return float(max(trained or [curve.steps[-1] for curve in run.curves.values()]))


def _with_lines_on_steps(runs: Sequence[Run]) -> tuple[list[Run], list[str], str]:
    """Puts lines that were counted on the steps of the longest log, of which each stands for the same number.

    Returns the runs, sentences about it, and why a log is refused. Counted are lines of a log that names no steps, and
    those of a counter 0, 1, 2, ... such as wandb's own, which counts what is logged. The values tell what a line stands
    for; a counter from 0 is refused where they do not, and do not tell either that each line is a step.
    """
    dense = max(runs, key=lambda run: _density(run)[0])
    total, every = _density(dense)
    found, notes = list(runs), []
    for place, run in enumerate(runs):
        lines, stride = _density(run)
        width = total // lines
        if width < 2 or stride != 1 or every != 1 or not (COUNTED in run.notes or _first(run) == 0):
            continue
        if put := _on_steps_of(dense, run, width):
            found[place], what = put
            notes.append(f"each line of {run.name} stands for {width} steps of {dense.name}: {what}")
        elif COUNTED not in run.notes and total == width * lines and not _counts_steps(dense, run, width):
            refused = (
                f"{run.name} counts its {lines} lines from 0, as wandb's Step does, {dense.name} has {width} times as"
                f" many, and the values do not tell which of its {total} steps these are; give a log that has the"
                " trainer's own step, such as train/global_step"
            )
            return [], [], refused
    if notes:
        found = [replace(run, notes=tuple(note for note in run.notes if note != COUNTED)) for run in found]
    return found, notes, ""


def _on_steps_of(dense: Run, run: Run, width: int) -> tuple[Run, str] | None:
    """The run with each line on the last of ``width`` steps, and which metrics are means; None without clear evidence.

    One that training computes has to be FAR nearer than with each line a step, and nowhere off; none may be CLEARLY
    farther.
    """
    first = _first(dense) - 1
    curves = {
        name: Curve(first + width * (curve.steps - _first(run) + 1), curve.values) for name, curve in run.curves.items()
    }
    nearer, means = set(), set()
    for name in _shared(dense, run):
        whole, put = dense.curves[name], curves[name]
        averaged = _means(whole, put.steps)
        is_mean = _distance(averaged, put, 0.0) < _distance(whole, put, 0.0)
        as_lines, as_steps = _distance(averaged if is_mean else whole, put, 0.0), _distance_as_steps(dense, run, name)
        if CLEARLY * as_steps < as_lines:
            return None
        same = _same(averaged if is_mean else whole, put, 0.0)
        if FAR * as_lines < as_steps and same.all() and len(same) >= 2 * SEVERAL:
            nearer.add(name)
        means |= {name} if is_mean else set()
    if all(map(is_rate, nearer)):
        return None
    single = sorted(nearer - means)
    what = [f"their mean of {' and '.join(sorted(nearer & means))}"] if nearer & means else []
    what += [f"the last one's {' and '.join(single)}"] if single else []
    averaged_names = (run.averaged | means) - set(single)
    return replace(run, curves=curves, averaged=averaged_names), f"only so has it {' and '.join(what)}"


def _counts_steps(dense: Run, run: Run, width: int) -> bool:
    """Whether each line is a step, by the values: all are the SAME, or the first ones CLEARLY nearer than otherwise."""
    starts = {name: Curve(*(x[: 2 * SEVERAL] for x in (one.steps, one.values))) for name, one in run.curves.items()}
    begun, shift = replace(run, curves=starts), _first(dense) - _first(run)
    shared = _shared(dense, run)
    if all(any(_same(dense.curves[name], run.curves[name], by).all() for by in (0.0, shift)) for name in shared):
        return True
    ends = {
        name: Curve(_first(dense) - 1 + width * (one.steps - _first(run) + 1), one.values)
        for name, one in starts.items()
    }
    return any(
        CLEARLY * _distance_as_steps(dense, begun, name)
        < min(
            _distance(curve, ends[name], 0.0)
            for curve in (dense.curves[name], _means(dense.curves[name], ends[name].steps))
        )
        for name in shared
    )


def _distance_as_steps(dense: Run, run: Run, name: str) -> float:
    """The distance of a metric if each line is a step, counted from where the other log counts or not."""
    shifts = (0.0, _first(dense) - _first(run))
    return min(_distance(dense.curves[name], run.curves[name], shift) for shift in shifts)


def _shared(a: Run, b: Run) -> list[str]:
    """The metrics of training that both runs have."""
    return [name for name in a.curves if name in b.curves and not is_evaluation(name)]


def _without_steps(runs: Sequence[Run]) -> str:
    """Says why a log whose lines were counted, for it names no steps, is not aligned with the other logs.

    Its lines are steps only if a log that names steps has as many, one after another. Of two logs without steps one
    may be longer, if they begin alike.
    """
    counted = [run for run in runs if COUNTED in run.notes]
    for run, other in ((run, other) for run in counted for other in runs if other is not run):
        (lines, _), (steps, stride) = _density(run), _density(other)
        if lines == steps and stride == 1:
            continue
        where = f"{plural(steps, 'step')} of {other.name} ({_first(other):.0f} to {_last(other):.0f})"
        if other in counted:
            shared = [name for name in run.curves if name in other.curves and not is_rate(name)]
            if any(_same(run.curves[name], other.curves[name], 0.0)[:SEVERAL].all() for name in shared):
                continue
            where = f"{plural(steps, 'line')} of {other.name}, which names none either,"
        epochs = ", only epochs" if "epoch" in map(plain_name, run.ignored) else ""
        return (
            f"{run.name} names no steps{epochs}, and nothing tells which of the {where} its {plural(lines, 'line')}"
            " are; give a log that names steps, such as the Trainer's trainer_state.json"
        )
    return ""


def _density(run: Run) -> tuple[int, float]:
    """The number of steps of the metric of training that a run has most of, and the distance between two of them."""
    trained = [curve for name, curve in run.curves.items() if not is_evaluation(name)]
    most = max(trained or run.curves.values(), key=lambda curve: len(curve.steps))
    return len(most.steps), most.stride


def _shift(reference: Run, run: Run) -> tuple[float, str]:
    """What to add to a run's steps, and a sentence about it.

    Where one counter begins at 0 and the other at 1, either both count the same steps, or one log lacks its first line.
    Each metric that is CLEARLY nearer to the other run's with or without a shift has a vote. Where they are undecided
    (other seeds, constants), logs that also end at the same step are taken to lack a line. Anywhere else the values
    alone can tell that a counter is shifted.
    """
    shift = _first(reference) - _first(run)
    shared = {
        name: (curve, run.curves[name])
        for name, curve in reference.curves.items()
        if name in run.curves and not is_evaluation(name)
    }
    same_stride = [(a, b) for a, b in shared.values() if a.stride == b.stride]
    if {_first(reference), _first(run)} != {0.0, 1.0} or not same_stride:
        return _shift_by_values(reference, run, shared)
    votes = sum(_vote(_distance(a, b, shift), _distance(a, b, 0.0)) for a, b in same_stride)
    decided = "" if votes else ", although the values do not tell whether it is that or a first line that is missing"
    begins = f"{run.name} counts its steps from {_first(run):.0f} and {reference.name} from {_first(reference):.0f}"
    if votes > 0 or (votes == 0 and _last(reference) != _last(run)):
        done = f"{abs(shift):.0f} was {'added to' if shift > 0 else 'taken from'} the former's"
        return shift, f"{begins}: {done}{decided}"
    return 0.0, "" if votes else f"{begins}: both count the same steps{decided}"


def _shift_by_values(reference: Run, run: Run, shared: Mapping[str, tuple[Curve, Curve]]) -> tuple[float, str]:
    """1 or -1, and a sentence, if the values leave no doubt that one log counts from 0 and the other from 1; else 0.

    Logs that begin or end at the same step count alike. No metric may be CLEARLY nearer without the shift. One that
    training computes has to be FAR nearer with it; a learning rate alone is no evidence, since its schedule may lag.
    One has to be off at SEVERAL steps without the shift, and at none with it.
    """
    if _first(reference) == _first(run) or _last(reference) == _last(run):
        return 0.0, ""
    for shift in (-1.0, 1.0):
        distances = {name: (_distance(a, b, shift), _distance(a, b, 0.0)) for name, (a, b) in shared.items()}
        opposed = any(CLEARLY * unshifted < shifted for shifted, unshifted in distances.values())
        nearer = {name for name, (shifted, unshifted) in distances.items() if FAR * shifted < unshifted}
        same = [(_same(*shared[name], shift), _same(*shared[name], 0.0)) for name in nearer]
        seen = any(shifted.all() and len(shifted) >= SEVERAL <= (~unshifted).sum() for shifted, unshifted in same)
        if seen and not opposed and not all(map(is_rate, nearer)):
            done = f"1 was {'added to' if shift > 0 else 'taken from'} the steps of {run.name}"
            return shift, f"{done}: only then {reference.name} has the same {' and '.join(sorted(nearer))}"
    return 0.0, ""


def _same(a: Curve, b: Curve, shift: float) -> NDArray[np.bool_]:
    """At which of the steps that both curves have, with finite values, they differ by SAME at most."""
    x, y = _at_common(a, b, shift)
    kept = np.isfinite(x) & np.isfinite(y)
    return (np.abs(x - y) <= SAME * np.maximum(np.abs(x), np.abs(y)))[kept]


def _vote(shifted: float, unshifted: float) -> int:
    """1 for a shift, by the distances of a metric with and without it, -1 against it; 0 if they are similar."""
    return int(CLEARLY * shifted < unshifted) - int(CLEARLY * unshifted < shifted)


def _distance(a: Curve, b: Curve, shift: float) -> float:
    """The median distance of two curves at the steps that both have; infinite without any."""
    x, y = _at_common(a, b, shift)
    between = np.abs(x - y)
    between = between[np.isfinite(between)]
    return float(np.median(between)) if len(between) else np.inf


def _at_common(a: Curve, b: Curve, shift: float) -> tuple[Floats, Floats]:
    """The values of two curves at the steps that both have."""
    _, in_a, in_b = np.intersect1d(a.steps, b.steps + shift, return_indices=True)
    return a.values[in_a], b.values[in_b]


def _by_tokens(run: Run, name: str) -> Curve:
    assert run.tokens is not None
    curve = run.curves[name]
    tokens = np.interp(curve.steps, run.tokens.steps, run.tokens.values)
    kept = np.concatenate([[True], np.diff(tokens) > 0])
    return Curve(tokens[kept], curve.values[kept])


def _common(curves: list[Curve], averaged: list[bool], *, by: str) -> tuple[Floats, Floats, str]:
    """Positions [T], the values [R, T] of each curve there, and a sentence if logs are unevenly dense."""
    sparsest = max(range(len(curves)), key=lambda place: curves[place].stride)
    sparse = curves[sparsest]
    if by == "tokens":
        low, high = max(curve.steps[0] for curve in curves), min(curve.steps[-1] for curve in curves)
        positions = sparse.steps[(sparse.steps >= low) & (sparse.steps <= high)]
        if all(len(curve.steps) == len(sparse.steps) and (curve.steps == sparse.steps).all() for curve in curves):
            return positions, np.stack([curve.values for curve in curves]), ""
        return positions, np.stack([np.interp(positions, curve.steps, curve.values) for curve in curves]), ""
    note = ""
    if any(curve.stride < sparse.stride for curve in curves):
        note = (
            f"logged every {min(curve.stride for curve in curves):.0f} and every {sparse.stride:.0f} steps; compared at"
        )
        note += " those that all have"
        if averaged[sparsest]:
            dense = [curve.stride < sparse.stride for curve in curves]
            curves = [
                _means(one, sparse.steps) if is_dense else one for one, is_dense in zip(curves, dense, strict=True)
            ]
            note += ", where the denser log is averaged over the steps between, as the other is"
    positions = curves[0].steps
    for curve in curves[1:]:
        positions = np.intersect1d(positions, curve.steps)
    return positions, np.stack([curve.values[np.isin(curve.steps, positions)] for curve in curves]), note


def _lost(curves: Sequence[Curve], positions: Floats, *, begins: float, ends: float) -> int:
    """Counts the steps at which only some curves have a number, from where all runs have begun until the first ends."""
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    return int(((steps >= begins) & (steps <= ends)).sum() - len(positions))


def _means(curve: Curve, ends: Floats) -> Curve:
    """The means over (the end before, this end], for the ends that the curve reaches; the first one over as much."""
    starts = np.concatenate([[ends[0] - (ends[1] - ends[0] if len(ends) > 1 else ends[0])], ends[:-1]])
    found = [
        (end, float(curve.values[inside].mean()))
        for start, end in zip(starts, ends, strict=True)
        if (inside := (curve.steps > start) & (curve.steps <= end)).any() and end <= curve.steps[-1]
    ]
    return Curve(np.array([end for end, _ in found]), np.array([value for _, value in found]))


def counter_pace(a: Run, b: Run) -> str:
    """Say by what factor two counters differ whose logs have the same numbers line for line; empty if they do not.

    A metric that training computes has to be FAR nearer line for line than step for step.
    """
    nearer = []
    for name in (name for name in a.curves if name in b.curves and not is_rate(name) and not is_evaluation(name)):
        x, y = a.curves[name], b.curves[name]
        lines = min(len(x.steps), len(y.steps))
        paces = np.diff(y.steps[:lines]) / np.diff(x.steps[:lines])
        if lines < 2 * SEVERAL or np.ptp(paces) or paces[0] in (0.0, 1.0):
            return ""
        between = np.abs(x.values[:lines] - y.values[:lines])
        if not (between <= SAME * np.abs(x.values[:lines])).all():
            return ""
        if FAR * float(np.median(between)) < _distance(x, y, 0.0):
            nearer.append((name, float(paces[0])))
    if not nearer:
        return ""
    pace, names = nearer[0][1], " and ".join(name for name, _ in nearer)
    who, count = ("B", pace) if pace > 1 else ("A", 1 / pace)
    return (
        f"line for line both logs have the same {names}: side {who} counts {count:g} per step of the other, such as"
        " micro-batches or samples; give both logs the same counter"
    )


def averages(a: Floats, b: Floats) -> str:
    """Says of which numbers of one side those of the other are means, as progress bars show; empty if of none.

    The means have to agree at all positions [T], FAR better than the numbers do, and to scatter less than these: of a
    smooth curve that lags means agree as well.
    """
    for mean, values, who, whose in ((b, a, "B", "A"), (a, b, "A", "B")):
        sums = np.cumsum(np.concatenate([[0.0], values]))
        found = {0: sums[1:] / np.arange(1, len(sums))}
        found |= {
            width: (sums[width:] - sums[:-width]) / width for width in range(2, min(len(values) // 2, WIDEST) + 1)
        }
        for width, means in found.items():
            own, other = mean[-len(means) :], values[-len(means) :]
            if len(means) < 2 * SEVERAL or not (np.abs(own - means) <= SAME * np.abs(means)).all():
                continue
            smoother = np.diff(own, 2).std() < 0.75 * np.diff(other, 2).std()
            if smoother and FAR * np.median(np.abs(own - means)) < np.median(np.abs(own - other)):
                of = f"over the last {width}" if width else "so far"
                return f"the numbers of side {who} are means of side {whose}'s {of}; log that of each step in both"
    return ""
