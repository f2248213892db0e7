"""Holds the facts about the earlier runs that a run is compared with. Does not import torch.

A baseline is one earlier run, or the latest runs of a history. The run's own ``summary.json`` contains it, so a report
needs no other folder. conformance.results.changes computes which cells are new, fixed, flaky or slower.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from conformance.records.record_format import first_error
from conformance.results.verdict import ANSWERED, NO_FAULT, PASSES, STATES, RunVerdict, State, depth

COMMIT = "commit"  # key of the suite's git commit in the environment
CHANGED = "-changed"  # suffix of a commit if files of the checkout were changed, so that the code is unknown
RANKS_PER_GPU = "ranks_per_gpu"  # key in the environment: how many ranks might share a GPU, if more than one
HOST = ("platform", "cpus")  # keys of the environment that may differ between runs of the same code


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Holds how one cell ended in a run.

    seconds: the time that the cell took; None if it is not comparable, because the cell was not judged, did not pass
        (a cell that differs runs twice), or was run again by the user.
    before: the states in which the cell ended before the user ran it again.
    second_class: the implementation that was the reference; empty for the oracle's own; None if the cell was not
        judged, or if an older version did not record it.
    errors: by stage, the largest relative error; empty if the cell was not judged, or in runs of older versions.
    """

    state: State
    seconds: float | None = None
    before: tuple[State, ...] = ()
    second_class: str | None = None
    errors: dict[str, float] = field(default_factory=dict)


def outcome(
    *,
    state: State,
    seconds: float,
    before: Sequence[State] = (),
    second_class: str | None = None,
    errors: Mapping[str, float] | None = None,
) -> Outcome:
    """Returns the Outcome of a cell from the fields of its verdict. Errors are rounded to two digits."""
    is_answered = state in ANSWERED
    comparable = state in NO_FAULT and not before and 0 < seconds < math.inf
    return Outcome(
        state=state,
        seconds=round(seconds, 3) if comparable else None,
        before=tuple(before),
        second_class=second_class if is_answered else None,
        errors={stage: float(f"{error:.1e}") for stage, error in (errors or {}).items()} if is_answered else {},
    )


@dataclass(frozen=True, kw_only=True)
class EarlierRun:
    """Holds an earlier run.

    ``states``, ``seconds`` and ``second_class`` have one entry for each cell of the baseline. An entry is None if the
    run does not have the cell, its seconds are not comparable, or its oracle is not known. ``second_class`` is empty in
    files of older versions. started: UTC time in ISO format; if it is unknown, it is empty and ``verdict`` is None.
    versions: by name.
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
    """Holds the earlier runs that a run is compared with.

    path: as the user gave it. cells: the ids of all cells of the runs. runs: from the earliest to the latest; empty if
    a history has no run of this selection. largest: for each cell, the largest error of each stage in the runs in which
    it passed; empty in files of older versions.
    """

    path: str
    cells: tuple[str, ...] = ()
    runs: tuple[EarlierRun, ...] = ()
    largest: tuple[dict[str, float], ...] = ()

    def __post_init__(self) -> None:
        lengths = {
            len(column) for run in self.runs for column in (run.states, run.seconds, run.second_class or run.states)
        }
        if (lengths | {len(self.largest or self.cells)}) - {len(self.cells)}:
            raise ValueError("an earlier run has other cells than the baseline")

    @property
    def last(self) -> EarlierRun | None:
        return self.runs[-1] if self.runs else None

    @property
    def green(self) -> EarlierRun | None:
        """Returns the latest run that passed; None if none did."""
        return next((run for run in reversed(self.runs) if run.is_green), None)

    def outcomes(self, run: EarlierRun) -> dict[str, Outcome]:
        """Returns how each cell of ``run`` ended, by id."""
        oracles = run.second_class or (None,) * len(self.cells)
        rows = zip(self.cells, run.states, run.seconds, oracles, strict=True)
        return {cell: Outcome(state=s, seconds=took, second_class=whose) for cell, s, took, whose in rows if s}

    @property
    def demanded(self) -> dict[str, State]:
        """Returns the state that covers each cell best, by id, since the last green run that has the cell.

        A loss is so reported again in later runs, also after a green run of fewer cells. If no green run has the cell,
        all runs count.
        """
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
    """Sorts states by how much is known about the cell; a cell that conforms also has no declared defect."""
    return depth(state), state == "conforms"


RunFacts = tuple[str, RunVerdict | None, dict[str, str], Mapping[str, Outcome]]


def make_baseline(path: str, found: Sequence[RunFacts]) -> Baseline:
    """Makes a baseline from (started, verdict, versions, outcomes by cell) of each run, from the earliest to the
    latest."""
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
        largest=tuple(_largest(outcomes.get(cell, absent) for *_, outcomes in found) for cell in cells),
    )


def _largest(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Returns the largest error of each stage in the outcomes that passed."""
    found: dict[str, float] = {}
    for one in outcomes:
        for stage, error in one.errors.items() if one.state in NO_FAULT else ():
            found[stage] = max(error, found.get(stage, 0.0))
    return found


_BASELINE = TypeAdapter(Baseline)


def baseline_from_json(values: Any) -> Baseline:
    """Parses the JSON values of ``dataclasses.asdict``. Raises ValueError if they are not a Baseline."""
    try:
        return _BASELINE.validate_python(values)
    except ValidationError as error:
        raise ValueError(f"a baseline, not one with {first_error(error)}") from None


def backend_of(cell: str) -> str:
    """Returns the backend in a cell's id, or the chain of backends."""
    return (*cell.split("/"), "", "", "")[2]


def versions_of(environment: Mapping[str, Any]) -> dict[str, str]:
    """Returns the versions in a run's environment as texts, without the keys in HOST."""
    return {name: _text(value) for name, value in environment.items() if name not in HOST}


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)


Counts = dict[State, int]


def by_backend(outcomes: Mapping[str, Outcome]) -> dict[str, Counts]:
    """Counts the cells of each backend by state, in the order of STATES."""
    found: dict[str, Any] = {}
    for cell, outcome in outcomes.items():
        found.setdefault(backend_of(cell), Counter())[outcome.state] += 1
    return {backend: {state: counts[state] for state in STATES if counts[state]} for backend, counts in found.items()}


def lent_of(outcomes: Mapping[str, Outcome]) -> dict[str, int]:
    """Counts the cells of each backend that a second-class oracle judged. Backends without such cells are left out."""
    return Counter(backend_of(cell) for cell, outcome in outcomes.items() if outcome.second_class)


def counts_text(counts: Counts) -> str:
    """Returns ``10 of 12 pass, 2 fail``; the total leaves out unsupported cells. Empty without counts."""
    supported = sum(count for state, count in counts.items() if state != "unsupported")
    rest = [f"{count} {STATES[state].name}" for state, count in counts.items() if state != "conforms"]
    return ", ".join([f"{counts.get('conforms', 0)} of {supported} pass", *rest]) if counts else ""
