"""Computes the changes since earlier runs: states of cells, versions, and the time that cells take.

A cell that was judged before and is unsupported now, or that passes every other night, is reported even if the run is
green. A busy machine slows all backends, so a backend is measured relative to the others. A single cell sometimes
includes the start of its ranks, so it has to take much longer than ever before. docs/guides/ci.md has the rules.
Everything is computed from a baseline (conformance.results.baseline) and the cells of the run, without torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from conformance.core.errors import first_few
from conformance.results.baseline import CHANGED, COMMIT, Baseline, EarlierRun, Outcome, backend_of
from conformance.results.verdict import FAILED, NO_ANSWER, NO_FAULT, STATES, RunVerdict, State, depth, named, number

LEAST_CELLS = 8  # a median over fewer cells says nothing about a backend
LEAST_RUNS = 3  # fewer earlier times of a cell are no range to compare with
BACKEND_SLOWER = 1.5  # times
CELL_SLOWER = 3.0  # times the longest earlier time
GREW = 10.0  # times the largest earlier error
LEAST_ERROR = 1e-14  # smaller errors are a few units in the last place of float64, and move with any kernel
CELL_SECONDS = 30.0  # more than starting the ranks takes on a busy machine; some cells include that start


@dataclass(frozen=True, kw_only=True)
class Slower:
    """Holds a backend or a cell that takes longer. times: how many times as long, at the same speed of the machine."""

    what: str
    times: float
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.times:.1f} times as long ({self.why})"


def slower_than(baseline: Baseline, now: Mapping[str, Outcome]) -> tuple[Slower, ...]:
    """Returns the backends and cells that take longer, by the rule in docs/guides/ci.md."""
    earlier: dict[str, list[float]] = {}
    for run in baseline.runs:
        for cell, found in baseline.outcomes(run).items():
            if found.seconds:
                earlier.setdefault(cell, []).append(found.seconds)
    seconds = {cell: found.seconds for cell, found in now.items() if found.seconds and cell in earlier}
    times = {cell: taken / median(earlier[cell]) for cell, taken in seconds.items()}
    slower, machine = _backends(times)
    for cell, taken in seconds.items():
        past, speed = earlier[cell], machine[backend_of(cell)]
        bound = speed * max(past)
        if len(past) >= LEAST_RUNS and taken > CELL_SLOWER * bound and taken - bound > CELL_SECONDS:
            why = f"{taken:.0f} s, at most {max(past):.0f} s in {len(past)} earlier runs"
            slower.append(Slower(what=cell, times=times[cell] / speed, why=why))
    return tuple(slower)


@dataclass(frozen=True, kw_only=True)
class Grown:
    """Holds a stage of a passing cell whose error is much larger than in any earlier run in which the cell passed."""

    cell: str
    stage: str
    before: float
    now: float

    def __str__(self) -> str:
        return f"error of {self.stage} {number(self.now)}, at most {number(self.before)} before"


def grown_since(baseline: Baseline, now: Mapping[str, Outcome]) -> tuple[Grown, ...]:
    """Returns the stages of passing cells whose error grew, the most grown first, by the rule in docs/guides/ci.md."""
    largest = dict(zip(baseline.cells, baseline.largest, strict=False))
    grown = [
        Grown(cell=cell, stage=stage, before=before, now=ended.errors[stage])
        for cell, ended in now.items()
        if ended.state in NO_FAULT
        for stage, before in largest.get(cell, {}).items()
        if ended.errors.get(stage, 0.0) > max(GREW * before, LEAST_ERROR)
    ]
    return tuple(sorted(grown, key=lambda one: one.now / max(one.before, LEAST_ERROR / GREW), reverse=True))


def _backends(times: Mapping[str, float]) -> tuple[list[Slower], dict[str, float]]:
    """Returns the backends that take longer, and for each backend how many times as long the machine takes.

    times: how many times as long each cell takes.
    """
    by_backend: dict[str, list[float]] = {}
    for cell, ratio in times.items():
        by_backend.setdefault(backend_of(cell), []).append(ratio)
    slower, machine = [], {}
    for backend, ratios in by_backend.items():
        other_backends = [ratio for cell, ratio in times.items() if backend_of(cell) != backend]
        is_separable = len(other_backends) >= LEAST_CELLS
        machine[backend] = max(1.0, median(other_backends if is_separable else ratios))
        own = median(ratios) / (machine[backend] if is_separable else 1.0)
        if len(ratios) >= LEAST_CELLS and own > BACKEND_SLOWER:
            why = f"median of {len(ratios)} cells; the other backends' is {machine[backend]:.1f}"
            why_alone = f"median of {len(ratios)} cells; without another backend, machine and code cannot be told apart"
            slower.append(Slower(what=backend, times=own, why=why if is_separable else why_alone))
    return slower, machine


Kind = Literal["new", "unjudged", "refused", "gone", "less", "declared", "fixed", "judged", "more"]
KINDS: dict[Kind, str] = {  # the most important kinds come first
    "new": "newly failing",
    "unjudged": "newly without an answer",
    "refused": "newly unsupported",
    "gone": "gone",
    "less": "shows less",
    "declared": "newly an expected difference",
    "fixed": "fixed",
    "judged": "newly judged",
    "more": "shows more",
}
CELLS_LISTED = 3  # maximum number of cells that a line names


@dataclass(frozen=True, kw_only=True)
class Change:
    """Holds a cell whose state differs between an earlier run and this one.

    before, now: the states in the earlier run and in this one; None if the run does not have the cell.
    """

    cell: str
    before: State | None
    now: State | None

    @property
    def kind(self) -> Kind | None:
        """Returns the kind of the change; None if it is not reported."""
        before, now = self.before, self.now
        if now == before:
            return None
        if now is None:
            return None if before == "unsupported" else "gone"
        if now == "differs":
            return "new"
        if now in NO_ANSWER:
            return None if before in NO_ANSWER else "unjudged"
        if now == "unsupported":
            return "refused" if before else None
        if before in FAILED or (before == "expected_difference" and now == "conforms"):
            return "fixed"
        if before not in NO_FAULT:
            return "judged"
        return "less" if now == "partly_observed" else "declared" if now == "expected_difference" else "more"

    @property
    def is_loss(self) -> bool:
        """Whether less is known about the cell than before, or a defect is declared where it had none."""
        is_declared = (self.before, self.now) == ("conforms", "expected_difference")
        return depth(self.now) < depth(self.before) or is_declared

    def __str__(self) -> str:
        return f"{_word(self.before)}, now {_word(self.now)}"


def changes_between(before: Mapping[str, State], now: Mapping[str, State]) -> tuple[Change, ...]:
    """Returns the cells that changed, in the order of KINDS. before, now: states by cell id."""
    every = [Change(cell=c, before=before.get(c), now=now.get(c)) for c in dict.fromkeys([*before, *now])]
    kinds = list(KINDS)
    return tuple(
        sorted((change for change in every if change.kind), key=lambda change: kinds.index(change.kind or "new"))
    )


def _word(state: State | None) -> str:
    return STATES[state].name if state else "not in the run"


@dataclass(frozen=True, kw_only=True)
class OracleChange:
    """Holds a cell whose reference is another implementation than in an earlier run.

    before, now: the implementations; empty for the oracle's own. A second-class reference does not show errors of
    transformers itself.
    """

    cell: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{_whose(self.before)}, now {_whose(self.now)}"


def oracle_changes(before: Mapping[str, Outcome], now: Mapping[str, Outcome]) -> tuple[OracleChange, ...]:
    """Returns the cells that two different, known references judged in the two runs."""
    both = [(cell, before[cell].second_class, now[cell].second_class) for cell in now if cell in before]
    return tuple(
        OracleChange(cell=cell, before=then, now=whose)
        for cell, then, whose in both
        if then is not None and whose is not None and then != whose
    )


def _whose(second_class: str) -> str:
    return f"second-class reference, {second_class}" if second_class else "the suite's own reference"


@dataclass(frozen=True, kw_only=True)
class VersionChange:
    """Holds a version that may explain a change. Equal texts mean a checkout with changed files, of unknown code."""

    name: str
    before: str
    now: str

    def __str__(self) -> str:
        if self.before == self.now:
            return f"{self.name} {self.now} (files were changed, so the code may differ)"
        return f"{self.name} {self.before} → {self.now}"


def version_changes(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[VersionChange, ...]:
    """Returns the versions that both runs name and that are not known to be equal."""
    return tuple(
        VersionChange(name=name, before=before[name], now=version)
        for name, version in now.items()
        if name in before and (before[name] != version or (name == COMMIT and CHANGED in version))
    )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Holds the comparison of this run with one earlier run. suspects: the versions that changed in between."""

    started: str
    verdict: RunVerdict | None
    changes: tuple[Change, ...]
    oracles: tuple[OracleChange, ...]
    suspects: tuple[VersionChange, ...]

    @property
    def by_kind(self) -> dict[Kind, list[Change]]:
        """Returns the changes by kind, in the order of KINDS. Kinds without changes are left out."""
        found = {kind: [change for change in self.changes if change.kind == kind] for kind in KINDS}
        return {kind: changes for kind, changes in found.items() if changes}

    @property
    def when(self) -> str:
        """Returns time and verdict of the earlier run, as text to put after *the last run*."""
        known = (self.started[:16].replace("T", " "), named(self.verdict) if self.verdict else "")
        return f" ({', '.join(filter(None, known))})" if any(known) else ""


