"""DeepSpeed: every ZeRO stage computes what the oracle computes, and leaves the process as it was.

The sweep over all families, world sizes and scenarios is the full profile; here is one cell of each kind.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import make_cell

from conformance.backend import BackendEntry
from conformance.plan.cell import Cell
from conformance.judge.verdict import Verdict
from conformance.record.tensors import read_record
from conformance.run.oracles import prepare_inputs
from conformance.scenario import Precision, scenario_to_json
from conformance.run.session import Session, task_arguments
from conformance.world import Outcome, Pool, WorldConfig

pytest.importorskip("deepspeed")

HONEST = 1e-12  # what the exact tier shows when nothing is wrong; the bound is ten times that
DEEPSPEED = BackendEntry(name="deepspeed", target="impl.deepspeed.adapter:DeepspeedBackend")
PRELOAD = ("impl.deepspeed.adapter", "impl.deepspeed.strategy", "impl.fsdp2.strategy")


def cell(scenario: str, model: str, layout: str, precision: Precision, *faults: str, **overrides: Any) -> Cell:
    return make_cell(scenario, model, layout, precision, faults=faults, backend=DEEPSPEED, **overrides)


def run(session: Session, cell: Cell) -> Verdict:
    return session.run(cell).verdict


@pytest.mark.parametrize(
    ("scenario", "model", "layout"),
    [
        ("sft-packed", "pangu", "dp1.zero1"),
        ("sft-packed", "pangu", "dp2.zero0"),
        ("sft-padded", "llama", "dp2.zero1"),
        ("sft-sgd", "qwen3", "dp2.zero2"),
        ("sft-packed", "gemma3", "dp2.zero3"),
        ("sft-resume", "llama", "dp2.zero0"),
        ("sft-resume", "qwen3", "dp2.zero2"),
        ("sft-resume", "pangu", "tp2.zero3"),
        ("sft-packed", "qwen3", "tp2.zero0"),
        ("sft-packed", "gemma3", "tp2.zero1"),
        ("sft-sgd", "llama", "dp2.tp2.zero3"),
        ("sft-packed", "qwen3", "dp2.zero2.ckpt.offload"),
        ("sft-packed", "gemma3", "dp2.zero3.ckpt.offload"),
        ("sft-packed", "llama", "dp2.zero1.ownopt"),
        ("sft-sgd", "llama", "dp2.zero3.shardinit.ownopt"),
        ("sft-packed", "pangu", "sp2.zero0"),
        ("sft-padded", "llama", "dp2.sp2.zigzag.zero1"),
        ("sft-packed", "gemma3", "tp2.sp2.zero3"),
        ("sft-packed", "llama", "ulysses2.zero0"),
        ("sft-sgd", "qwen3", "dp2.ulysses2.zero2"),
        ("sft-packed", "gemma3", "ulysses2.zero3"),
        ("sft-packed", "pangu", "sp2.ulysses2.zero3.ckpt"),
        ("sft-sgd", "llama", "tp2.ulysses2.zero1"),
        ("sft-resume", "llama", "ulysses2.zero1"),
    ],
)
def test_exact(session: Session, scenario: str, model: str, layout: str) -> None:
    asked = cell(scenario, model, layout, "exact")
    verdict = run(session, asked)
    assert verdict.state == "conforms", verdict.reason
    assert max(quantity["observed"] for quantity in verdict.quantities) < HONEST
    assert "gradient norm" in verdict.stages
    assert_is_what_it_says(session, asked)
    footer = (session.config.out / "cells" / asked.slug / "record" / "record.jsonl").read_text().splitlines()[-1]
    assert json.loads(footer)["leaks"] == []


def assert_is_what_it_says(session: Session, asked: Cell) -> None:
    """A layout changes no number, so what really runs has to be asked of the engine."""
    resolved = read_record(session.config.out / "cells" / asked.slug / "record").header["resolved"]
    stage = 3 if asked.layout.zero is None else asked.layout.zero
    options = asked.layout.options
    assert resolved["zero_stage"] == stage
    wrapper = {0: "", 1: "DeepSpeedZeroOptimizer", 2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}
    assert wrapper[stage] in resolved["optimizer_wrapper"]
    assert (resolved["deepspeed"].get("optimizer") is not None) == ("ownopt" in options)
    assert resolved["offloads_optimizer"] == ("offload" in options)
    assert resolved["offloads_parameters"] == ("offload" in options and stage == 3)
    assert resolved["checkpointing"] == ("ckpt" in options)
    assert resolved["mesh"] == {axis: getattr(asked.layout, axis) for axis in ("dp", "sp", "ulysses", "tp")}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("scenario", ["sft-padded", "sft-packed"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_with_and_without_accumulation_and_clipping(
    session: Session, stage: int, scenario: str, clip: float | None, optimizer: str
) -> None:
    options = {"name": optimizer, "lr": 1e-3, "max_grad_norm": clip, **({"eps": 1e-3} if optimizer == "adamw" else {})}
    name = f"{scenario}-{optimizer}-{'unclipped' if clip is None else 'clipped'}"
    verdict = run(session, cell(scenario, "llama", f"dp2.zero{stage}", "exact", name=name, optimizer=options))
    assert verdict.state == "conforms", verdict.reason
    assert max(quantity["observed"] for quantity in verdict.quantities) < HONEST


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "layout", ["dp2.zero0", "dp2.zero1", "dp2.zero2", "dp2.zero3", "tp2.zero0", "tp2.zero1", "ulysses2.zero2"]
)
def test_lower_precisions_are_as_good_as_a_single_process(session: Session, layout: str, precision: Precision) -> None:
    asked = cell("sft-packed", "qwen3", layout, precision)
    verdict = run(session, asked)
    assert verdict.state == "conforms", verdict.reason
    resolved = read_record(session.config.out / "cells" / asked.slug / "record").header["resolved"]
    compute = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]
    assert resolved["compute_dtype"] == compute
    assert resolved["accumulation_dtype"] == (compute if asked.layout.zero == 0 else "torch.float32")


@pytest.mark.parametrize(
    ("name", "layout", "precision"),
    [
        ("unmarked-shards", "tp2.zero0", "bf16"),
        ("lost-loss-scale", "dp2.zero0", "fp16"),
        ("step-at-setup", "dp2.zero0", "bf16"),
    ],
)
def test_what_zero_0_gets_wrong_in_half_precision_is_caught(
    session: Session, name: str, layout: str, precision: Precision
) -> None:
    from conformance.faults import CATALOGUE

    verdict = run(session, cell("sft-packed", "llama", layout, precision, name))
    assert verdict.state == "differs", verdict.reason
    assert verdict.first_stage == CATALOGUE[name].stage, verdict.reason


@pytest.mark.parametrize("layout", ["dp2.zero0.shipped", "dp2.tp2.zero0.shipped", "dp2.zero3.shipped"])
def test_rounded_masters_are_an_expected_difference(session: Session, layout: str) -> None:
    verdict = run(session, cell("sft-packed", "llama", layout, "bf16"))
    assert verdict.state == "expected_difference", verdict.reason
    assert verdict.stages["weights"]["observed"] < 2**-8  # one rounding to bf16 and nothing else


@pytest.mark.parametrize("layout", ["ulysses2.zero3.shipped", "ulysses2.shipped", "dp2.ulysses2.zero3.ckpt.shipped"])
def test_gradients_of_ulysses_at_zero_3_are_an_expected_difference(session: Session, layout: str) -> None:
    verdict = run(session, cell("sft-sgd", "llama", layout, "exact"))
    assert verdict.state == "expected_difference", verdict.reason


@pytest.mark.parametrize("layout", ["ulysses2.zero2.shipped", "tp2.ulysses2.zero3.shipped"])
def test_elsewhere_ulysses_is_right_as_shipped(session: Session, layout: str) -> None:
    verdict = run(session, cell("sft-sgd", "llama", layout, "exact"))
    assert verdict.state == "conforms", verdict.reason


def test_tensor_parallelism_really_cuts(session: Session) -> None:
    asked = cell("sft-sgd", "llama", "tp2.zero1", "exact")
    assert run(session, asked).state == "conforms"
    record = read_record(session.config.out / "cells" / asked.slug / "record")
    assert record.header["resolved"]["cut_by_tensor_parallelism"] >= 14  # seven matrices in each of two layers


FAULTS = {
    "dropped-o-bias": ("sft-padded", "pangu", "dp2.zero1"),
    "leaking-documents": ("sft-packed", "llama", "dp2.zero2"),
    "local-token-mean": ("sft-padded", "pangu", "dp2.zero3"),
    "copied-micro-batch": ("sft-packed", "llama", "dp2.zero2"),
    "divided-by-world": ("sft-sgd", "llama", "tp2.zero1"),
    "unreduced-replicas": ("sft-sgd", "llama", "dp2.zero0"),
    "clip-never": ("sft-sgd", "llama", "dp2.zero3"),
    "rolled-labels": ("sft-packed", "llama", "ulysses2.zero2"),
    "merged-in-bf16": ("sft-packed", "llama", "sp2.ring.zero1"),
}


HALF_PRECISION_SEAMS = {"mark_cut_gradients", "forgotten_scale", "forget_steps"}  # their faults are above


def test_each_seam_has_a_fault_here() -> None:
    from conformance.faults import CATALOGUE

    assert {CATALOGUE[name].seam for name in FAULTS} | HALF_PRECISION_SEAMS == DEEPSPEED.load().seams.keys()  # type: ignore[attr-defined]


@pytest.mark.parametrize("precision", ["exact", "fp32"])
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught_at_the_predicted_stage(session: Session, name: str, precision: Precision) -> None:
    from conformance.faults import CATALOGUE

    verdict = run(session, cell(*FAULTS[name], precision, name))
    assert verdict.state == "differs", verdict.reason
    assert verdict.first_stage == CATALOGUE[name].stage, verdict.reason
    first_loss = next(q for q in verdict.quantities if (q["stage"], q["tensor"], q["step"]) == ("loss", "loss", 0))
    assert (first_loss["observed"] <= first_loss["allowed"]) == CATALOGUE[name].loss_blind
    if name == "unreduced-replicas":
        assert verdict.stages["replicas"]["ratio"] > 1


@pytest.mark.parametrize("layout", ["dp2.sp2.zero1", "ulysses2.zero2", "sp2.zero3"])
def test_division_by_sequence_ranks_is_caught_with_its_factor(session: Session, layout: str) -> None:
    verdict = run(session, cell("sft-sgd", "llama", layout, "exact", "divided-by-world"))
    assert verdict.first_stage == "gradients", verdict.reason
    axis = layout.partition(".")[0][:-1] if "dp" not in layout else "sp"
    assert f"0.5 times the reference, which is {'1/(dp) or ' if 'dp' in layout else ''}1/({axis})" in verdict.reason


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_clipping_that_never_happens_is_caught_at_the_other_stages_too(session: Session, stage: int) -> None:
    verdict = run(session, cell("sft-sgd", "llama", f"dp2.zero{stage}", "exact", "clip-never"))
    assert verdict.first_stage == "clipped update", verdict.reason


@pytest.mark.parametrize(
    ("layout", "precision", "advice"),
    [
        ("ulysses2.zero1", "bf16", "use zero0, zero2 or zero3"),
        ("pp2", "exact", "use pp1"),
        ("dp2.rep2", "exact", "use rep1, or zero0"),
        ("dp2.lastsync", "exact", "leave it out"),
        ("dp2.zero0.offload", "exact", "use zero1, zero2 or zero3"),
        ("dp2.zero1.shardinit", "exact", "use zero3 and tp1"),
        ("dp2.shardinit", "bf16", "use fp32"),
        ("dp2.zero0.ownopt", "fp16", "use zero1, zero2 or zero3"),
    ],
)
def test_what_is_not_claimed_says_what_would_work(
    session: Session, layout: str, precision: Precision, advice: str
) -> None:
    verdict = run(session, cell("sft-packed", "llama", layout, precision))
    assert verdict.state == "unsupported"
    assert advice in verdict.reason


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Worlds that both backends share, which a session never lets them."""
    with Pool(work_dir=tmp_path_factory.mktemp("pool")) as pool:
        yield pool


