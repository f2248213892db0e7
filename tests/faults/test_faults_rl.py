"""Checks that every planted fault of reinforcement learning is caught at the predicted stage.

The usual checks run for comparison: the loss of the first step, and its loss and gradient norm within a percent.
"""

from pathlib import Path

import pytest
from cells import exhaustive, record_of, slow
from rl_fault_cells import (
    LATER,
    SCENARIOS,
    cells,
    fast_cells,
    fast_layout,
    layout_of,
    rl_cell,
)

from conformance.backends.faults import catalogue
from conformance.matrix.cell import Cell
from conformance.records.step_tensors import read_record
from conformance.runner.session import Session
from conformance.spec.precision import FLOAT64
from impl.faults.catalogue import RL_FAULTS
from impl.faults.declaration import RL_LAYOUTS, with_program

pytestmark = pytest.mark.slow

PERCENT = 0.01
REPORTED = ("loss", "grad_norm", "critic.loss", "critic.grad_norm")
FAST = [(*cell, fast_layout(*cell)) for cell in sorted(fast_cells())]
PLANTED = [*FAST, *(exhaustive(*cell, layout_of(*cell)) for cell in cells() if (*cell, layout_of(*cell)) not in FAST)]


def planted(backend: str, name: str, layout: str, models: Path) -> Cell:
    cell = rl_cell(backend, SCENARIOS[name], layout, name, steps=LATER.get(name, 1))
    return with_program(cell, catalogue()[name], models)


def in_loss_and_norm(session: Session, cell: Cell) -> bool:
    """Whether a loss or a gradient norm of the first step is more than a percent off."""
    own, reference = (
        record.steps[0] for record in (record_of(session, cell), read_record(session._oracles.folder(cell) / FLOAT64))
    )
    pairs = [(own.value(key), reference.value(key)) for key in REPORTED]
    return any(abs(x - y) > PERCENT * abs(y) for x, y in pairs if x is not None and y is not None)


@pytest.mark.parametrize(("backend", "name", "layout"), PLANTED)
def test_fault_is_caught_at_the_predicted_stage(
    session: Session, models: Path, backend: str, name: str, layout: str
) -> None:
    cell, fault = planted(backend, name, layout, models), catalogue()[name]
    verdict = session.run(cell).verdict
    assert verdict.state == "differs", verdict.reason
    assert verdict.first_stage == fault.stage, verdict.reason
    first_loss = next(q for q in verdict.quantities if (q.stage, q.tensor, q.step) == ("loss", "loss", 0))
    assert (first_loss.ratio <= 1) == ("loss" in fault.blind)
    assert in_loss_and_norm(session, cell) == ("loss and norm" not in fault.blind)


@pytest.mark.parametrize(
    ("name", "scenario", "stage"),
    [
        ("local-token-mean", "grpo", "loss"),
        exhaustive("copied-micro-batch", "grpo", "gradients"),
        exhaustive("local-token-mean", "ppo", "loss"),
    ],
)
@pytest.mark.parametrize(
    "backend", [pytest.param(b, marks=() if b == "fsdp2" else pytest.mark.exhaustive) for b in RL_LAYOUTS]
)
def test_faults_of_sft_are_caught_in_reinforcement_learning(
    session: Session, backend: str, name: str, scenario: str, stage: str
) -> None:
    verdict = session.run(rl_cell(backend, scenario, RL_LAYOUTS[backend], name, steps=1)).verdict
    assert verdict.first_stage == stage, verdict.reason


@pytest.mark.parametrize("layout", [exhaustive("dp2.zero0"), exhaustive("dp2.zero1"), slow("dp2.zero3")])
def test_gradients_leak_from_the_critic_wherever_zero_keeps_them(session: Session, models: Path, layout: str) -> None:
    verdict = session.run(planted("deepspeed", "critic-leaks-into-policy", layout, models)).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", "gradients"), verdict.reason


@pytest.mark.exhaustive
@pytest.mark.parametrize("scenario", sorted(set(SCENARIOS.values())))
@pytest.mark.parametrize(
    ("backend", "layout"), sorted({(b, layout) for b, name in cells() if (layout := layout_of(b, name))})
)
def test_the_same_cells_conform_without_a_fault(session: Session, backend: str, layout: str, scenario: str) -> None:
    cell = rl_cell(backend, scenario, layout, steps=max(LATER.values()), seed=1)  # apart from cells of other files
    verdict = session.run(cell).verdict
    assert verdict.state == "conforms", verdict.reason


def test_every_fault_of_reinforcement_learning_is_planted_here() -> None:
    assert {name for _, name in cells()} == {fault.name for fault in RL_FAULTS}
    assert {catalogue()[name].stage for _, name, _ in FAST} == {fault.stage for fault in RL_FAULTS}
