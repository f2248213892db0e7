"""Training without float32 masters: parameters in bf16, rounded to the nearest number or, by torchao, at random.

scripts/third-opinion fetches torchao into a folder, and only tests of it put that on the path.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from cells import cell_of, record_of, session_with, slow

from conformance.backends.faults import catalogue
from conformance.judge.stored_updates import ROUNDED
from conformance.matrix.cell import Handover
from conformance.records.step_tensors import read_record
from conformance.runner.session import Session
from conformance.spec.layout import Layout
from conformance.spec.precision import FLOAT64, PrecisionName
from impl.faults.rounding import ROUNDING_FAULTS
from impl.fsdp2 import adapter

SIZE = {"rows": 24, "accumulation": 3}
NEAREST: PrecisionName = "bf16-nearest"
RANDOM: PrecisionName = "bf16-stochastic"


@pytest.fixture(scope="module")
def with_torchao(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with session_with("torchao", tmp_path_factory.mktemp("stored")) as session:
        yield session


def test_rounding_to_the_nearest_number_conforms(session: Session) -> None:
    """Their reference is not that of cells with masters: training begins with rounded weights, in every precision that
    stores weights so."""
    precisions: tuple[PrecisionName, ...] = ("bf16", "exact", NEAREST, RANDOM)
    cells = [cell_of("fsdp2", "sft-packed", "llama", "dp2", one, steps=3, rows=12) for one in precisions]
    half, exact, nearest, random = (session._oracles.folder(cell) for cell in cells)
    assert (half, nearest) == (exact, random)
    assert half != nearest
    verdict = session.run(cell := cells[2]).verdict
    assert verdict.state == "conforms", verdict.reason
    assert "not judged: single rows after the first update" in verdict.reason
    record = record_of(session, cell)
    assert {str(tensor.dtype) for tensor in record.loaded.tensors().values()} == {"torch.bfloat16"}


@pytest.mark.parametrize(
    "layout", ["dp2.zero2", slow("dp2.zero1"), slow("dp2.zero3"), slow("dp2.tp2.zero2"), slow("dp2.zero3.ckpt.manual")]
)
@pytest.mark.parametrize("clip", [2.1, slow(0.1)])
def test_bf16_masters_of_deepspeed_conform(session: Session, layout: str, clip: float) -> None:
    """Clipped at every step. At 2.1 their reference is that of fsdp2."""
    cell = cell_of("deepspeed", "sft-packed", "llama", layout, NEAREST, steps=3, rows=12)
    optimizer = replace(cell.scenario.optimizer, max_grad_norm=clip)
    cell = replace(cell, scenario=replace(cell.scenario, optimizer=optimizer))
    verdict = session.run(cell).verdict
    assert verdict.state == "conforms", verdict.reason
    assert "not judged: single rows after the first update" in verdict.reason
    norms = [step.value("grad_norm") for step in read_record(session._oracles.folder(cell) / FLOAT64).steps]
    assert min(norm or 0.0 for norm in norms) > clip


@pytest.mark.parametrize("layout", ["dp2", slow("dp1"), slow("dp2.rep2"), slow("tp2"), slow("dp2.tp2")])
def test_rounding_at_random_conforms(with_torchao: Session, layout: str) -> None:
    """With three steps one of two updates is read, and the other two are judged together."""
    verdict = with_torchao.run(cell_of("fsdp2", "sft-packed", "llama", layout, RANDOM, steps=3, **SIZE)).verdict
    assert verdict.state == "conforms", verdict.reason
    sums = [quantity for quantity in verdict.quantities if quantity.tensor.startswith(ROUNDED)]
    assert len({quantity.step for quantity in sums}) == 2
    assert all(quantity.observed < 1 for quantity in sums)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [NEAREST, RANDOM])
@pytest.mark.parametrize(("saves", "after"), [("checkpoint", "dp2"), ("state", "tp2"), ("export", "dp2")])
def test_resumes(with_torchao: Session, precision: PrecisionName, saves: Handover, after: str) -> None:
    """Moments go on in bf16, and the rounding at random with the generators of the ranks."""
    cell = cell_of("fsdp2", "sft-warmup", "llama", "dp2", precision, rows=24)
    first, second = cell.phases
    phases = (replace(first, save=saves), replace(second, layout=Layout.parse(after)))
    verdict = with_torchao.run(replace(cell, phases=phases, program=saves)).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "saves", "after"),
    [
        ("dp2.zero2", "checkpoint", "dp2.zero2"),
        ("dp2.zero3", "checkpoint", "dp2.zero3"),
        ("dp2.zero2", "state", "dp2.zero3"),
        ("dp2.zero3", "state", "dp2.tp2.zero1"),
        ("dp2.zero3", "export", "dp2.zero2"),
    ],
)
def test_resumes_of_deepspeed(session: Session, before: str, saves: Handover, after: str) -> None:
    cell = cell_of("deepspeed", "sft-warmup", "llama", before, NEAREST, rows=24)
    first, second = cell.phases
    phases = (replace(first, save=saves), replace(second, layout=Layout.parse(after)))
    verdict = session.run(replace(cell, phases=phases, program=saves)).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2.zero2", "dp2.zero3"])
def test_lost_decay_of_deepspeed_is_caught(session: Session, layout: str) -> None:
    cell = cell_of("deepspeed", "sft-packed", "llama", layout, NEAREST, "decay-lost-in-bf16", steps=1, **SIZE)
    verdict = session.run(cell).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", "clipped update"), verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", [fault.name for fault in ROUNDING_FAULTS])
def test_fault_is_caught_at_the_predicted_stage(with_torchao: Session, name: str) -> None:
    place = catalogue()[name].cells
    cell = cell_of("fsdp2", place.scenario, place.model, place.layouts["fsdp2"], RANDOM, name, steps=1, **SIZE)
    verdict = with_torchao.run(cell).verdict
    assert verdict.state == "differs", verdict.reason
    assert verdict.first_stage == catalogue()[name].stage, verdict.reason


@pytest.mark.parametrize(
    ("backend", "scenario", "model", "layout", "precision", "reason"),
    [
        ("fsdp2", "sft-sgd", "llama", "dp2", NEAREST, "for AdamW only"),
        ("fsdp2", "grpo", "llama", "dp2", NEAREST, "supervised fine-tuning"),
        ("fsdp2", "sft-packed", "qwen3-moe", "dp2", NEAREST, "dense models"),
        ("fsdp2", "sft-packed", "llama", "sp2", NEAREST, "only dp, rep and tp"),
        ("fsdp2", "sft-packed", "llama", "dp2.offload", NEAREST, "leave it out"),
        ("deepspeed", "sft-packed", "llama", "dp2.zero2", RANDOM, "use bf16-nearest, or fsdp2"),
        ("deepspeed", "sft-packed", "llama", "dp2.zero0", NEAREST, "use zero1, zero2 or zero3"),
        ("deepspeed", "sft-packed", "llama", "dp2.zero2.offload", NEAREST, "leave it out"),
        ("deepspeed", "sft-packed", "llama", "sp2", NEAREST, "only dp and tp"),
        ("deepspeed", "sft-packed", "qwen3-moe", "dp2", NEAREST, "dense models"),
        ("deepspeed", "sft-sgd", "llama", "dp2", NEAREST, "for AdamW only"),
        ("deepspeed", "grpo", "llama", "dp2", NEAREST, "supervised fine-tuning"),
        ("megatron", "sft-packed", "llama", "dp2", RANDOM, "use fsdp2, deepspeed with bf16-nearest, or bf16"),
    ],
)
def test_unsupported_cells_give_advice(
    session: Session, backend: str, scenario: str, model: str, layout: str, precision: PrecisionName, reason: str
) -> None:
    refused = session.refusal(cell_of(backend, scenario, model, layout, precision))
    assert refused is not None
    assert refused.state == "unsupported"
    assert reason in refused.reason


def test_a_missing_torchao_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "find_spec", lambda name: None)
    cell = cell_of("fsdp2", "sft-packed", "llama", "dp2", RANDOM)
    refused = adapter.Fsdp2Backend.supports(cell.scenario, cell.phases[0].layout)
    assert "pip install 'torchao>=0.18'" in getattr(refused, "reason", "")
