"""Slower: which backends and cells take longer than in earlier runs, by a rule that a busy machine does not trip.

A machine that is busy slows all backends alike, so a backend is measured by the others. A single cell may pay for the
start of its ranks by chance, so it has to take much longer than it ever did. docs/guides/ci.md has the rule. Without
torch.

Since: what has changed between earlier runs and this one: cells, versions, and how long cells take; without torch.

Serves claim 9 over time: a cell that was judged and is refused now, or that passes every other night, is told, however
green the run is. Everything is computed from a baseline (conformance.results.baseline) and the cells of the run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from conformance.results.baseline import CHANGED, COMMIT, Baseline, EarlierRun, Outcome, backend_of
from conformance.results.verdict import FAILED, NO_ANSWER, NO_FAULT, STATES, RunVerdict, State, depth

LEAST_CELLS = 8  # a median over fewer cells says nothing about a backend
LEAST_RUNS = 3  # a cell with fewer earlier times has no range that its time could be outside of
BACKEND_SLOWER = 1.5  # times
CELL_SLOWER = 3.0  # times the longest it has ever taken
CELL_SECONDS = 30.0  # more than starting the ranks takes on a busy machine, which a cell pays for by chance


@dataclass(frozen=True, kw_only=True)
class Slower:
    """A backend, or a cell, that takes longer. ``times``: how many times as long, on a machine of the same speed."""

    what: str
    times: float
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.times:.1f} times as long ({self.why})"


def slower_than(baseline: Baseline, now: Mapping[str, Outcome]) -> tuple[Slower, ...]:
    """Backends and cells that take longer, by the rule in docs/guides/ci.md."""
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
            why = f"{taken:.0f} s, and at most {max(past):.0f} s in {len(past)} earlier runs"
            slower.append(Slower(what=cell, times=times[cell] / speed, why=why))
    return tuple(slower)


def _backends(times: Mapping[str, float]) -> tuple[list[Slower], dict[str, float]]:
    """The backends that take longer, and for each backend how many times as long the machine takes. ``times``: how many
    times as long each cell takes."""
    by_backend: dict[str, list[float]] = {}
    for cell, ratio in times.items():
        by_backend.setdefault(backend_of(cell), []).append(ratio)
    slower, machine = [], {}
    for backend, ratios in by_backend.items():
        others = [ratio for cell, ratio in times.items() if backend_of(cell) != backend]
        is_told_apart = len(others) >= LEAST_CELLS
        machine[backend] = max(1.0, median(others if is_told_apart else ratios))
        own = median(ratios) / (machine[backend] if is_told_apart else 1.0)
        if len(ratios) >= LEAST_CELLS and own > BACKEND_SLOWER:
            why = f"median of {len(ratios)} cells; the other backends' is {machine[backend]:.1f}"
            alone = f"median of {len(ratios)} cells; without another backend, machine and code cannot be told apart"
            slower.append(Slower(what=backend, times=own, why=why if is_told_apart else alone))
    return slower, machine


Kind = Literal["new", "unjudged", "refused", "gone", "less", "declared", "fixed", "judged", "more"]
# In the order in which a reader wants to see them.
KINDS: dict[Kind, str] = {
    "new": "newly differing",
    "unjudged": "newly without an answer",
    "refused": "newly refused",
    "gone": "gone",
    "less": "shows less",
    "declared": "newly an expected difference",
    "fixed": "fixed",
    "judged": "newly judged",
    "more": "shows more",
}
CELLS_LISTED = 3  # most cells that a line names


@dataclass(frozen=True, kw_only=True)
class Change:
    """A cell that ends otherwise than in an earlier run.

    before, now: its state in the earlier run and in this one; None if the run does not have the cell.
    """

    cell: str
    before: State | None
    now: State | None

    @property
    def kind(self) -> Kind | None:
        """What the change is called; None if there is nothing to tell."""
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
    """The cells that changed, in the order of KINDS. ``before``, ``now``: states by cell id."""
    every = [Change(cell=c, before=before.get(c), now=now.get(c)) for c in dict.fromkeys([*before, *now])]
    kinds = list(KINDS)
    return tuple(
        sorted((change for change in every if change.kind), key=lambda change: kinds.index(change.kind or "new"))
    )


def _word(state: State | None) -> str:
    return STATES[state].name if state else "not in the run"


@dataclass(frozen=True, kw_only=True)
class OracleChange:
    """A cell whose reference is somebody else's implementation than in an earlier run. before, now: whose; empty if the
    oracle's own. A reference of the second class does not see the errors of transformers itself."""

    cell: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{_whose(self.before)}, now {_whose(self.now)}"


