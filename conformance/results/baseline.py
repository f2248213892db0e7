"""Baseline: what is known of the earlier runs that a run is compared with; without torch.

A baseline is one earlier run, or the latest ones of a history (conformance.results). It is kept in the run's own
``summary.json``, so that a report needs no other folder. It holds facts only; conformance.results.changes computes what
is new, fixed, flaky or slower.

Trend: how the cells of each backend ended, counted, from run to run; without torch.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from conformance.records.record_format import first_error
from conformance.results.verdict import ANSWERED, NO_FAULT, PASSES, STATES, RunVerdict, State, depth

COMMIT = "commit"  # the name among the versions of the git commit of the suite
CHANGED = "-changed"  # the end of a commit's name if files of the checkout were changed: the code has no name then
RANKS_PER_GPU = "ranks_per_gpu"  # of the environment: how many ranks might share a GPU, if more than one
HOST = ("platform", "cpus")  # of the environment: what a run of the same code may have otherwise


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one cell ended in a run.

    seconds: how long it took; None if that is not comparable, because it was not judged, did not pass (what differs is
        run twice), or was run again by the user.
    before: the states in which it had ended when the user had it run again.
    second_class: whose implementation the reference was; empty if it was the oracle's own; None if the cell was not
        judged, or an older version did not keep it.
    """

    state: State
    seconds: float | None = None
    before: tuple[State, ...] = ()
    second_class: str | None = None


def outcome(*, state: State, seconds: float, before: Sequence[State] = (), second_class: str | None = None) -> Outcome:
    """The Outcome of a cell from the fields of its verdict."""
    comparable = state in NO_FAULT and not before and 0 < seconds < math.inf
    return Outcome(
        state=state,
        seconds=round(seconds, 3) if comparable else None,
        before=tuple(before),
        second_class=second_class if state in ANSWERED else None,
    )


@dataclass(frozen=True, kw_only=True)
class EarlierRun:
    """An earlier run. ``states``, ``seconds`` and ``second_class`` have an entry for each cell of the baseline; None if
    the run does not have the cell, or its seconds are not comparable, or its oracle is not known. ``second_class`` is
    empty in files of older versions.

    started: UTC time in ISO format, or empty if it is unknown, as ``verdict`` is None then. versions: by name.
    """

    started: str = ""
    verdict: RunVerdict | None = None
    versions: dict[str, str]
    states: tuple[State | None, ...]
    seconds: tuple[float | None, ...]
    second_class: tuple[str | None, ...] = ()

    @property
    def is_green(self) -> bool:
        return self.verdict in PASSES


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The earlier runs that a run is compared with.

    path: as the user gave it. cells: the ids of all cells of the runs. runs: from the earliest to the latest; none if a
    history has no run of this selection.
    """

    path: str
    cells: tuple[str, ...] = ()
    runs: tuple[EarlierRun, ...] = ()

    def __post_init__(self) -> None:
        lengths = {
            len(column) for run in self.runs for column in (run.states, run.seconds, run.second_class or run.states)
        }
        if lengths - {len(self.cells)}:
            raise ValueError("an earlier run has other cells than the baseline")

    @property
    def last(self) -> EarlierRun | None:
        return self.runs[-1] if self.runs else None

    @property
    def green(self) -> EarlierRun | None:
        """The latest run that passed; None if none did."""
        return next((run for run in reversed(self.runs) if run.is_green), None)

    def outcomes(self, run: EarlierRun) -> dict[str, Outcome]:
        """How each cell that ``run`` has ended, by id."""
        oracles = run.second_class or (None,) * len(self.cells)
        rows = zip(self.cells, run.states, run.seconds, oracles, strict=True)
        return {cell: Outcome(state=s, seconds=took, second_class=whose) for cell, s, took, whose in rows if s}

    @property
    def demanded(self) -> dict[str, State]:
        """How each cell has to be covered at least, by id: as in the last green run that has it, or in a later run, so
        that a loss is not forgotten after a night, nor in a green run of fewer cells. Where no green run has the cell,
        all runs count."""
        found: dict[str, State] = {}
        settled: set[str] = set()
        for run in reversed(self.runs):
            states = {cell: ended.state for cell, ended in self.outcomes(run).items() if cell not in settled}
            for cell, state in states.items():
                if cell not in found or _covers(state) > _covers(found[cell]):
                    found[cell] = state
            if run.is_green:
                settled |= states.keys()
        return {cell: found[cell] for cell in self.cells if cell in found}


def _covers(state: State) -> tuple[int, bool]:
    """Sorts states by what they show of a cell; a cell that conforms has no declared defect."""
    return depth(state), state == "conforms"


RunFacts = tuple[str, RunVerdict | None, dict[str, str], Mapping[str, Outcome]]


def make_baseline(path: str, found: Sequence[RunFacts]) -> Baseline:
    """A baseline from (started, verdict, versions, outcomes by cell) of each run, from the earliest to the latest."""
    cells = tuple(dict.fromkeys(cell for *_, outcomes in found for cell in outcomes))
    absent = Outcome(state="not_run")
    return Baseline(
        path=path,
        cells=cells,
        runs=tuple(
            EarlierRun(
                started=started,
                verdict=verdict,
                versions=versions,
                states=tuple(outcomes[cell].state if cell in outcomes else None for cell in cells),
                seconds=tuple(outcomes.get(cell, absent).seconds for cell in cells),
                second_class=tuple(outcomes.get(cell, absent).second_class for cell in cells),
            )
            for started, verdict, versions, outcomes in found
        ),
    )


_BASELINE = TypeAdapter(Baseline)


def baseline_from_json(values: Any) -> Baseline:
    """A Baseline from the JSON values of ``dataclasses.asdict``. Raises ValueError for others."""
    try:
        return _BASELINE.validate_python(values)
    except ValidationError as error:
        raise ValueError(f"a baseline, not one with {first_error(error)}") from None


def backend_of(cell: str) -> str:
    """The backend in a cell's id, or the chain of backends."""
    return (*cell.split("/"), "", "", "")[2]


def versions_of(environment: Mapping[str, Any]) -> dict[str, str]:
    """The versions in a run's environment, without what says nothing about code, as texts."""
    return {name: _text(value) for name, value in environment.items() if name not in HOST}


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)


Counts = dict[State, int]


def by_backend(outcomes: Mapping[str, Outcome]) -> dict[str, Counts]:
    """By backend, how many of its cells ended in each state, in the order of STATES."""
    found: dict[str, Any] = {}
    for cell, outcome in outcomes.items():
        found.setdefault(backend_of(cell), Counter())[outcome.state] += 1
    return {backend: {state: counts[state] for state in STATES if counts[state]} for backend, counts in found.items()}


def lent_of(outcomes: Mapping[str, Outcome]) -> dict[str, int]:
    """By backend, how many of its cells were judged by an oracle of the second class; without those that have none."""
    return Counter(backend_of(cell) for cell, outcome in outcomes.items() if outcome.second_class)


def fared(counts: Counts) -> str:
    """``10 of 12 conform, 2 differs``: of the cells that were not refused; then what else there is; empty if none."""
    asked = sum(count for state, count in counts.items() if state != "unsupported")
    others = [f"{count} {STATES[state].name}" for state, count in counts.items() if state != "conforms"]
    return ", ".join([f"{counts.get('conforms', 0)} of {asked} conform", *others]) if counts else ""
