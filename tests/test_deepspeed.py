"""DeepSpeed: every ZeRO stage computes what the oracle computes, and leaves the process as it was.

The sweep over all families, world sizes and scenarios is the full profile; here is one cell of each kind.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import make_cell
from fsdp2_tasks import value_folder
from test_fsdp2_models import trio

from conformance.backend import BackendEntry
from conformance.inputs.prepare import prepare_inputs
from conformance.layout import Layout
from conformance.plan.cell import Cell
from conformance.record.results import Verdict
from conformance.record.tensors import read_record
from conformance.run.session import Session, leg_arguments
from conformance.scenario import Precision, scenario_to_json
from conformance.world import Outcome, Pool, WorldConfig

pytest.importorskip("deepspeed")

HONEST = 1e-12  # what the exact tier shows when nothing is wrong; the bound is ten times that
DEEPSPEED = BackendEntry(name="deepspeed", target="impl.deepspeed.adapter:DeepspeedBackend")
PRELOAD = ("impl.deepspeed.adapter", "impl.deepspeed.context", "impl.fsdp2.context")


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


def in_ranks(
    pool: Pool, folder: Path, task: str, layout: str, *, world: str = "shared", precision: Precision = "exact"
) -> list[Any]:
    """Results of a task of deepspeed_tasks, in the ranks of a world, with a scenario's frozen inputs."""
    asked = cell("sft-padded", "qwen3", layout, precision)
    inputs = prepare_inputs(asked.scenario, folder)
    arguments = {
        "scenario": scenario_to_json(asked.scenario),
        "layout": layout,
        "models": {role: str(model) for role, model in inputs.models.items()},
        "batches": str(inputs.batches),
    }
    return run_task(pool, folder, f"deepspeed_tasks:{task}", asked.world_size, world=world, **arguments)


def run_task(pool: Pool, folder: Path, task: str, size: int, *, world: str = "shared", **arguments: Any) -> list[Any]:
    outcome = pool.run(
        key=world,
        config=WorldConfig(size=size, device="cpu", preload=PRELOAD),
        task=task,
        kwargs=arguments,
        log_dir=folder / "logs",
        budget_s=120.0,
    )
    assert outcome.state == "done", outcome.reason
    return outcome.results


LEAVING = [
    "dp2.zero0",
    "dp2.zero1",
    "dp2.zero2",
    "dp2.zero3",
    "dp2.zero3.shardinit",
    "tp2.zero1",
    "ulysses2.zero2",
    "tp2.ulysses2.zero3",
]


@pytest.mark.parametrize("layout", LEAVING)
def test_nothing_outlives_a_teardown(pool: Pool, tmp_path: Path, layout: str) -> None:
    for left in in_ranks(pool, tmp_path, "train", layout, world=f"fresh {layout}"):
        assert left == {"changed": [], "attention": False, "groups": [], "autotp": False, "model_alive": False}


def test_a_world_holds_no_more_after_its_second_cell_of_a_kind_than_after_the_first(pool: Pool, tmp_path: Path) -> None:
    layouts = ["dp2.zero0", "dp2.zero2.offload", "dp2.zero3", "tp2.zero3", "ulysses2.zero1", "ulysses2.zero3.ckpt"]
    held = []
    for layout in (*layouts, *layouts):
        in_ranks(pool, tmp_path, "train", layout, world="cells")
        held.append(run_task(pool, tmp_path, "deepspeed_tasks:holdings", 2, world="cells"))
    assert held[len(layouts) - 1 :] == [held[-1]] * (len(layouts) + 1)
    assert all(of_rank["models"] == of_rank["parameters"] == 0 for of_rank in held[-1])


