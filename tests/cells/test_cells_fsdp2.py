"""FSDP2: every way of arranging ranks computes what the oracle computes, to the last digits of float64.

The cells that quick runs are judged there; here are the layouts, options and precisions that it leaves out.
"""

import copy
import re
from itertools import product
from unittest.mock import Mock

import pytest
import torch
from cells import MICRO_BATCHES, STEPS, assert_honest, cell_of, exhaustive, record_of

from conformance.backends.protocol import Supported, Unsupported
from conformance.core.host import FIXTURES
from conformance.runner.session import Session
from conformance.spec.known_defects import LostEmbeddingGradient, defects_of
from conformance.spec.layout import Layout
from conformance.spec.precision import PrecisionName, noise_runs
from impl.fsdp2.adapter import EXPECTED, Fsdp2Backend
from impl.fsdp2.pipeline import Pipeline
from impl.models.loading import load_model


@pytest.mark.parametrize(
    ("scenario", "model", "layout"),
    [
        exhaustive("sft-packed", "pangu", "tp2.seqpar"),
        exhaustive("sft-packed", "gemma3", "tp2.seqpar.losspar"),
        exhaustive("sft-packed", "qwen3", "tp2.plan"),
        exhaustive("sft-packed", "qwen3", "dp2.ckpt.offload"),
        exhaustive("sft-packed", "gemma3", "dp2.tp2.lastsync"),
        exhaustive("sft-packed", "llama", "dp1.compile"),
        exhaustive("sft-packed", "gemma3", "dp2.compile"),
        exhaustive("sft-packed", "llama", "dp2.ckpt.compile"),
        exhaustive("sft-packed", "pangu", "tp2.compile"),
        exhaustive("sft-packed", "pangu", "dp2.tp2.plan.losspar.compile"),
        exhaustive("sft-packed", "llama", "tp2.seqpar.compile"),
        exhaustive("grpo", "qwen3", "dp2.compile"),
        exhaustive("sft-lora", "llama", "dp2.compile"),
        exhaustive("sft-packed", "pangu", "dp2.rep2.lastsync"),
        exhaustive("sft-warmup", "qwen3", "dp2"),
        exhaustive("sft-packed", "llama", "sp2.stride2"),
        exhaustive("sft-packed", "qwen3", "sp3"),
        exhaustive("sft-packed", "pangu", "sp2.tp2.seqpar.losspar"),
        exhaustive("sft-packed", "gemma3", "dp2.sp2.ckpt.offload"),
        exhaustive("sft-packed", "qwen3", "dp2.sp2.zigzag"),
        ("sft-padded", "llama", "sp2.torchcp"),
        ("sft-sgd", "pangu", "sp2.ring.ckpt"),
        exhaustive("sft-uneven", "gemma3", "dp3"),
        exhaustive("sft-frozen", "qwen3", "dp2.ckpt"),
        exhaustive("sft-frozen", "qwen3", "dp2.tp2"),
        exhaustive("sft-cosine-end", "llama", "dp2"),
        exhaustive("sft-linear-end", "llama", "dp2"),
        exhaustive("sft-long", "gemma3", "sp2.ckpt"),
        exhaustive("sft-warmup", "pangu", "dp2.tp2"),
        exhaustive("sft-warmup", "gemma3", "dp2.sp2"),
        ("sft-packed", "llama", "dp2.ddp.lastsync"),
        ("sft-sgd", "qwen3", "dp2.zero2.fsdp1"),
        exhaustive("sft-frozen", "qwen3", "dp2.ddp.buckets"),
        exhaustive("sft-warmup", "qwen3", "dp2.ddp"),
        exhaustive("sft-warmup", "pangu", "dp2.fsdp1"),
        exhaustive("sft-lora", "llama", "dp2.fsdp1"),
        exhaustive("sft-packed", "gemma3", "dp4.rep2.fsdp1.lastsync"),
        exhaustive("sft-packed", "gemma3", "dp2.fsdp1.ckpt.compile"),
        exhaustive("sft-packed", "qwen3", "dp2.sp2.ddp"),
        exhaustive("grpo", "llama", "dp2.fsdp1"),
        exhaustive("ppo", "llama", "dp2.ddp"),
        ("sft-packed", "qwen3", "dp2.zero2.mfsdp"),
        exhaustive("sft-packed", "gemma3", "dp2.mfsdp.ckpt"),
        exhaustive("dpo", "llama", "dp2.zero1.mfsdp"),
        exhaustive("sft-packed", "qwen3-moe", "dp2.mfsdp"),
        exhaustive("ppo", "llama", "dp2.mfsdp"),
        ("sft-muon", "llama", "dp2"),
        exhaustive("sft-muon", "qwen3", "dp2.tp2.seqpar.losspar"),
        exhaustive("sft-muon", "gemma3", "dp2.ddp.lastsync"),
        exhaustive("sft-muon-rms", "pangu", "tp2"),
        exhaustive("sft-packed", "llama", "dp2.pp2"),
        exhaustive("sft-uneven", "mistral", "pp2.ckpt"),
        exhaustive("sft-frozen", "llama", "pp2"),
        exhaustive("sft-warmup", "olmo2", "dp2.pp2"),
        exhaustive("ppo", "pangu", "pp2"),
    ],
)
def test_exact(session: Session, scenario: str, model: str, layout: str) -> None:
    assert_honest(session, cell_of("fsdp2", scenario, model, layout, "exact"))


