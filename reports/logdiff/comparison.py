"""Compares two sides of training logs: which metrics differ, from which position on, and the likely causes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from conformance.core.errors import UsageError, did_you_mean
from reports.logdiff.alignment import Aligned, Alignment, align, averages, counter_pace, listed
from reports.logdiff.likely_causes import ALONE, Evidence, LikelyCause, constant_factor, likely_causes
from reports.logdiff.metrics import (
    METRICS,
    is_loss,
    is_of_rank,
    is_rate,
    is_ratio,
    of_any_size,
)
from reports.logdiff.run import Decimals, Floats, Run
from reports.logdiff.tolerance_band import Judged, within_digits, within_spread, within_threshold
from reports.wording import plural

ENOUGH = 10  # common steps, for an agreement
FAR_APART = 1.2  # a constant factor of two seeds' curves that is larger is none of a seed
LEAST_FACTOR = 1e-3  # logarithm of a constant factor that is worth a note
SEEDLESS = ("loss", "grad_norm", "lr")  # metrics of which no seed makes a constant factor
COUNTS = re.compile(r"accum|micro|world|rank|parallel|dp|gpu|node")  # in the names of a header's counts


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a comparison: one run, or several runs with different seeds."""

    name: str
    runs: tuple[Run, ...]


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The position at which a metric first leaves the band.

    span: the number of positions whose mean leaves the band, from ``position`` to ``last``; ``difference`` and
    ``allowed`` are those of this mean.
    """

    position: float
    span: int
    last: float
    difference: float
    allowed: float


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One metric: its curves, the sides' means [T], how they were judged, and where they first differ (or None)."""

    aligned: Aligned
    means: tuple[Floats, Floats]
    judged: Judged
    first: Parting | None

    @property
    def name(self) -> str:
        return self.aligned.metric

    @property
    def outside(self) -> int:
        """The number of positions outside the band."""
        return int(self.judged.outside.sum())

    @property
    def worst(self) -> tuple[float, float]:
        """The position of the largest difference, and that difference, relative."""
        size = np.where(np.isfinite(self.judged.difference), np.abs(self.judged.difference), -1.0)
        place = int(size.argmax())
        return float(self.aligned.positions[place]), float(self.judged.difference[place])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of two sides, metric by metric.

    threshold: None where the band is the spread of seeds. chosen: the requested metrics; empty for all of them.
    """

    sides: tuple[Side, Side]
    alignment: Alignment
    chosen: tuple[str, ...]
    threshold: float | None
    metrics: tuple[Compared, ...]
    likely_causes: tuple[LikelyCause, ...]

    @property
    def differs(self) -> bool:
        return any(one.first for one in self.metrics)

    @property
    def place(self) -> str:
        """What the curves are compared at."""
        return "step" if self.alignment.by == "step" else "position"

    @property
    def shown(self) -> tuple[Compared, ...]:
        """The metrics, and of those of single ranks the ones that differ."""
        return tuple(one for one in self.metrics if one.first or not is_of_rank(one.name))

    @property
    def decided(self) -> tuple[Compared, ...]:
        """The metrics shown that agree or differ; of the others nothing can be told."""
        return tuple(one for one in self.shown if one.first or not one.judged.untold)

    @property
    def comparable(self) -> bool:
        return not self.obstacle

    @property
    def obstacle(self) -> str:
        """Why the sides cannot be said to agree, with advice; empty if they can."""
        if self.alignment.refused:
            return self.alignment.refused
        if self.too_few:
            compared, most = self.common
            return f"they have only {compared} of {plural(most, 'step')} in common"
        if self.lacking or not self.metrics:
            return f"they have no {' or '.join(self.lacking) or 'metric'} at a common {self.alignment.by}"
        return self._without_power or ("" if self.chosen else self._without_loss)

    @property
    def _without_power(self) -> str:
        """Says which metrics the band or their size hides, if one was requested, is a loss, or leaves only rates."""
        if scaled := self.scaled_runs:
            return f"{scaled[0]}; give runs that differ by their seed alone"
        hidden = [one for one in self.shown if one not in self.decided]
        only_rates = all(is_rate(one.name) for one in self.decided)
        counts = [
            one for one in hidden if only_rates or one.name in self.chosen or (one.judged.wide and is_loss(one.name))
        ]
        return "; ".join(f"{one.name}: {one.judged.untold}" for one in counts)

    @property
    def scaled_runs(self) -> list[str]:
        """Says which runs of one side differ by a constant factor, as seeds do not."""
        texts = []
        for one in (metric for metric in self.metrics if metric.name in SEEDLESS):
            for letter, values, side in zip("AB", one.aligned.sides, self.sides, strict=True):
                for run, curve in zip(side.runs[1:], values[1:], strict=True):
                    positive = (values[0] > 0) & (curve > 0) & np.isfinite(values[0]) & np.isfinite(curve)
                    found = constant_factor(np.log(curve[positive] / values[0][positive]))
                    if found and found.size > FAR_APART and positive.mean() > 0.5:
                        text = f"of side {letter}, {one.name} of {run.name} is {np.exp(found.log):.3g} times that of"
                        texts.append(f"{text} {side.runs[0].name} at every {self.place}")
        return texts

    @property
    def _without_loss(self) -> str:
        """Says which losses the runs have, if some have one and none was compared."""
        runs = [run for side in self.sides for run in side.runs]
        losses = {run.name: [name for name in run.curves if is_loss(name)] for run in runs}
        if any(is_loss(one.name) for one in self.metrics) or not any(losses.values()):
            return ""
        have = ", ".join(f"{name} has {listed(own) or 'none'}" for name, own in losses.items())
        return (
            f"no loss is in all of them ({have}); call its column loss in each, or name what is to be compared, such as"
            f" --metric {self.metrics[0].name}"
        )

    @property
    def factors(self) -> list[str]:
        """Says which metrics agree within the band, and differ by the same factor at every position all the same."""
        texts = []
        for one in self.metrics if self.threshold is not None else ():
            a, b = one.means
            if one.first or not ((a > 0) & (b > 0) & np.isfinite(a) & np.isfinite(b)).all():
                continue
            d = np.log(b / a)
            found = constant_factor(d, least=LEAST_FACTOR)
            if found and float(np.abs(d - found.log).max()) < abs(found.log) / 10:
                where = f"at every {self.place}, within the band"
                texts.append(f"{one.name}: that of side B is {np.exp(found.log):.6g} times that of side A {where}")
        return texts

    @property
    def common(self) -> tuple[int, int]:
        """The most positions at which a metric was compared, and the most that it has in any log."""
        compared = max(len(one.aligned.positions) for one in self.metrics)
        logs = [run for side in self.sides for run in side.runs]
        return compared, max(len(log.curves[one.name].steps) for log in logs for one in self.metrics)

    @property
    def too_few(self) -> bool:
        """Whether the logs share fewer steps than ENOUGH, and these reach over less than a tenth of the longest log.

        Or fewer than half of the steps of the log with the fewest.
        """
        logs = [run for side in self.sides for run in side.runs]
        if self.alignment.by != "step" or not self.metrics or self.common[0] >= ENOUGH:
            return False
        shared = max(float(np.ptp(one.aligned.positions)) for one in self.metrics)
        longest = max(float(np.ptp(log.curves[one.name].steps)) for log in logs for one in self.metrics)
        fewest = min(max(len(log.curves[one.name].steps) for one in self.metrics) for log in logs)
        return 10 * shared < longest or 2 * self.common[0] < fewest

    @property
    def lacking(self) -> list[str]:
        """The requested metrics that were not compared."""
        return [name for name in self.chosen if name not in {one.name for one in self.metrics}]

    @property
    def first(self) -> Compared | None:
        """The metric that differs first; of several at one position the first in the order of the table."""
        differing = [one for one in self.metrics if one.first]
        return min(differing, key=lambda one: one.first.position if one.first else np.inf, default=None)


def compare(a: Side, b: Side, *, by: str, threshold: float, chosen: Sequence[str] = ()) -> Comparison:
    """Compare two sides: by the spread of seeds if one has several runs, else by the relative ``threshold``."""
    own = {name for side in (a, b) for run in side.runs for name in run.curves}
    unknown = [name for name in chosen if name not in METRICS and name not in own]
    if unknown:
        known = list(dict.fromkeys((*METRICS, *sorted(own))))
        raise UsageError(
            f"no metric is called {', '.join(unknown)}; {did_you_mean(unknown[0], known)}there are {', '.join(known)}"
        )
    alignment = align((a.runs, b.runs), by=by, chosen=chosen)
    spread = len(a.runs) + len(b.runs) > 2
    metrics = []
    for one in alignment.metrics:
        x, y = one.sides
        any_size = of_any_size(one.metric)
        digits = [run.decimals.get(one.metric, Decimals()) for run in (*a.runs, *b.runs)]
        if spread:
            count = len(alignment.metrics)
            judged = within_spread(x, y, metrics=count, any_size=any_size, exact=one.exact, decimals=digits)
        elif one.exact:
            judged = within_digits(x[0], y[0], decimals=digits)
        else:
            noisy = is_ratio(one.metric)
            judged = within_threshold(x[0], y[0], threshold, any_size=any_size, noisy=noisy, decimals=digits)
        means = x.mean(axis=0), y.mean(axis=0)
        metrics.append(Compared(aligned=one, means=means, judged=judged, first=_first_outside(one, judged)))
    found: tuple[LikelyCause, ...] = ()
    if any(one.first for one in metrics):
        found = likely_causes(_evidence(metrics, (a.runs, b.runs), by=by, seeds=spread))
    return Comparison(
        sides=(a, b),
        alignment=alignment,
        chosen=tuple(chosen),
        threshold=None if spread else threshold,
        metrics=tuple(metrics),
        likely_causes=found,
    )


def _first_outside(aligned: Aligned, judged: Judged) -> Parting | None:
    places = np.flatnonzero(judged.outside)
    if len(places) == 0:
        return None
    place = int(places[0])
    span = int(judged.spans[place])
    end = min(place + span, len(aligned.positions)) - 1
    return Parting(
        position=float(aligned.positions[place]),
        span=span,
        last=float(aligned.positions[end]),
        difference=float(judged.shown[place]),
        allowed=float(judged.bound[place]),
    )


def _evidence(
    metrics: Sequence[Compared], sides: tuple[Sequence[Run], Sequence[Run]], *, by: str, seeds: bool
) -> Evidence:
    """Collect the evidence for likely causes: the means of both sides, where both are finite."""
    runs = [*sides[0], *sides[1]]
    curves: dict[str, tuple[Floats, Floats, Floats]] = {}
    firsts: dict[str, int] = {}
    for one in metrics:
        kept = np.isfinite(one.means[0]) & np.isfinite(one.means[1])
        curves[one.name] = one.aligned.positions[kept], one.means[0][kept], one.means[1][kept]
        if one.first and one.first.position in curves[one.name][0]:
            firsts[one.name] = int(np.searchsorted(curves[one.name][0], one.first.position))
    return Evidence(
        curves=curves,
        firsts=firsts,
        broken=_broken(metrics),
        averaged={} if seeds else _averaged(curves, [name for name in firsts if not is_rate(name)], runs),
        numbers=_numbers(runs),
        resumed=_resumed(runs),
        by=by,
        seeds=seeds,
        pace="" if seeds or by != "step" else counter_pace(*runs),
    )


def _averaged(
    curves: Mapping[str, tuple[Floats, Floats, Floats]], differing: Sequence[str], runs: Sequence[Run]
) -> dict[str, tuple[str, bool]]:
    """Says of which metrics one log has means, and whether the numbers show it.

    They only permit it if the format says so of one log, and the other's numbers scatter without a drift about the
    middle of two means, as those of the step between do.
    """
    found: dict[str, tuple[str, bool]] = {}
    for name in differing:
        if text := averages(*curves[name][1:]):
            found[name] = text, True
            continue
        (mean, means), (one, values) = sorted(
            zip(runs, curves[name][1:], strict=True), key=lambda side: name not in side[0].averaged
        )
        strides = {run.curves[name].stride for run in runs}
        about = values[:-1] - (means[:-1] + means[1:]) / 2
        is_centred = len(about) > 2 and abs(about.mean()) < 3 * about.std() / np.sqrt(len(about))
        if name in mean.averaged and name not in one.averaged and len(strides) == 1 and max(strides) > 1 and is_centred:
            text = f"the numbers of {mean.name} are means over {max(strides):.0f} steps, those of {one.name} may be of"
            found[name] = f"{text} single steps; log every step in one of both, whose means are then compared", False
    return found


def _broken(metrics: Sequence[Compared]) -> tuple[tuple[str, str, float, str], ...]:
    """Find where a metric stops being finite on one side alone: metric, side, first position, for how long."""
    found = []
    for one in metrics:
        a, b = (np.isfinite(mean) for mean in one.means)
        for side, own, other in (("A", a, b), ("B", b, a)):
            if len(alone := np.flatnonzero(~own & other)):
                later = own[alone[0] + 1 :]
                course = ALONE if later.all() else "for some time" if later.any() else "to the end"
                found.append((one.name, side, float(one.aligned.positions[alone[0]]), course))
    return tuple(found)


def _resumed(runs: Sequence[Run]) -> dict[int, str]:
    return {step: run.name for run in runs for step in run.resumed}


def _numbers(runs: Sequence[Run]) -> dict[int, list[str]]:
    """Find the counts of ranks and micro-batches in logs' headers, with their names: a factor may be one of them."""
    found: dict[int, list[str]] = {}
    for name, value in dict.fromkeys(leaf for run in runs for leaf in _leaves(run.facts)):
        if isinstance(value, int) and value > 1 and COUNTS.search(name):
            found.setdefault(value, []).append(name)
    return found


def _leaves(values: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, value in values.items():
        found += _leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(f"{prefix}{name}", value)]
    return [(name, value) for name, value in found if isinstance(value, int)]
