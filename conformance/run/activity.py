"""Activity: what a session does at the moment, for another thread that shows it."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conformance.plan.cell import Cell


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What a session does at the moment.

    cell: the cell that runs, of several the one that began first. phase: what its slowest rank does, or what is done
    instead. since: when the cell began, in seconds of time.monotonic. waiting: the cells that will be run after it.
    """

    cell: Cell
    phase: str
    since: float
    waiting: Sequence[Cell]


@dataclass(kw_only=True)
class _Running:
    cell: Cell
    since: float
    phase: str


class Activities:
    """The cells that run and those that wait. Each cell that runs has a thread of its own."""

    def __init__(self) -> None:
        self.waiting: tuple[Cell, ...] = ()
        self._running: dict[int, _Running] = {}  # by thread

    @property
    def are_any(self) -> bool:
        return bool(self._running)

    def begin(self, cell: Cell) -> None:
        self.waiting = tuple(one for one in self.waiting if one is not cell)
        self._running[threading.get_ident()] = _Running(cell=cell, since=time.monotonic(), phase="preparing")

    def phase(self, phase: str) -> None:
        """What the cell of this thread does now."""
        if (running := self._running.get(threading.get_ident())) is not None:
            running.phase = phase

    def end(self) -> None:
        del self._running[threading.get_ident()]

    def now(self, of_ranks: Callable[[], str]) -> Activity | None:
        """None between cells. ``of_ranks`` says what ranks do; empty if none runs a task."""
        running = sorted(self._running.values(), key=lambda one: one.since)
        if not running:
            return None
        first, more = running[0], len(running) - 1
        phase = f"{first.phase}, {more} more cells" if more else of_ranks() or first.phase
        return Activity(cell=first.cell, phase=phase, since=first.since, waiting=self.waiting)
