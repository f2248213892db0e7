"""Claim 7: every planted fault is caught, at the stage that was predicted, and the usual check misses most of them."""

import contextlib
from pathlib import Path
from typing import ClassVar

import pytest
from conftest import make_cell

from conformance.backend import Backend
from conformance.faults import CATALOGUE, Fault, plant
from impl.faults.model_parallel import MODEL_PARALLEL_FAULTS
from conformance.scenario import Precision
from conformance.run.session import Session

# The cheapest cell in which each fault changes anything.
CELLS = {
    "dropped-o-bias": ("sft-padded", "pangu", "dp2"),
    "leaking-documents": ("sft-packed", "llama", "dp2"),
    "local-token-mean": ("sft-padded", "pangu", "dp2"),
    "cleared-gradients": ("sft-packed", "llama", "dp2"),
    "replicas-counted": ("sft-sgd", "llama", "tp2.seqpar"),
    "inverted-clip": ("sft-sgd", "llama", "dp2"),
    "clip-always": ("sft-packed", "llama", "dp2"),
    "clip-on-one-replica": ("sft-sgd", "llama", "dp2.rep2"),
    "schedule-per-micro-batch": ("sft-sgd", "llama", "dp2"),
    "copied-micro-batch": ("sft-packed", "llama", "dp2"),
    "local-positions": ("sft-packed", "llama", "sp2"),
    "rolled-labels": ("sft-packed", "llama", "sp2"),
    "dropped-last-token": ("sft-packed", "llama", "sp2"),
    "merged-in-bf16": ("sft-packed", "llama", "sp2.ring"),
    "divided-by-world": ("sft-sgd", "llama", "sp2"),
    "ring-not-reduced": ("sft-sgd", "llama", "sp2"),
    "ring-not-counted": ("sft-sgd", "llama", "sp2"),
}

# FSDP2 has no such seams.
IN_TEST_DEEPSPEED = {"unreduced-replicas", "clip-never", "unmarked-shards", "lost-loss-scale", "step-at-setup"}
IN_TEST_MEGATRON = {fault.name for fault in MODEL_PARALLEL_FAULTS} - CELLS.keys()


def test_every_fault_of_the_catalogue_has_a_cell_here() -> None:
    assert CELLS.keys() | IN_TEST_DEEPSPEED | IN_TEST_MEGATRON == CATALOGUE.keys()


@pytest.mark.parametrize("precision", ["exact", "fp32"])
@pytest.mark.parametrize("name", CELLS)
def test_fault_is_caught_at_the_predicted_stage(session: Session, name: str, precision: Precision) -> None:
    fault = CATALOGUE[name]
    verdict = session.run(make_cell(*CELLS[name], precision, faults=(name,))).verdict
    assert verdict.state == "differs", verdict.reason
    assert verdict.first_stage == fault.stage, verdict.reason
    first_loss = next(q for q in verdict.quantities if (q["stage"], q["tensor"], q["step"]) == ("loss", "loss", 0))
    assert (first_loss["observed"] <= first_loss["allowed"]) == fault.loss_blind


@pytest.mark.parametrize(
    ("name", "layout"),
    [("leaking-documents", "sp2"), ("leaking-documents", "sp2.zigzag"), ("local-token-mean", "dp2.sp2")],
)
def test_faults_of_other_layouts_are_caught_on_a_ring(session: Session, name: str, layout: str) -> None:
    verdict = session.run(make_cell("sft-packed", "llama", layout, "exact", faults=(name,))).verdict
    assert verdict.first_stage == CATALOGUE[name].stage, verdict.reason


def test_a_fault_that_is_never_called_is_no_pass(session: Session) -> None:
    verdict = session.run(make_cell("sft-packed", "llama", "dp2", "exact", faults=("merged-in-bf16",))).verdict
    assert verdict.state == "infrastructure"
    assert "'merged-in-bf16' was never called in this cell" in verdict.reason
    assert "it needs" in verdict.reason


@pytest.mark.parametrize("cell", sorted(set(CELLS.values())))
def test_the_same_cells_conform_without_a_fault(session: Session, cell: tuple[str, str, str]) -> None:
    verdict = session.run(make_cell(*cell, "exact")).verdict
    assert verdict.state == "conforms", verdict.reason


def test_most_faults_are_invisible_to_the_loss_of_the_first_step() -> None:
    assert sum(fault.loss_blind for fault in CATALOGUE.values()) >= 3


@pytest.mark.parametrize("fault", CATALOGUE.values(), ids=lambda fault: fault.name)
def test_the_readme_says_of_each_fault_what_is_tested_here(fault: Fault) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    assert f"| `{fault.name}`: {fault.summary} | {fault.stage} | {'yes' if fault.loss_blind else 'no'} |" in readme


class _Seamless:
    """A backend that names no seams."""


class _Seamed:
    seams: ClassVar[dict[str, str]] = {"clip_coefficient": f"{__name__}:halve"}


def halve(norm: float, max_norm: float) -> float:
    return 0.5


def test_a_planted_fault_is_gone_afterwards_even_if_the_cell_raised() -> None:
    seamed: type[Backend] = _Seamed  # type: ignore[assignment]
    with contextlib.suppress(RuntimeError), plant(["inverted-clip"], seamed):
        assert halve(2.0, 1.0) == 1.0
        raise RuntimeError
    assert halve(2.0, 1.0) == 0.5


def test_a_fault_needs_its_seam() -> None:
    seamless: type[Backend] = _Seamless  # type: ignore[assignment]
    with (
        pytest.raises(ValueError, match=r"needs the seam 'clip_coefficient'.*its seams: none"),
        plant(["inverted-clip"], seamless),
    ):
        pass


def test_an_unknown_fault_lists_the_known_ones() -> None:
    seamed: type[Backend] = _Seamed  # type: ignore[assignment]
    with pytest.raises(ValueError, match="unknown fault 'typo'; known: dropped-o-bias"), plant(["typo"], seamed):
        pass
