"""Cells side by side: how many at once, and with how many processors each of the threads that judge them computes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from conftest import make_cell

from conformance.matrix.cell import Cell
from conformance.runner.placement import AtOnce


def test_as_many_cells_run_at_once_as_asked_for_and_no_more() -> None:
    """Three cells wait for one another twice, and between are counted; so do the next three."""
    layouts = ("dp1", "dp2", "dp4", "tp2", "tp4", "dp2.tp2")
    cells = [make_cell("sft-packed", "llama", layout, "exact") for layout in layouts]
    together = threading.Barrier(3)
    running: set[Cell] = set()
    most = 0

    def run(cell: Cell) -> Cell:
        nonlocal most
        running.add(cell)
        together.wait(timeout=20)
        most = max(most, len(running))
        together.wait(timeout=20)
        running.remove(cell)
        return cell

    at_once = AtOnce(3)
    try:
        assert {*at_once.run(cells, run)} == {*cells}
        assert most == 3
    finally:
        at_once.cancel()
        at_once.join()


def test_judging_threads_use_one_processor_each() -> None:
    """torch's own number is that of all processors; two cells side by side would start twice as many threads."""
    cells = [make_cell("sft-packed", "llama", layout, "exact") for layout in ("dp1", "dp2")]
    own = torch.get_num_threads()
    torch.set_num_threads(4)
    at_once = AtOnce(2)
    try:
        assert [*at_once.run(cells, lambda cell: torch.get_num_threads())] == [1, 1]
        at_once.join()
        assert torch.get_num_threads() == 4
        assert _of_a_new_thread() == 4
    finally:
        torch.set_num_threads(own)


def _of_a_new_thread() -> int:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(torch.get_num_threads).result()
