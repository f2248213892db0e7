"""At once: cells side by side in threads, or one after another in this one (claim 8).

On leased places, GPUs or slots of hosts, a cell waits for its lease, for its oracle and for its judge. Meanwhile other
cells use the places, so more cells are begun than there are places; the largest worlds first, because what is left at
the end then fills the gaps.

Activity: what a session does at the moment, for another thread that shows it.

Storage: reports a full disk, or an output folder that was removed during a run, as what it is (claim 9).

Both can cause any error at any place: in a writer of records, in a copy, in a library. Neither is a defect of the
suite, and cells that were run before are not lost.
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

CELLS_PER_PLACE = 2  # one of them computes


class AtOnce:
    """Threads that run cells. ``width``: how many cells at once; with 1, the caller's thread runs them."""

    def __init__(self, width: int) -> None:
        self._processors = torch.get_num_threads()
        self._threads: ThreadPoolExecutor | None = None
        if width > 1:
            # Each judges with one processor: with all of them, it would wait for those that judge other cells. torch
            # has this number for the whole process.
            self._threads = ThreadPoolExecutor(
                max_workers=width, thread_name_prefix="cell", initializer=torch.set_num_threads, initargs=(1,)
            )

    @property
    def is_parallel(self) -> bool:
        return self._threads is not None

    def run(self, cells: Sequence[Cell], run: Callable[[Cell], _Judged]) -> Iterator[_Judged]:
        """Call ``run`` for each cell; yields the results in the order in which they are done."""
        if self._threads is None:
            yield from map(run, cells)
            return
        left = set(self.begin(cells, run).values())
        while left:
            done, left = wait(left, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()

    def begin(self, cells: Sequence[Cell], run: Callable[[Cell], _Judged]) -> dict[Cell, Future[_Judged]]:
        """Call ``run`` for each cell, in threads; none if there are no threads."""
        if self._threads is None:
            return {}
        return {cell: self._threads.submit(run, cell) for cell in self.ordered(cells)}

    def ordered(self, cells: Sequence[Cell]) -> Sequence[Cell]:
        """The cells in the order in which they are begun."""
        return sorted(cells, key=lambda cell: -cell.world_size) if self.is_parallel else cells

    def cancel(self) -> None:
        """Begin no further cell."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait for the cells that were begun, after ``cancel``."""
        if self._threads is not None:
            self._threads.shutdown()
            torch.set_num_threads(self._processors)


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


# The system's messages for a full or read-only disk. safetensors raises its own error type, with the same messages.
_NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))


def make_folder(out: Path) -> None:
    """Make the output folder, if it is not there. Raises UsageError if it cannot be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out} cannot be made: {error.strerror}; give another --out") from None


@contextlib.contextmanager
def lasting(out: Path) -> Iterator[None]:
    """Turn an error inside the block into Unwritable if ``out``, which has a summary, was removed or has no room."""
    try:
        yield
    except Exception as error:
        check_output_folder(out)
        if any(words in str(error) for words in _NO_ROOM):
            raise Unwritable(f"nothing can be written: {error}; make room, and run again into a new folder") from error
        raise


def check_output_folder(out: Path) -> None:
    """Raises Unwritable if the run's summary is missing. Other files may exist, written after ``out`` was removed."""
    if not (out / SUMMARY).is_file():
        raise Unwritable(f"{out} was removed while cells ran, or its {SUMMARY} was; run again into a new folder")
