"""Mixtures of experts on the backends: routing, the loss that balances experts, replay, and expert parallelism."""

import importlib.metadata
from dataclasses import replace

import pytest
import torch
from cells import BACKENDS, ROWS, STEPS, assert_honest, cell_of, exhaustive, record_of

from conformance.backends.protocol import BackendEntry, Unsupported
from conformance.matrix.cell import Cell, Handover
from conformance.runner.phases import group_config
from conformance.runner.session import Session
from conformance.spec.batch import CHOICES, expert_column, read_batches
from conformance.spec.layout import Layout
from conformance.spec.precision import FLOAT64, PrecisionName
from impl.megatron.adapter import MegatronBackend

EXPERTS = 8  # of each router of qwen3-moe


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "scenario", "model", "layout"),
    [
        ("fsdp2", "sft-packed", "qwen3-moe", "dp2.ep2"),
        ("deepspeed", "sft-packed", "qwen2-moe", "dp2.zero3"),
        ("megatron", "sft-z-loss", "mixtral", "ep2.pp2"),
        ("megatron", "sft-packed", "mixtral", "ep2.pp2"),
        *(
            ("megatron", "sft-z-loss", "qwen3-moe", layout)
            for layout in ("dp2", "dp2.zero1", "ep2", "pp2", "tp2.seqpar", "ep2.sp2", "ep2.tp2.seqpar", "dp2.ckpt")
        ),
        *(
            ("megatron", "sft-packed", "qwen3-moe", layout)
            for layout in (
                *("dp1", "dp2", "dp2.zero1", "tp2.seqpar", "pp2", "sp2", "ep2", "ep2.zero1.overlap", "ep2.ckpt", "ep4"),
                *("dp2.ep2", "dp2.ep2.zero1", "ep2.tp2.seqpar", "ep2.tp2.seqpar.losspar", "ep2.sp2"),
            )
        ),
        *(("megatron", "sft-packed", "qwen2-moe", layout) for layout in ("ep2.tp2.seqpar", "pp2", "dp2.ckpt")),
        ("megatron", "sft-packed", "mixtral", "pp2.vpp2"),
        *(("megatron", "sft-padded", "qwen3-moe", layout) for layout in ("ep2", "sp2.zigzag")),
        ("megatron", "grpo", "qwen3-moe", "ep2"),
        ("megatron", "grpo", "qwen2-moe", "pp2"),
        ("megatron", "ppo", "mixtral", "ep2.tp2.seqpar"),
        *(("fsdp2", "sft-packed", "qwen3-moe", layout) for layout in ("ep2", "ep4", "ep2.tp2", "ep2.sp2")),
        ("fsdp2", "sft-packed", "mixtral", "dp2.rep2.ep2"),
        ("fsdp2", "sft-packed", "qwen2-moe", "ep2.ckpt.offload.lastsync"),
        ("fsdp2", "sft-padded", "qwen3-moe", "dp2.rep2"),
        ("fsdp2", "sft-packed", "qwen2-moe", "dp2.tp2"),
        ("fsdp2", "grpo", "qwen2-moe", "ep2"),
        ("fsdp2", "ppo", "mixtral", "tp2"),
        ("deepspeed", "grpo", "qwen3-moe", "dp2.zero2"),
        ("deepspeed", "sft-packed", "mixtral", "ulysses2.zero2"),
        ("fsdp2", "sft-z-loss", "qwen3-moe", "ep2.sp2"),
        ("fsdp2", "sft-z-loss", "deepseek-v2", "tp2"),
        ("deepspeed", "sft-z-loss", "mixtral", "sp2.zero2"),
        *(("fsdp2", "sft-expert-bias", "deepseek-v3-odd", layout) for layout in ("dp2", "sp2")),
        ("deepspeed", "sft-expert-bias", "deepseek-v3", "dp2.zero3"),
        *(("megatron", "sft-expert-bias", "deepseek-v3-odd", layout) for layout in ("dp2.zero1", "pp2.ckpt", "sp2")),
        *(("deepspeed", "sft-packed", "mixtral", f"dp2.zero{stage}") for stage in (0, 1, 2)),
    ],
)
def test_exact(session: Session, backend: str, scenario: str, model: str, layout: str) -> None:
    verdict = assert_honest(session, cell_of(backend, scenario, model, layout, "exact"))
    assert {"routing", "router_loss"} <= {q.tensor for q in verdict.quantities if q.stage == "routing"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "layout"),
    [("fsdp2", "dp2"), ("fsdp2", "ep4"), ("deepspeed", "dp2.zero3"), ("megatron", "dp2"), ("megatron", "ep4")],
)
def test_an_expert_without_a_token_on_a_rank_neither_hangs_nor_differs(
    session: Session, backend: str, layout: str
) -> None:
    cell = cell_of(backend, "sft-padded", "qwen3-moe", layout, "exact")
    scenario = replace(cell.scenario, data=replace(cell.scenario.data, max_len=20, too_long="drop"))
    cell = Cell.single(scenario=scenario, backend=cell.phases[0].backend, layout=cell.phases[0].layout)
    assert_honest(session, cell)
    rows = record_of(session, cell).steps[0].tensors()
    reached = [(rows[f"routing/{row}"].view(-1, 2, EXPERTS) > 0).any(dim=0) for row in range(ROWS)]
    size = ROWS // (cell.phases[0].layout.data * cell.scenario.accumulation)
    micro_batches = [torch.stack(reached[i : i + size]).any(dim=0) for i in range(0, ROWS, size)]
    assert any(not bool(experts.all()) for experts in micro_batches)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "model", "layout", "precision"),
    [
        ("fsdp2", "mixtral", "ep2", "fp32"),
        *(("fsdp2", m, "dp2", p) for m in ("qwen3-moe", "qwen2-moe", "mixtral") for p in ("fp32", "bf16")),
        ("fsdp2", "qwen3-moe", "ep2", "bf16"),
        ("fsdp2", "qwen2-moe", "tp2", "bf16"),
        ("fsdp2", "qwen3-moe", "sp2", "bf16"),
        ("deepspeed", "qwen3-moe", "dp2.zero2", "bf16"),
        ("deepspeed", "mixtral", "sp2.zero3", "fp32"),
        *(("megatron", m, "ep2", p) for m in ("qwen3-moe", "qwen2-moe", "mixtral") for p in ("fp32", "bf16")),
        *(("megatron", "qwen3-moe", layout, "bf16") for layout in ("dp2.zero1", "pp2", "sp2", "ep2.ckpt")),
        *(("megatron", "qwen2-moe", layout, "bf16") for layout in ("tp2.seqpar", "ep2.tp2.seqpar")),
        ("megatron", "qwen3-moe", "dp2", "fp16"),
        ("megatron", "qwen3-moe", "ep2.zero1", "fp16"),
    ],
)
def test_below_the_exact_tier_the_oracles_choices_are_taken(
    session: Session, backend: str, model: str, layout: str, precision: PrecisionName
) -> None:
    cell = cell_of(backend, "sft-packed", model, layout, precision)
    verdict = session.run(cell).verdict
    assert verdict.state == "conforms", verdict.reason
    given, own = read_batches(session._oracles.folder(cell) / FLOAT64 / CHOICES), record_of(session, cell).steps
    assert len(given) == STEPS
    for batch, step in zip(given, own, strict=True):
        document = batch.rows[0].documents[0]
        weights = step.tensors()["routing/0"].view(batch.rows[0].length, -1, experts_of(model))
        for token, expert in enumerate(document.columns[expert_column(0, 1)]):  # type: ignore[arg-type]
            assert weights[token, 0, int(expert)] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "scenario", "layout", "precision"),
    [
        ("fsdp2", "grpo", "ep2", "fp32"),
        ("fsdp2", "ppo", "tp2", "fp32"),
        ("fsdp2", "grpo-half", "sp2", "bf16"),
        ("deepspeed", "grpo", "dp2.zero3", "fp32"),
        ("deepspeed", "grpo-half", "dp2.zero2", "bf16"),
        ("megatron", "grpo", "ep2", "fp32"),
        ("megatron", "grpo-half", "pp2", "bf16"),
    ],
)
def test_below_the_exact_tier_each_pass_of_a_roll_out_takes_its_own(
    session: Session, backend: str, scenario: str, layout: str, precision: PrecisionName
) -> None:
    cell = cell_of(backend, scenario, "qwen3-moe", layout, precision, steps=3)
    verdict = session.run(cell).verdict
    assert verdict.state == "conforms", verdict.reason
    looked = {"routing", "old routing", *(["critic old routing"] if scenario == "ppo" else []), "reference routing"}
    assert looked <= {quantity.stage for quantity in verdict.quantities}


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_ranks_that_have_run_experts_keep_no_process_groups_and_are_used_again(session: Session, backend: str) -> None:
    cell = cell_of(backend, "sft-packed", "mixtral", "ep2", "exact", steps=1)
    for _ in range(3):  # what a first cell opens is not held against it
        assert session.run(cell).verdict.state == "conforms"
        ranks = group_config(cell.phases[0], "cpu")
        assert any(config == ranks for _, config in session._pool._own.worker_groups)


