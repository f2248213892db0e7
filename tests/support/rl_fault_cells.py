"""Makes the cells in which faults of reinforcement learning are planted, for the two files that test faults.

A cell is small: the fewest rows that hold whole groups, and one step, unless a fault shows only at a later one.
"""

from typing import Any

from cells import BACKENDS, cell_of, one_of_each_stage

from conformance.backends.faults import catalogue
from conformance.matrix.cell import Cell
from impl.faults.catalogue import RL_FAULTS
from impl.faults.declaration import RL_LAYOUTS

SCENARIOS = {fault.name: fault.cells.scenario for fault in RL_FAULTS}
ROWS = 4
# Steps until a fault shows where one is not enough: from the second update of a roll-out on.
LATER = {
    "old-of-every-update": 2,
    "metrics-of-one-rank": 2,
    "clip-sides-exchanged": 3,
    "gspo-without-length": 2,
    "optimistic-value-clip": 2,
    "critic-leaks-into-policy": 2,
}
ALONE = {"fsdp2": "dp1", "deepspeed": "dp1.zero2", "megatron": "dp1"}


def layout_of(backend: str, name: str) -> str | None:
    """Where a fault is planted; None if the backend has nothing that it could change."""
    return catalogue()[name].cells.layouts.get(backend)


def cells() -> list[tuple[str, str]]:
    """(backend, fault), the full product."""
    return [(backend, name) for name in SCENARIOS for backend in BACKENDS if layout_of(backend, name)]


def fast_cells() -> set[tuple[str, str]]:
    """(backend, fault). Cells of Megatron take twice as long, so it has those that no other backend can have."""

    def having(name: str) -> list[str]:
        able = [backend for backend in BACKENDS if layout_of(backend, name)]
        return [backend for backend in able if backend != "megatron"] or able

    return one_of_each_stage(RL_FAULTS, having)


def fast_layout(backend: str, name: str) -> str | None:
    """Where a fast run plants a fault: in a single rank, which costs half as much, if it has what the fault changes."""
    is_alone = catalogue()[name].cells.layouts.items() <= RL_LAYOUTS.items() and name != "metrics-of-one-rank"
    return ALONE[backend] if is_alone else layout_of(backend, name)


def rl_cell(backend: str, scenario: str, layout: str, *faults: str, **overrides: Any) -> Cell:
    return cell_of(backend, scenario, "llama", layout, "exact", *faults, rows=ROWS, **overrides)
