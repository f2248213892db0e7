"""At once: cells side by side in threads, or one after another in this one (claim 8).

On leased places, GPUs or slots of agents, a cell waits for its lease, for its oracle and for its judge. Meanwhile other
cells use the places, so more cells are begun than there are places; the largest worlds first, because what is left at
the end then fills the gaps.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from conformance.plan.cell import Cell

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