def in_ranks(pool: Pool, folder: Path, task: str, layout: str, *, world: str = "shared") -> list[Any]:
    asked = cell("sft-padded", "qwen3", layout, "exact")
    inputs = prepare_inputs(asked.scenario, folder)
    outcome = pool.run(
        key=world,
        config=WorldConfig(size=asked.layout.world_size, device="cpu", preload=PRELOAD),
        task=f"deepspeed_tasks:{task}",
        kwargs={
            "scenario": scenario_to_json(asked.scenario),
            "layout": layout,
            "weights": str(inputs.model),
            "batches": str(inputs.batches),
        },
        log_dir=folder / "logs",
        budget_s=120.0,
    )
    assert outcome.state == "done", outcome.reason
    return outcome.results


@pytest.mark.parametrize(
    "layout",
    [
        "dp2.zero0",
        "dp2.zero1",
        "dp2.zero2",
        "dp2.zero3",
        "dp2.zero3.shardinit",
        "tp2.zero1",
        "ulysses2.zero2",
        "tp2.ulysses2.zero3",
    ],
)
def test_nothing_outlives_a_teardown(pool: Pool, tmp_path: Path, layout: str) -> None:
    for left in in_ranks(pool, tmp_path, "train", layout, world=f"fresh {layout}"):
        assert left == {"changed": [], "attention": False, "groups": [], "autotp": False, "model_alive": False}