def experts_of(model: str) -> int:
    return {"qwen3-moe": 8, "qwen2-moe": 6, "mixtral": 4}[model]


@pytest.mark.parametrize(
    ("backend", "liar"), [("fsdp2", "TakesOtherExperts"), exhaustive("megatron", "MegatronTakesOtherExperts")]
)
def test_choices_that_are_not_taken_are_found(session: Session, backend: str, liar: str) -> None:
    """In fp32 a router's own choices are nearly always the oracle's, so these are moved by one."""
    cell = cell_of(backend, "sft-packed", "mixtral", "ep2", "fp32")
    wrong = BackendEntry(name="wrong", target=f"liars:{liar}")
    verdict = session.run(Cell.single(scenario=cell.scenario, backend=wrong, layout=cell.phases[0].layout)).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", "routing"), verdict.reason


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("liar", "layout"),
    [
        ("Fsdp2RunsWholeExperts", "ep2"),
        ("MegatronRunsWholeExperts", "ep2"),
        ("Fsdp2RunsWholeExperts", "dp2.ep2"),
        ("MegatronRunsWholeExperts", "dp2.ep2.zero1"),
    ],
)
def test_expert_parallelism_that_does_nothing_shows_though_all_numbers_are_right(
    session: Session, liar: str, layout: str
) -> None:
    backend = liar.removesuffix("RunsWholeExperts").lower()
    cell = cell_of(backend, "sft-packed", "qwen3-moe", layout, "exact", steps=1)
    wrong = BackendEntry(name="liar", target=f"layout_liars:{liar}")
    verdict = session.run(Cell.single(scenario=cell.scenario, backend=wrong, layout=cell.phases[0].layout)).verdict
    assert {finding.stage for finding in verdict.findings} == {"configuration"}, verdict.reason
    for claim in ("tokens go to the ranks of their experts", "gradients of experts are not reduced over all"):
        assert any(f"{layout}: {claim}" in finding.tensor for finding in verdict.findings), verdict.reason


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backends", "handed"),
    [
        (("fsdp2", "fsdp2"), ("ep2", "dp2.ep2")),
        (("fsdp2", "fsdp2"), ("dp2", "ep2")),
        (("fsdp2", "fsdp2"), ("ep2", "tp2")),
        (("megatron", "megatron"), ("ep2", "ep2.tp2.seqpar")),
        (("megatron", "megatron"), ("pp2", "ep2.zero1")),
        (("fsdp2", "megatron"), ("ep2.tp2", "ep2")),
        (("megatron", "deepspeed"), ("ep2", "dp2.zero2")),
    ],
)
def test_moe_state_transfers_across_layouts_and_backends(
    session: Session, backends: tuple[str, str], handed: tuple[str, str]
) -> None:
    assert_honest(session, in_two_phases("state", backends, handed))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "handed",
    [("ep2", "ep2"), ("ep2", "ep2.tp2.seqpar"), ("ep2.zero1", "ep4.zero1"), ("dp2", "tp2.seqpar"), ("dp2", "pp2")],
)
def test_megatrons_checkpoints_of_experts_are_read_in_other_layouts(session: Session, handed: tuple[str, str]) -> None:
    assert_honest(session, in_two_phases("checkpoint", ("megatron", "megatron"), handed))