@pytest.mark.exhaustive
def test_a_record_tells_denominators_memory_and_who_holds_which_piece(session: Session) -> None:
    cell = cell_of("fsdp2", "sft-packed", "pangu", "dp2.tp2", "exact")
    assert_honest(session, cell)
    footer = record_of(session, cell).footer
    assert len(footer["memory"]) == len(footer["host_memory"]) == 4
    assert all(peak > 2**24 for peak in footer["memory"])
    of_micro_batches = [[len(parts) for parts in batch["targets"]] for batch in footer["batches"]]
    assert of_micro_batches == [[MICRO_BATCHES] * 2] * STEPS
    assert all(sum(map(sum, batch["targets"])) < batch["tokens"] for batch in footer["batches"])
    pieces = footer["pieces"]
    assert sorted(rank for ranks in pieces["model.embed_tokens.weight"].values() for rank in ranks) == [0, 1, 2, 3]
    assert {region.rpartition("tp")[2] for region in pieces["model.layers.0.self_attn.q_proj.weight"]} == {"0", "1"}


@pytest.mark.exhaustive
def test_exact_over_five_steps(session: Session) -> None:
    assert_honest(session, cell_of("fsdp2", "sft-packed", "qwen3", "dp2", "exact", steps=5))


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        exhaustive("tp2", "fp16"),
        exhaustive("dp2.ddp", "bf16"),
        exhaustive("dp2.ddp", "fp16"),
        exhaustive("dp2.fsdp1.lastsync", "bf16"),
        exhaustive("dp2.fsdp1", "fp16"),
        exhaustive("sp2.ring", "bf16"),
        ("dp2", "bf16"),
        exhaustive("dp2.ckpt.compile", "bf16"),
        exhaustive("dp2.compile", "fp16"),
        exhaustive("sp2", "fp16"),
        exhaustive("dp2", "fp16"),
        exhaustive("tp2", "bf16"),
        exhaustive("sp2", "bf16"),
        exhaustive("sp2.ring", "fp16"),
    ],
)
def test_mixed_precision_is_as_good_as_a_single_process(
    session: Session, layout: str, precision: PrecisionName
) -> None:
    cell = cell_of("fsdp2", "sft-sgd", "qwen3", layout, precision)
    verdict = session.run(cell).verdict
    if "fsdp1.lastsync" in layout:  # docs/findings/fsdp1-no-sync-half.md
        assert verdict.state == "expected_difference", verdict.reason
        return
    assert verdict.state == "conforms", verdict.reason
    further = noise_runs(precision, Layout.parse(layout).data)[1]
    assert not (session._oracles.folder(cell) / further).exists(), "one noise run was enough"


@pytest.mark.parametrize("model", [exhaustive("qwen3"), exhaustive("gemma3")])
def test_head_norms_as_transformers_ships_them_are_an_expected_difference(session: Session, model: str) -> None:
    verdict = session.run(cell_of("fsdp2", "sft-packed", model, "dp2.tp2.lastsync.shipped", "exact")).verdict
    assert verdict.state == "expected_difference", verdict.reason
    wrong = {
        finding.tensor.rpartition("self_attn.")[2]
        for finding in verdict.findings
        if finding.stage == "gradients" and finding.step == 0
    }
    assert {name.partition(" ")[0] for name in wrong} == {"q_norm.weight", "k_norm.weight"}


@pytest.mark.exhaustive
def test_an_embedding_that_torch_compile_cuts_off_is_an_expected_difference(session: Session) -> None:
    verdict = session.run(cell_of("fsdp2", "sft-packed", "llama", "tp2.plan.compile.shipped", "exact")).verdict
    assert verdict.state == "expected_difference", verdict.reason
    wrong = {f.tensor.partition(" ")[0] for f in verdict.findings if f.stage == "gradients" and f.step == 0}
    assert wrong == {"model.embed_tokens.weight"}