def oracle_changes(before: Mapping[str, Outcome], now: Mapping[str, Outcome]) -> tuple[OracleChange, ...]:
    """The cells that were judged in both runs, by references that are known and not the same."""
    both = [(cell, before[cell].second_class, now[cell].second_class) for cell in now if cell in before]
    return tuple(
        OracleChange(cell=cell, before=then, now=whose)
        for cell, then, whose in both
        if then is not None and whose is not None and then != whose
    )


def _whose(second_class: str) -> str:
    return f"second-class oracle, {second_class}" if second_class else "the suite's own oracle"


@dataclass(frozen=True, kw_only=True)
class VersionChange:
    """A version that may explain a change. Equal texts mean a checkout with changed files, whose code is unknown."""

    name: str
    before: str
    now: str

    def __str__(self) -> str:
        if self.before == self.now:
            return f"{self.name} {self.now} (files were changed, so the code may be another)"
        return f"{self.name} {self.before} → {self.now}"


def version_changes(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[VersionChange, ...]:
    """The versions that are not known to be equal, of those that both runs name."""
    return tuple(
        VersionChange(name=name, before=before[name], now=version)
        for name, version in now.items()
        if name in before and (before[name] != version or (name == COMMIT and CHANGED in version))
    )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """This run beside one earlier run. ``suspects``: the versions that changed in between."""

    started: str
    verdict: RunVerdict | None
    changes: tuple[Change, ...]
    oracles: tuple[OracleChange, ...]
    suspects: tuple[VersionChange, ...]

    @property
    def by_kind(self) -> dict[Kind, list[Change]]:
        """The changes of each kind that there is, in the order of KINDS."""
        found = {kind: [change for change in self.changes if change.kind == kind] for kind in KINDS}
        return {kind: changes for kind, changes in found.items() if changes}

    @property
    def when(self) -> str:
        """The earlier run in words, to follow *the last run*."""
        known = (self.started[:16].replace("T", " "), (self.verdict or "").replace("_", " "))
        return f" ({', '.join(filter(None, known))})" if any(known) else ""


@dataclass(frozen=True, kw_only=True)
class Flaky:
    """A cell that ended otherwise although no version changed. ``why``: when, in words."""

    cell: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Since:
    """All that is said about earlier runs.

    path: of the baseline. last, green: this run beside the last one, and beside the last one that passed; None if there
    is none, and ``green`` is also None if the last run passed.
    """

    path: str
    last: Comparison | None
    green: Comparison | None
    flaky: tuple[Flaky, ...]
    slower: tuple[Slower, ...]

    @property
    def comparisons(self) -> list[tuple[str, Comparison]]:
        """The comparisons with their names in words."""
        found = (("the last run", self.last), ("the last green run", self.green))
        return [(name, comparison) for name, comparison in found if comparison]

    @property
    def text(self) -> list[str]:
        """The same in lines for a terminal."""
        lines = [] if self.last else [f"no earlier run of these cells in {self.path}"]
        for name, beside in self.comparisons:
            told = [f"{KINDS[kind]}: {list_cells(changes)}" for kind, changes in beside.by_kind.items()]
            lines.append(f"since {name}{beside.when}: {'; '.join(told) or 'no cell changed'}")
            lines += [f"  judged by another oracle: {told}" for told in _by_oracle(beside.oracles)]
            if beside.suspects:
                lines.append(f"  changed in between: {'; '.join(map(str, beside.suspects))}")
        lines += [f"flaky: {flaky.cell}: {flaky.why}" for flaky in self.flaky[:CELLS_LISTED]]
        if len(self.flaky) > CELLS_LISTED:
            lines.append(f"flaky: {len(self.flaky) - CELLS_LISTED} more")
        return [*lines, *(f"slower: {slower}" for slower in self.slower)]


def _by_oracle(changes: Sequence[OracleChange]) -> Iterator[str]:
    """A line for each two oracles."""
    for said in dict.fromkeys(map(str, changes)):
        yield f"{said}: {list_cells([change for change in changes if str(change) == said])}"


def list_cells(changes: Sequence[Change | OracleChange]) -> str:
    """The first cells and the number of further ones, in words."""
    more = f" and {len(changes) - CELLS_LISTED} more" if len(changes) > CELLS_LISTED else ""
    return ", ".join(change.cell for change in changes[:CELLS_LISTED]) + more


def since_to_json(since: Since) -> dict[str, Any]:
    """The values of ``since`` in ``summary.json``; docs/reference/file-formats.md has them."""

    def beside(comparison: Comparison | None) -> dict[str, Any] | None:
        if comparison is None:
            return None
        changes = [{"kind": change.kind, **vars(change)} for change in comparison.changes]
        told = {name: [vars(one) for one in getattr(comparison, name)] for name in ("oracles", "suspects")}
        return {**vars(comparison), "changes": changes, **told}

    told = {"flaky": [vars(one) for one in since.flaky], "slower": [vars(one) for one in since.slower]}
    return {"path": since.path, "last": beside(since.last), "green": beside(since.green), **told, "text": since.text}


def compare(baseline: Baseline, now: Mapping[str, Outcome], *, started: str, versions: Mapping[str, str]) -> Since:
    """What has changed since the runs of ``baseline``. ``now``: the cells of this run by id."""
    last, green = baseline.last, baseline.green
    return Since(
        path=baseline.path,
        last=_beside(baseline, last, now, versions) if last else None,
        green=_beside(baseline, green, now, versions) if green and green is not last else None,
        flaky=tuple(_flaky(baseline, now, started, versions)),
        slower=slower_than(baseline, now),
    )


def _beside(baseline: Baseline, run: EarlierRun, now: Mapping[str, Outcome], versions: Mapping[str, str]) -> Comparison:
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
    """Cells that the user had run again and that ended otherwise then; and cells that ended otherwise in two runs, one
    after the other, without any change of versions. Runs that refused a cell or did not reach it do not count."""
    runs = [(run.started, run.versions, baseline.outcomes(run)) for run in baseline.runs]
    runs.append((started, dict(versions), dict(now)))
    for cell, found in now.items():
        if other := [state for state in found.before if state != found.state]:
            yield Flaky(cell=cell, why=f"{_word(other[-1])}, and when it was run again {_word(found.state)}")
            continue
        seen = [(when, of, outcomes[cell].state) for when, of, outcomes in runs if cell in outcomes]
        seen = [point for point in seen if point[2] not in ("not_run", "unsupported")]
        turns = [(a, b) for a, b in pairwise(seen) if a[2] != b[2] and a[1] and not version_changes(a[1], b[1])]
        if turns:
            (then, _, was), (when, _, became) = turns[-1]
            again = f" ({len(turns)} times in {len(seen)} runs)" if len(turns) > 1 else ""
            why = f"{_word(was)} {_on(then)}, {_word(became)} {_on(when)}, with the same versions{again}"
            yield Flaky(cell=cell, why=why)


def _on(started: str) -> str:
    return f"on {started[:16].replace('T', ' ')}" if started else "in an earlier run"