@pytest.mark.parametrize("layout", ["dp2.zero0", "dp2.zero2", "dp2.zero3", "tp2.zero3", "sp2.zero1", "ulysses2.zero3"])
def test_the_first_of_two_contexts_leaves_the_other_intact(pool: Pool, tmp_path: Path, layout: str) -> None:
    ulysses = "ulysses" in layout
    for result in in_ranks(pool, tmp_path, "one_beside_another", layout):
        assert result == {"equal": True, "replaced": [ulysses, False]}


def test_what_one_process_cannot_hold_at_a_time_is_refused(pool: Pool, tmp_path: Path) -> None:
    for said in in_ranks(pool, tmp_path, "refusals", "ulysses2.zero1"):
        assert "use the same tp and ulysses" in said[0]
        assert "use models with the same heads" in said[1]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("llama", f"{cut}.zero{stage}") for cut in ("dp2", "tp2", "sp2", "ulysses2") for stage in range(4)),
        ("llama", "dp2.zero3.ckpt.offload"),
        ("llama", "dp2.zero3.shardinit.ownopt"),
        ("llama", "tp2.ulysses2.zero2"),
        ("pangu", "tp2.zero3"),
        ("qwen3", "tp2.zero0"),
        ("gemma3", "sp2.zero3"),
        ("gemma3", "ulysses2.zero2"),
    ],
)
def test_an_actor_a_critic_and_a_frozen_reference_side_by_side_are_plain_models(
    pool: Pool, tmp_path: Path, family: str, layout: str
) -> None:
    results = run_task(
        pool,
        tmp_path,
        "fsdp2_tasks:errors_of_models",
        Layout.parse(layout).world_size,
        backend="deepspeed",
        layout=layout,
        models=trio(family, {family: value_folder(family, tmp_path / "critic")}),
        packed=True,
    )
    for result in results:
        assert max(error for model in result.values() for error in model.values()) < HONEST, result
        assert all(("norm" in result[model]) == ("zero0" not in layout) for model in ("policy", "critic"))


@pytest.mark.parametrize("family", ["pangu", "llama", "gemma3"])
def test_the_one_row_of_a_value_head_stays_whole(pool: Pool, tmp_path: Path, family: str) -> None:
    model = str(value_folder(family, tmp_path / "critic"))
    for cut in run_task(pool, tmp_path, "deepspeed_tasks:cut_by_tensor_parallelism", 2, layout="tp2", model=model):
        assert "score.weight" not in cut
        assert "model.layers.0.self_attn.q_proj.weight" in cut


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])  # of a laptop, and of servers without AVX512-FP16
def test_half_precision_needs_nothing_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: str, precision: Precision
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
    with Pool(work_dir=tmp_path / "pool") as pool:
        for layout in ("dp2.zero0", "dp2.zero2", "dp2.zero3"):
            results = in_ranks(pool, tmp_path, "half_precision", layout, precision=precision)
            dtype = {"fp16": "torch.float16", "bf16": "torch.bfloat16"}[precision]
            assert results == [{"onednn": False, "computed": dtype, "moved": True}] * 2


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
    fsdp2 = make_cell("sft-sgd", "qwen3", "tp2" if "tp2" in layout else "dp2", "fp32")
    digests = []
    for asked, name in ((fsdp2, "before"), (between, "between"), (fsdp2, "after")):
        outcome = train(pool, asked, tmp_path / name, world=f"before {layout}")
        assert outcome.state == "done", outcome.reason
        record = read_record(tmp_path / name / "record")
        digests.append([{k: t.numpy().tobytes() for k, t in step.tensors().items()} for step in record.steps])
    assert digests[0] == digests[2]


def train(pool: Pool, asked: Cell, folder: Path, *, world: str) -> Outcome:
    inputs = prepare_inputs(asked.scenario, folder.with_name("inputs"))
    return pool.run(
        key=world,
        config=WorldConfig(size=asked.world_size, device="cpu", preload=PRELOAD),
        task="conformance.run.task:run_leg",
        kwargs=leg_arguments(asked, 0, inputs, folder, None),
        log_dir=folder / "logs",
        budget_s=120.0,
    )
