"""Cells side by side: with what the threads that run and judge them compute."""

import torch
from conftest import make_cell

from conformance.run.at_once import AtOnce


def test_each_thread_that_judges_a_cell_computes_with_one_processor() -> None:
    """torch's own number is that of the machine's processors, of which two cells side by side would want twice."""
    cells = [make_cell("sft-packed", "llama", layout, "exact") for layout in ("dp1", "dp2")]
    own = torch.get_num_threads()
    torch.set_num_threads(4)
    at_once = AtOnce(2)
    try:
        assert [*at_once.run(cells, lambda cell: torch.get_num_threads())] == [1, 1]
    finally:
        at_once.join()
        torch.set_num_threads(own)