@pytest.mark.parametrize(("version", "is_lost"), [("2.11.0+cu130", False), ("2.12.0", True), ("2.13.0", True)])
def test_the_embedding_is_cut_off_by_the_torch_that_does_it(
    version: str, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: version)
    cell = cell_of("fsdp2", "sft-packed", "llama", "tp2.plan.compile.shipped", "exact")
    of_cell = cell.scenario, cell.phases[0].layout
    known = [one.known_for(*of_cell) for one in EXPECTED if one.is_about(*of_cell, default_zero=None)]
    assert defects_of(known) == ((LostEmbeddingGradient(),) if is_lost else ())


@pytest.mark.exhaustive
def test_an_expected_difference_hides_no_other_fault(session: Session) -> None:
    cell = cell_of("fsdp2", "sft-packed", "llama", "sp2.ring.shipped", "fp32", "cleared-gradients")
    assert session.run(cell).verdict.state == "differs"


@pytest.mark.parametrize(
    ("backend", "model", "layout", "precision", "reason"),
    [
        ("fsdp2", "llama", "sp2.compile", "fp32", "inside a layer.*use sp1"),
        ("deepspeed", "llama", "ulysses2.zero1.compile", "fp32", "inside a layer.*use sp1"),
        ("fsdp2", "qwen3-moe", "dp2.compile", "fp32", "leave compile out"),
        ("deepspeed", "llama", "dp2.compile", "fp32", "ZeRO-3 fetches weights.*add leaf"),
        ("megatron", "llama", "dp2.compile", "fp32", "compile"),
        ("fsdp2", "llama", "dp2.compile", "exact", ""),
        ("fsdp2", "llama", "dp2.ckpt.compile", "exact", ""),
        ("deepspeed", "llama", "tp2.zero1.compile", "bf16", ""),
    ],
)
def test_layers_are_compiled_where_that_is_what_it_says(
    backend: str, model: str, layout: str, precision: PrecisionName, reason: str
) -> None:
    cell = cell_of(backend, "sft-packed", model, layout, precision)
    try:
        adapter = cell.phases[0].backend.load()
    except ModuleNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed")
    found = adapter.supports(cell.scenario, cell.phases[0].layout)
    if not reason:
        assert isinstance(found, Supported)
        return
    assert isinstance(found, Unsupported)
    assert re.search(reason, found.reason)


@pytest.mark.parametrize(
    ("scenario", "model", "layout", "precision", "reason"),
    [
        ("sft-packed", "qwen3", "pp2", "exact", "tied to it are on two stages"),
        ("sft-packed", "mixtral", "pp2", "exact", "stages of 'mixtral' are not built"),
        ("sft-packed", "llama", "tp2.pp2", "exact", "only dp and ckpt"),
        ("sft-packed", "llama", "pp2.compile", "exact", "only dp and ckpt"),
        ("sft-lora", "llama", "pp2", "exact", "adapters beside stages"),
        ("sft-packed", "llama", "pp2", "fp16", "overflows of other stages"),
    ],
)
def test_stages_say_what_they_do_not_run(
    scenario: str, model: str, layout: str, precision: PrecisionName, reason: str
) -> None:
    cell = cell_of("fsdp2", scenario, model, layout, precision)
    found = Fsdp2Backend.supports(cell.scenario, cell.phases[0].layout)
    assert isinstance(found, Unsupported)
    assert reason in found.reason


def test_stages_one_after_another_are_the_whole_model() -> None:
    whole = load_model(FIXTURES / "models" / "llama", dtype=torch.float64, attention="eager")
    stages = [copy.deepcopy(whole) for _ in range(2)]
    hidden, positions = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 0, 1]])
    logits = whole(hidden, position_ids=positions, use_cache=False).logits
    for number, stage in enumerate(stages):
        Pipeline(Mock(rank=lambda number=number: number, size=lambda: 2), "cpu").keep_stage(stage)
        hidden = stage(hidden, position_ids=positions)
    assert torch.equal(hidden, logits)
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    assert [[type(layer).__name__ for layer in stage.model.layers].index("Elsewhere") for stage in stages] == [1, 0]


