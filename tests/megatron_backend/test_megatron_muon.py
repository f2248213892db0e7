"""Muon of megatron-core: the update that a scenario declares, whole on ranks that share a matrix or its owner.

It needs megatron-core 0.17 and the package emerging-optimizers, so Python 3.12. docs/findings/megatron-muon-parts.md
says how it differs from torch's.
"""

import re
from dataclasses import replace

import pytest
from cells import assert_honest, cell_of, needs

from conformance.backends.faults import catalogue
from conformance.core.packages import is_installed
from conformance.matrix.cell import Handover
from conformance.runner.session import Session
from conformance.spec.layout import Layout
from conformance.spec.precision import PrecisionName
from impl.faults.optimizer import MEGATRON_MUON_FAULTS
from impl.models.support import is_older

pytestmark = needs("megatron-core")
LACKS = is_older("megatron-core", 0, 17) or not is_installed("emerging-optimizers")
needs_muon = pytest.mark.skipif(LACKS, reason="needs megatron-core 0.17 and emerging-optimizers")
FUSED = "sft-muon-fused"
AS_TORCH = {"name": "muon", "lr": 5e-5, "momentum": 0.95, "nesterov": True, "adjust_lr": "original"}


@needs_muon
@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "model", "layout", "precision"),
    [
        (FUSED, "llama", "dp2", "exact"),
        (FUSED, "llama", "dp2", "bf16"),
        (FUSED, "llama", "dp2.tp2.zero1", "exact"),
        (FUSED, "llama", "dp2.zero1", "bf16"),
        (FUSED, "qwen3", "tp2.seqpar", "fp32"),
        (FUSED, "qwen3", "dp2.sp2.ring.zero1", "exact"),
        (FUSED, "pangu", "pp2", "exact"),
        ("sft-muon", "phi3", "tp2", "exact"),  # whose files fuse the projections, for every backend
        ("sft-muon-rms", "phi3", "dp2", "exact"),
    ],
)
def test_cells_conform(session: Session, scenario: str, model: str, layout: str, precision: PrecisionName) -> None:
    cell = cell_of("megatron", scenario, model, layout, precision)
    if precision == "exact":
        assert_honest(session, cell)
    else:
        verdict = session.run(cell).verdict
        assert verdict.state == "conforms", verdict.reason


@needs_muon
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "precision"), [("tp2.shipped", "exact"), ("dp2.tp2.zero1.shipped", "bf16")])
def test_parts_of_ranks_are_an_expected_difference(session: Session, layout: str, precision: PrecisionName) -> None:
    verdict = session.run(cell_of("megatron", FUSED, "llama", layout, precision)).verdict
    assert verdict.state == "expected_difference", verdict.reason
    assert "docs/findings/megatron-muon-parts.md" in verdict.reason


@needs_muon
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "saves", "after"),
    [("tp2", "checkpoint", "tp2"), ("dp2.zero1", "state", "tp2"), ("pp2", "state", "dp2.zero1")],
)
def test_resumes(session: Session, before: str, saves: Handover, after: str) -> None:
    cell = cell_of("megatron", FUSED, "pangu", before, "exact")
    (whole,) = cell.phases
    phases = (replace(whole, steps=2, save=saves), replace(whole, steps=2, layout=Layout.parse(after)))
    assert_honest(session, replace(cell, phases=phases, program=saves))


@needs_muon
@pytest.mark.slow
@pytest.mark.parametrize("name", [fault.name for fault in MEGATRON_MUON_FAULTS])
def test_fault_is_caught_at_the_predicted_stage(session: Session, name: str) -> None:
    place = catalogue()[name].cells
    asked = cell_of("megatron", place.scenario, place.model, place.layouts["megatron"], "exact", name, steps=2)
    verdict = session.run(asked).verdict
    assert verdict.state == "differs", verdict.reason
    assert verdict.first_stage == catalogue()[name].stage, verdict.reason


LACKING = (
    "use megatron-core 0.17 to 0.19" if is_older("megatron-core", 0, 17) else "needs the package emerging-optimizers"
)


@pytest.mark.parametrize(
    ("scenario", "layout", "advice"),
    [
        ("sft-muon", "dp2", 'fused_matrices = \\["gate_up_proj"\\]'),
        (FUSED, "dp2.overlap", "Muon beside overlap is not built in"),
    ],
)
def test_what_is_not_claimed_says_what_would_work(session: Session, scenario: str, layout: str, advice: str) -> None:
    verdict = session.run(cell_of("megatron", scenario, "llama", layout, "exact")).verdict
    assert verdict.state == "unsupported"
    assert re.search(LACKING if LACKS else advice, verdict.reason), verdict.reason


@pytest.mark.parametrize(("backend", "layout"), [("fsdp2", "dp2"), ("deepspeed", "dp2.zero1.ownopt")])
def test_other_libraries_take_each_parameter_for_a_matrix(session: Session, backend: str, layout: str) -> None:
    verdict = session.run(
        cell_of(backend, FUSED, "llama", layout, "exact", optimizer={**AS_TORCH, "fused_matrices": ["gate_up_proj"]})
    ).verdict
    assert verdict.state == "unsupported"
    assert "takes each parameter for a matrix" in verdict.reason