@pytest.mark.parametrize("layout", ["dp2.zero0", "dp2.zero1", "dp2.zero2", "dp2.zero3", "tp2.zero2"])
def test_optimizer_state_has_canonical_names_and_is_whole(pool: Pool, tmp_path: Path, layout: str) -> None:
    for errors in in_ranks(pool, tmp_path, "optimizer_state", layout):
        assert max(errors.values()) < HONEST


@pytest.mark.parametrize("layout", ["dp2.zero0", "dp2.zero3.shardinit", "tp2.zero1"])
def test_a_saved_model_is_what_was_loaded(pool: Pool, tmp_path: Path, layout: str) -> None:
    assert in_ranks(pool, tmp_path, "save_model", layout) == [[], []]


@pytest.mark.parametrize("layout", ["dp2.zero1", "dp2.zero3.shardinit", "tp2.zero2", "ulysses2.zero3"])
def test_fsdp2_gives_the_same_bits_before_and_after_deepspeed(pool: Pool, tmp_path: Path, layout: str) -> None:
    between = cell("sft-sgd", "qwen3", layout, "fp32")
    fsdp2 = make_cell("sft-sgd", "qwen3", "tp2" if between.layout.tp > 1 else "dp2", "fp32")
    digests = []
    for asked, name in ((fsdp2, "before"), (between, "between"), (fsdp2, "after")):
        outcome = train(pool, asked, tmp_path, name, world=f"before {layout}")
        assert outcome.state == "done", outcome.reason
        record = read_record(tmp_path / name)
        digests.append([{k: t.numpy().tobytes() for k, t in step.tensors().items()} for step in record.steps])
    assert digests[0] == digests[2]


def train(pool: Pool, asked: Cell, folder: Path, name: str, *, world: str) -> Outcome:
    inputs = prepare_inputs(asked.scenario, folder / "inputs")
    return pool.run(
        key=world,
        config=WorldConfig(size=asked.layout.world_size, device="cpu", preload=PRELOAD),
        task="conformance.plan.cell:run_cell",
        kwargs=task_arguments(asked, inputs, folder / name),
        log_dir=folder / f"{name}-logs",
        budget_s=120.0,
    )