def test_a_layout_that_does_not_fit_the_model_is_unsupported_with_one_that_does(session: Session) -> None:
    verdict = session.run(cell_of("fsdp2", "sft-packed", "llama", "tp8", "exact")).verdict
    assert verdict.state == "unsupported"
    assert "tp4 would work" in verdict.reason


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "layout"),
    list(product(("pangu", "llama", "qwen3", "gemma3"), ("dp2.sp2.tp2", "sp4.tp2", "sp8", "dp4.sp2"))),
)
def test_rings_of_eight_ranks(session: Session, model: str, layout: str) -> None:
    assert_honest(session, cell_of("fsdp2", "sft-packed", model, layout, "exact", steps=1))


@pytest.mark.parametrize(
    ("model", "layout", "precision", "stage"),
    [
        ("llama", "sp2.ring.shipped", "fp32", "gradients"),
        exhaustive("qwen3", "sp2.zigzag.shipped", "fp32", "gradients"),
        exhaustive("gemma3", "sp2.ring.shipped", "bf16", "log-probs"),
    ],
)
def test_rings_as_the_package_ships_them_are_an_expected_difference(
    session: Session, model: str, layout: str, precision: PrecisionName, stage: str
) -> None:
    verdict = session.run(cell_of("fsdp2", "sft-packed", model, layout, precision)).verdict
    assert verdict.state == "expected_difference", verdict.reason
    assert verdict.first_stage == stage


@pytest.mark.exhaustive
def test_rings_as_the_package_ships_them_are_right_in_bf16(session: Session) -> None:
    verdict = session.run(cell_of("fsdp2", "sft-packed", "qwen3", "sp2.zigzag.shipped", "bf16")).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.parametrize(
    ("scenario", "model", "layout", "advice"),
    [
        ("sft-packed", "gemma3", "pp2", "use pp1"),
        ("sft-packed", "llama", "ulysses2", "use context parallelism"),
        ("sft-packed", "llama", "dp2.zero2", "leave the stage out"),
        ("sft-packed", "llama", "dp2.zero1.fsdp1", "use one of them, or ddp"),
        ("sft-packed", "llama", "dp2.tp2.ddp", "leave ddp out"),
        ("sft-packed", "llama", "dp2.fsdp1.offload", "leave one of them out"),
        ("sft-muon", "llama", "dp2.fsdp1", "FSDP1 flattens parameters, and Muon needs matrices"),
        ("sft-muon", "llama", "dp2.pp2", "Muon beside pp, ep and float8"),
        ("sft-packed", "llama", "dp2.fsdp1.buckets", "leave buckets out, or use ddp"),
        ("sft-packed", "llama", "dp2.zero0.mfsdp", "use zero1, zero2 or zero3"),
        ("sft-packed", "llama", "tp2.mfsdp", "issues/6660.*use dp2"),
        ("sft-packed", "llama", "dp2.tp2.mfsdp", "only dp and a ZeRO stage"),
        ("sft-packed", "llama", "dp2.mfsdp.compile", "compile beside mfsdp is not built in"),
        ("sft-muon", "llama", "dp2.mfsdp", "Megatron-FSDP flattens parameters, and Muon needs matrices"),
        ("sft-lora", "llama", "dp2.mfsdp", "cannot hook a frozen parameter"),
        ("sft-packed", "qwen3-moe", "dp2.zero2.mfsdp", "experts beside mfsdp.*use zero3"),
        ("sft-packed", "llama", "sp2.torchcp", "attends over whole rows; leave torchcp out"),
        ("sft-packed", "gemma3", "sp2.zigzag", "zigzag gets sliding windows wrong .* the default is right"),
        ("sft-padded", "gemma3", "sp2.torchcp", "PyTorch's context parallel has no sliding window"),
        ("sft-packed", "llama", "tp2.sp2.stride4", "tp2.sp2.stride2 would work"),
    ],
)
def test_what_the_backend_lacks_is_unsupported_with_advice(
    session: Session, scenario: str, model: str, layout: str, advice: str
) -> None:
    verdict = session.run(cell_of("fsdp2", scenario, model, layout, "exact")).verdict
    assert verdict.state == "unsupported"
    assert re.search(advice, verdict.reason)


def test_ring_without_package_is_unsupported_with_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("impl.context_parallel.sequence_sharding.available", lambda: False)
    scenario = cell_of("fsdp2", "sft-packed", "llama", "sp2", "exact").scenario
    answer = Fsdp2Backend.supports(scenario, Layout(sp=2))
    assert isinstance(answer, Unsupported)
    assert "pip install 'backend-parity[ring]'" in answer.reason
    assert isinstance(Fsdp2Backend.supports(scenario, Layout(dp=2)), Supported)
