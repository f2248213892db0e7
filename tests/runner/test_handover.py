"""Cells of several phases: one backend after the other, each in processes that have never seen the one before."""

import pytest
from cells import BACKENDS, HONEST, assert_honest, exhaustive, folder_of, record_of, slow, small
from conftest import make_cell

from conformance.matrix.cell import Cell, Handover, Phase
from conformance.runner.session import Session
from conformance.spec.layout import Layout


def program(scenario: str, model: str, *phases: tuple[str, str, int, Handover | None]) -> Cell:
    """``phases``: backend, layout, steps, and what it saves."""
    steps = sum(steps for _, _, steps, _ in phases)
    config = make_cell(scenario, model, "dp1", "exact", steps=steps, **small(scenario)).scenario
    parts = [
        Phase(backend=BACKENDS[backend], layout=Layout.parse(layout), steps=steps, save=save)
        for backend, layout, steps, save in phases
    ]
    return Cell(scenario=config, phases=tuple(parts), program="legs")


# test_isolation shows phases, test_judge_handover their weights, and test_megatron_convert the names, in a fast run.
@pytest.mark.parametrize("model", [slow("pangu"), exhaustive("qwen3")])
def test_three_backends_hand_over_to_each_other_as_hugging_face_folders(session: Session, model: str) -> None:
    cell = program(
        "sft-packed",
        model,
        ("fsdp2", "dp2", 2, "export"),
        ("megatron", "tp2", 2, "export"),
        ("deepspeed", "dp2.zero2", 2, None),
    )
    verdict = assert_honest(session, cell)
    assert str(cell) == f"sft-packed/{model}/fsdp2-to-megatron-to-deepspeed/dp2-to-tp2-to-dp2.zero2/exact/legs"
    assert [record_of(session, cell, phase).header["backend"]["name"] for phase in range(3)] == [
        "fsdp2",
        "megatron",
        "deepspeed",
    ]
    # As loaded, and of what each later phase has loaded: weights are judged directly after every handover.
    assert {q.step for q in verdict.quantities if q.stage == "weights"} == {-1, 2, 4}
    assert {q.step for q in verdict.quantities if q.stage == "gradients"} == set(range(6))
    assert not list((folder_of(session, cell) / "legs").glob("*/saved"))  # what conforms leaves no copies


@pytest.mark.parametrize(
    ("backend", "before", "after"),
    [
        exhaustive("fsdp2", "dp2", "tp2"),
        exhaustive("megatron", "tp2.seqpar", "pp2.vpp2"),
        exhaustive("megatron", "dp2.zero1.overlap", "tp2.zero1"),
        exhaustive("fsdp2", "sp2", "dp2"),
        exhaustive("megatron", "sp2", "dp2"),
        exhaustive("megatron", "pp2.vpp2.zero1", "dp2.zero1"),
    ],
)
def test_training_goes_on_in_another_layout(session: Session, backend: str, before: str, after: str) -> None:
    cell = program("sft-warmup", "llama", (backend, before, 2, "checkpoint"), (backend, after, 2, None))
    assert max(q.observed for q in assert_honest(session, cell).quantities) < HONEST


@pytest.mark.exhaustive  # tests/runtime/test_isolation.py shows it of a backend that starts fast
def test_each_phase_runs_in_processes_of_its_own(session: Session) -> None:
    """What a phase leaves in memory cannot stand in for what it saved."""
    cell = program("sft-packed", "llama", ("fsdp2", "dp2", 1, "checkpoint"), ("fsdp2", "dp2", 2, None))
    assert_honest(session, cell)
    assert [record_of(session, cell, phase).lines.loaded["step"] for phase in (0, 1)] == [-1, 0]
