"""The loss scale of fp16 falls, grows and skips updates in the same way on all backends
(conformance/spec/scenario.py).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cells import exhaustive
from resume_runs import Ranks

from conformance.runtime import Pool

Told = Callable[[str, str], list[dict[str, Any]]]
# Cells of tests/cells/test_overflow.py see the same; here the first scale is too large to be judged.
LAYOUTS = [
    exhaustive("fsdp2", "dp2"),
    exhaustive("fsdp2", "tp2"),
    exhaustive("deepspeed", "dp2.zero2"),
    exhaustive("deepspeed", "dp2.zero0"),
    exhaustive("deepspeed", "dp2.zero1"),
    exhaustive("deepspeed", "dp2.zero3"),
    exhaustive("deepspeed", "tp2.zero1"),
    exhaustive("megatron", "dp2.zero1"),
    exhaustive("megatron", "dp2"),
    exhaustive("megatron", "tp2"),
]


@pytest.fixture(scope="module")
def told(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What the ranks of a backend and layout say; they run once."""
    known: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def once(backend: str, layout: str) -> list[dict[str, Any]]:
        folder: Path = tmp_path_factory.mktemp("scaled")
        ranks = Ranks(pool=pool, folder=folder, backend=backend, layout=layout, precision="fp16")
        return known.get((backend, layout)) or known.setdefault((backend, layout), ranks("scaled"))

    return once


@pytest.mark.parametrize(("backend", "layout"), LAYOUTS)
def test_an_overflow_halves_the_scale_and_changes_nothing_else(told: Told, backend: str, layout: str) -> None:
    for rank in told(backend, layout):
        assert not rank["changed"]
        assert rank["overflowed"] == {"schedule": 1.0, "loss_scale": 2.0**39, "good_steps": 0.0}


@pytest.mark.parametrize(("backend", "layout"), LAYOUTS)
def test_the_scale_doubles_with_the_last_of_as_many_good_updates(told: Told, backend: str, layout: str) -> None:
    for rank in told(backend, layout):
        assert rank["scales"] == [2.0**11, 2.0**11]
