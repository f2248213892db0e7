"""Slower: which backends and cells take longer than in earlier runs, by a rule that a busy machine does not trip.

A machine that is busy slows all backends alike, so a backend is measured by the others. A single cell may pay for the
start of its ranks by chance, so it has to take much longer than it ever did. docs/ci.md has the rule. Without torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from conformance.record.baseline import Baseline, Outcome, backend_of

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
    """Backends and cells that take longer, by the rule in docs/ci.md."""
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