@dataclass(frozen=True, kw_only=True)
class Flaky:
    """Holds a cell whose state changed although no version did. why: the states and times, in words."""

    cell: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Since:
    """Holds the whole comparison with earlier runs.

    path: of the baseline. last, green: the comparisons with the last run, and with the last run that passed; None if
    there is no such run. ``green`` is also None if the last run passed. grown: errors of passing cells that grew.
    """

    path: str
    last: Comparison | None
    green: Comparison | None
    flaky: tuple[Flaky, ...]
    slower: tuple[Slower, ...]
    grown: tuple[Grown, ...]

    @property
    def comparisons(self) -> list[tuple[str, Comparison]]:
        """Returns the comparisons with the names of the earlier runs."""
        found = (("the last run", self.last), ("the last green run", self.green))
        return [(name, comparison) for name, comparison in found if comparison]

    @property
    def text(self) -> list[str]:
        """Returns the comparison in lines for a terminal."""
        lines = [] if self.last else [f"no earlier run of these cells in {self.path}"]
        for name, comparison in self.comparisons:
            changed = [f"{KINDS[kind]}: {list_cells(changes)}" for kind, changes in comparison.by_kind.items()]
            lines.append(f"since {name}{comparison.when}: {'; '.join(changed) or 'no cell changed'}")
            lines += [f"  judged by another reference: {line}" for line in _by_oracle(comparison.oracles)]
            if comparison.suspects:
                lines.append(f"  changed in between: {'; '.join(map(str, comparison.suspects))}")
        flaky = [f"{one.cell}: {one.why}" for one in self.flaky]
        for word, found in (("flaky", flaky), ("drift", [f"{one.cell}: {one}" for one in self.grown])):
            lines += [f"{word}: {text}" for text in found[:CELLS_LISTED]]
            if len(found) > CELLS_LISTED:
                lines.append(f"{word}: {len(found) - CELLS_LISTED} more")
        return [*lines, *(f"slower: {slower}" for slower in self.slower)]


