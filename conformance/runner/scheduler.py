"""Runs cells in parallel threads, or sequentially, tracks the running cells, and reports a full or missing disk.

On leased slots (GPUs, or slots of hosts) a cell waits for its lease, its oracle and its judge. Other cells use the
slots meanwhile, so more cells are started than there are slots. The largest worker groups start first, because small
ones then fill the gaps at the end.

A full disk, or an output folder that was removed during a run, can cause any error in any library. It is reported as
such, and the verdicts of earlier cells are kept.
"""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from conformance.core.errors import UsageError
from conformance.core.io import Unwritable
from conformance.matrix.cell import Cell
from conformance.results.run_results import SUMMARY

_Judged = TypeVar("_Judged")

CELLS_PER_SLOT = 2  # one computes while the other one waits


class AtOnce:
    """Runs cells in threads. width: the number of concurrent cells; with 1, the caller's thread runs them."""

    def __init__(self, width: int) -> None:
        self._processors = torch.get_num_threads()
        self._threads: ThreadPoolExecutor | None = None
        if width > 1:
            # Each thread judges with one processor: with more, judges would wait for each other. torch has one such
            # number for the whole process.
            self._threads = ThreadPoolExecutor(
                max_workers=width, thread_name_prefix="cell", initializer=torch.set_num_threads, initargs=(1,)
            )

    @property
    def is_parallel(self) -> bool:
        return self._threads is not None

    def run(self, cells: Sequence[Cell], run: Callable[[Cell], _Judged]) -> Iterator[_Judged]:
        """Calls ``run`` for each cell; yields the results in the order in which they finish."""
        if self._threads is None:
            yield from map(run, cells)
            return
        left = set(self.begin(cells, run).values())
        while left:
            done, left = wait(left, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()

    def begin(self, cells: Sequence[Cell], run: Callable[[Cell], _Judged]) -> dict[Cell, Future[_Judged]]:
        """Calls ``run`` for each cell in threads, and returns the futures; empty if there are no threads."""
        if self._threads is None:
            return {}
        return {cell: self._threads.submit(run, cell) for cell in self.ordered(cells)}

    def ordered(self, cells: Sequence[Cell]) -> Sequence[Cell]:
        """Returns the cells in the order in which they start."""
        return sorted(cells, key=lambda cell: -cell.world_size) if self.is_parallel else cells

    def cancel(self) -> None:
        """Starts no further cell."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Waits for the cells that were started, after ``cancel``."""
        if self._threads is not None:
            self._threads.shutdown()
            torch.set_num_threads(self._processors)


@dataclass(frozen=True, kw_only=True)
class Activity:
    """Holds the current activity of a session.

    cell: the running cell; of several, the one that started first. phase: the activity of its slowest rank, or of the
    session. since: start of the cell, in seconds of time.monotonic. waiting: the cells that will run after it.
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
    """Tracks the running and the waiting cells. Each running cell has its own thread."""

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
        """Sets the activity of the cell in this thread."""
        if (running := self._running.get(threading.get_ident())) is not None:
            running.phase = phase

    def end(self) -> None:
        del self._running[threading.get_ident()]

    def now(self, of_ranks: Callable[[], str]) -> Activity | None:
        """Returns the current activity; None between cells. of_ranks: returns the activity of ranks, or empty."""
        running = sorted(self._running.values(), key=lambda one: one.since)
        if not running:
            return None
        first, more = running[0], len(running) - 1
        phase = f"{first.phase}, {more} more cells" if more else of_ranks() or first.phase
        return Activity(cell=first.cell, phase=phase, since=first.since, waiting=self.waiting)


# The system's messages for a full or read-only disk. safetensors raises its own error type, with the same messages.
_NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))


def make_folder(out: Path) -> None:
    """Creates the output folder if it is missing. Raises UsageError if it cannot be created."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out} cannot be created: {error.strerror}; give another --out") from None


@contextlib.contextmanager
def lasting(out: Path) -> Iterator[None]:
    """Turns an error inside the block into Unwritable if ``out``, which has a summary, was removed or its disk is
    full."""
    try:
        yield
    except Exception as error:
        check_output_folder(out)
        if any(words in str(error) for words in _NO_ROOM):
            raise Unwritable(f"nothing can be written: {error}; free disk space, and run into a new folder") from error
        raise


def check_output_folder(out: Path) -> None:
    """Raises Unwritable if the run's summary is missing. Other files may exist, written after ``out`` was removed."""
    if not (out / SUMMARY).is_file():
        raise Unwritable(f"{out} was removed while cells ran, or its {SUMMARY} was; run again into a new folder")