def in_two_phases(what: Handover, backends: tuple[str, str], layouts: tuple[str, str]) -> Cell:
    cell = cell_of(backends[0], "sft-packed", "qwen3-moe", layouts[0], "exact", steps=4)
    first = replace(cell.phases[0], steps=2, save=what)
    second = replace(cell.phases[0], steps=2, layout=Layout.parse(layouts[1]), backend=BACKENDS[backends[1]])
    return replace(cell, phases=(first, second), program=what)


def test_megatrons_checkpoints_with_and_without_ep_are_not_each_others() -> None:
    cell = cell_of("megatron", "sft-packed", "qwen3-moe", "ep2", "exact")
    answer = MegatronBackend.supports_checkpoint(cell.scenario, Layout.parse("ep2"), Layout.parse("dp2"))
    assert isinstance(answer, Unsupported)
    assert "transfer a training state" in answer.reason


@pytest.mark.parametrize(
    ("backend", "model", "layout", "advice"),
    [
        ("deepspeed", "qwen3-moe", "ep2", "use ep1"),
        ("deepspeed", "qwen3-moe", "tp2", "AutoTP does not know how the plan of qwen3_moe shards experts; use tp1"),
        ("fsdp2", "llama", "ep2", "experts of 'llama' cannot be sharded, only those of mixtral, qwen2_moe, qwen3_moe"),
        ("megatron", "llama", "ep2", "use ep1"),
        ("megatron", "qwen3-moe", "tp2", "add seqpar"),
    ],
)
def test_what_a_backend_lacks_is_unsupported_with_advice(backend: str, model: str, layout: str, advice: str) -> None:
    cell = cell_of(backend, "sft-packed", model, layout, "exact")
    answer = cell.phases[0].backend.load().supports(cell.scenario, cell.phases[0].layout)
    assert isinstance(answer, Unsupported)
    assert advice in answer.reason


@pytest.mark.parametrize(
    ("version", "layout", "is_supported"),
    [("2.11.0+cu130", "tp2", False), ("2.13.0", "tp2", True), ("2.11.0", "ep2.tp2", True), ("2.11.0", "dp2", True)],
)
def test_experts_that_tp_cuts_need_a_torch_whose_fsdp2_takes_them(
    version: str, layout: str, is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = importlib.metadata.version
    monkeypatch.setattr("importlib.metadata.version", lambda one: version if one == "torch" else installed(one))
    cell = cell_of("fsdp2", "sft-packed", "qwen3-moe", layout, "exact")
    answer = cell.phases[0].backend.load().supports(cell.scenario, cell.phases[0].layout)
    assert isinstance(answer, Unsupported) != is_supported