def _by_oracle(changes: Sequence[OracleChange]) -> Iterator[str]:
    """Yields a line for each pair of oracles."""
    for pair in dict.fromkeys(map(str, changes)):
        yield f"{pair}: {list_cells([change for change in changes if str(change) == pair])}"


def list_cells(changes: Sequence[Change | OracleChange]) -> str:
    """Lists the first cells and counts the rest."""
    return first_few([change.cell for change in changes], most=CELLS_LISTED)


def since_to_json(since: Since) -> dict[str, Any]:
    """Returns the value of ``since`` in ``summary.json`` (docs/reference/file-formats.md)."""

    def to_json(comparison: Comparison | None) -> dict[str, Any] | None:
        if comparison is None:
            return None
        changes = [{"kind": change.kind, **vars(change)} for change in comparison.changes]
        lists = {name: [vars(one) for one in getattr(comparison, name)] for name in ("oracles", "suspects")}
        return {**vars(comparison), "changes": changes, **lists}

    lists = {name: [vars(one) for one in getattr(since, name)] for name in ("flaky", "slower", "grown")}
    return {"path": since.path, "last": to_json(since.last), "green": to_json(since.green), **lists, "text": since.text}


def compare(baseline: Baseline, now: Mapping[str, Outcome], *, started: str, versions: Mapping[str, str]) -> Since:
    """Compares this run with the runs of ``baseline``. now: the cells of this run by id."""
    last, green = baseline.last, baseline.green
    return Since(
        path=baseline.path,
        last=_compare_with(baseline, last, now, versions) if last else None,
        green=_compare_with(baseline, green, now, versions) if green and green is not last else None,
        flaky=tuple(_flaky(baseline, now, started, versions)),
        slower=slower_than(baseline, now),
        grown=grown_since(baseline, now),
    )


def _compare_with(
    baseline: Baseline, run: EarlierRun, now: Mapping[str, Outcome], versions: Mapping[str, str]
) -> Comparison:
    before = baseline.outcomes(run)
    then, ended = ({cell: found.state for cell, found in of.items()} for of in (before, now))
    return Comparison(
        started=run.started,
        verdict=run.verdict,
        changes=changes_between(then, ended),
        oracles=oracle_changes(before, now),
        suspects=version_changes(run.versions, versions),
    )


def _flaky(
    baseline: Baseline, now: Mapping[str, Outcome], started: str, versions: Mapping[str, str]
) -> Iterator[Flaky]:
    """Yields cells that changed their state when the user ran them again, or between consecutive runs of the same
    versions. Runs in which a cell was unsupported or not reached do not count."""
    runs = [(run.started, run.versions, baseline.outcomes(run)) for run in baseline.runs]
    runs.append((started, dict(versions), dict(now)))
    for cell, found in now.items():
        if other := [state for state in found.before if state != found.state]:
            yield Flaky(cell=cell, why=f"{_word(other[-1])}, and when it was run again {_word(found.state)}")
            continue
        points = [(when, of, outcomes[cell].state) for when, of, outcomes in runs if cell in outcomes]
        points = [point for point in points if point[2] not in ("not_run", "unsupported")]
        turns = [(a, b) for a, b in pairwise(points) if a[2] != b[2] and a[1] and not version_changes(a[1], b[1])]
        if turns:
            (then, _, was), (when, _, became) = turns[-1]
            again = f" ({len(turns)} times in {len(points)} runs)" if len(turns) > 1 else ""
            why = f"{_word(was)} {_on(then)}, {_word(became)} {_on(when)}, with the same versions{again}"
            yield Flaky(cell=cell, why=why)


def _on(started: str) -> str:
    return f"on {started[:16].replace('T', ' ')}" if started else "in an earlier run"
