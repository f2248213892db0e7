"""Cells side by side: how many processors each of the threads that judge them computes with."""

from concurrent.futures import ThreadPoolExecutor

import torch
from conftest import make_cell

from conformance.run.at_once import AtOnce


def test_each_thread_that_judges_a_cell_computes_with_one_processor_as_long_as_there_are_cells() -> None:
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
