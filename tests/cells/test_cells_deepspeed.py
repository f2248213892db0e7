"""DeepSpeed: every ZeRO stage computes what the oracle computes.

The sweep over all families, world sizes and scenarios is the full profile; here is one cell of each kind.
"""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from cells import BACKENDS, assert_honest, cell_of, exhaustive, needs, record_of, slow
from safetensors.torch import load_file, save_file

from conformance.core.host import FIXTURES, resolve
from conformance.matrix.cell import Cell
from conformance.models.folders import model_sizes
from conformance.runner.session import Session
from conformance.spec.layout import Layout
from conformance.spec.precision import PrecisionName

pytestmark = needs("deepspeed")


def larger_vocabulary(model: str, out: Path) -> Path:
    """A fixture with a token more than its tokenizer has."""
    source = FIXTURES / "models" / model
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    weights = load_file(source / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], weights[name][-1:] / 2])
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["tp2.zero2", "dp2.tp2.zero1", "tp2.zero3"])
def test_a_vocabulary_that_tensor_parallel_ranks_do_not_divide(session: Session, tmp_path: Path, layout: str) -> None:
    folder = larger_vocabulary("llama", tmp_path / "llama")
    scenario = replace(cell_of("deepspeed", "sft-packed", "llama", layout, "exact").scenario, model=str(folder))
    assert_honest(session, Cell.single(scenario=scenario, backend=BACKENDS["deepspeed"], layout=Layout.parse(layout)))


@pytest.mark.parametrize(
    ("scenario", "model", "layout"),
    [
        exhaustive("sft-packed", "pangu", "dp1.zero1"),
        exhaustive("sft-packed", "pangu", "dp2.zero0"),
        exhaustive("sft-padded", "llama", "dp2.zero1"),
        exhaustive("sft-sgd", "qwen3", "dp2.zero2"),
        exhaustive("sft-packed", "gemma3", "dp2.zero3"),
        exhaustive("sft-warmup", "llama", "dp2.zero0"),
        exhaustive("sft-warmup", "qwen3", "dp2.zero2"),
        exhaustive("sft-uneven", "pangu", "dp3.tp2"),  # pieces with padding that ranks of a tensor-parallel pair share
        exhaustive("sft-warmup", "pangu", "tp2.zero3"),
        exhaustive("sft-packed", "qwen3", "tp2.zero0"),
        exhaustive("sft-packed", "gemma3", "tp2.zero1"),
        exhaustive("sft-sgd", "llama", "dp2.tp2.zero3"),
        exhaustive("sft-packed", "qwen3", "dp2.zero2.ckpt.offload"),
        exhaustive("sft-packed", "gemma3", "dp2.zero3.ckpt.offload"),
        exhaustive("sft-packed", "gemma3", "dp2.zero2.compile"),
        exhaustive("sft-packed", "llama", "dp2.zero3.leaf"),
        ("sft-packed", "llama", "dp2.tp2.hpz2.leaf"),
        exhaustive("sft-warmup", "qwen3", "dp4.hpz2"),
        exhaustive("sft-lora", "pangu", "dp4.hpz2"),
        exhaustive("sft-packed", "gemma3", "dp2.sp2.hpz2.ckpt"),
        exhaustive("sft-packed", "pangu", "dp2.ulysses2.hpz2.zero3"),
        exhaustive("sft-packed", "llama", "dp4.hpz2.leaf.offload"),
        exhaustive("sft-packed", "pangu", "dp2.tp2.zero3.ckpt.leaf"),
        exhaustive("sft-packed", "qwen3", "dp2.zero3.compile.leaf"),
        exhaustive("sft-packed", "llama", "dp2.zero2.ckpt.compile"),
        exhaustive("sft-packed", "qwen3-moe", "dp2.zero3.leaf"),
        exhaustive("sft-packed", "llama", "dp2.zero1.ownopt"),
        ("sft-sgd", "llama", "dp2.zero3.ownopt"),
        exhaustive("sft-packed", "pangu", "sp2.zero0"),
        exhaustive("sft-padded", "llama", "dp2.sp2.zigzag.zero1"),
        exhaustive("sft-packed", "llama", "tp2.sp2.zero3"),
        exhaustive("sft-packed", "llama", "ulysses2.zero0"),
        exhaustive("sft-sgd", "qwen3", "dp2.ulysses2.zero2"),
        exhaustive("sft-packed", "gemma3", "ulysses2.zero3"),
        exhaustive("sft-packed", "pangu", "sp2.ulysses2.zero3.ckpt"),
        exhaustive("sft-sgd", "llama", "tp2.ulysses2.zero1"),
        exhaustive("sft-uneven", "pangu", "dp3.zero1"),
        exhaustive("sft-uneven", "qwen3", "dp3.zero3"),
        exhaustive("sft-frozen", "llama", "dp2.zero2"),
        ("sft-frozen", "llama", "dp2.zero3.leaf"),
        exhaustive("sft-lora", "pangu", "dp2.zero3.leaf"),
        exhaustive("sft-frozen", "qwen3", "tp2.zero3"),
        exhaustive("sft-cosine-end", "llama", "dp2.zero1"),
        exhaustive("sft-linear-end", "llama", "dp2.zero2"),
        exhaustive("sft-long", "pangu", "ulysses2.zero2"),
        exhaustive("sft-warmup", "llama", "ulysses2.zero1"),
    ],
)
def test_exact(session: Session, scenario: str, model: str, layout: str) -> None:
    asked = cell_of("deepspeed", scenario, model, layout, "exact")
    assert_honest(session, asked)
    assert_is_what_it_says(session, asked)


@pytest.mark.exhaustive
def test_layers_are_gathered_together_in_each_of_many_micro_batches(session: Session) -> None:
    """Before them, as many passes count the tokens of experts."""
    cell = cell_of("deepspeed", "sft-packed", "mixtral", "dp2.zero3.leaf", "exact", accumulation=7, rows=14)
    assert_honest(session, cell)


@pytest.mark.exhaustive
def test_exact_over_five_steps(session: Session) -> None:
    assert_honest(session, cell_of("deepspeed", "sft-packed", "qwen3", "dp2.zero1", "exact", steps=5))


def assert_is_what_it_says(session: Session, asked: Cell) -> None:
    """A layout changes no number, so what really runs has to be asked of the engine."""
    resolved, layout = record_of(session, asked).header["resolved"], asked.phases[0].layout
    stage = 3 if layout.zero is None else layout.zero
    options = layout.options
    assert resolved["zero_stage"] == stage
    wrapper = {0: "", 1: "DeepSpeedZeroOptimizer", 2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}
    assert wrapper[stage] in resolved["code"]["optimizer"]
    assert (resolved["deepspeed"].get("optimizer") is not None) == ("ownopt" in options)
    assert resolved["offloads_optimizer"] == ("offload" in options)
    assert resolved["offloads_parameters"] == ("offload" in options and stage == 3)
    assert resolved["checkpointing"] == ("ckpt" in options)
    if "leaf" in options:  # the blocks of some mixtures are leaf modules by default
        assert resolved["leaf_modules"] >= model_sizes(resolve(asked.scenario.model))["layers"]
    assert resolved["mesh"] == {axis: getattr(layout, axis) for axis in ("dp", "sp", "ulysses", "tp")}
    if layout.tp > 1:
        assert resolved["cut_by_tensor_parallelism"] >= 14  # seven matrices in each of two layers


# Every two of stage, scenario, clipping and optimizer meet in one of these eight; the nightly run has all, and a fast
# run each of them.
PAIRWISE = {
    (0, "sft-padded", None, "adamw"),
    (0, "sft-packed", 0.5, "sgd"),
    (1, "sft-padded", 0.5, "sgd"),
    (1, "sft-packed", None, "adamw"),
    (2, "sft-padded", None, "sgd"),
    (2, "sft-packed", 0.5, "adamw"),
    (3, "sft-padded", 0.5, "adamw"),
    (3, "sft-packed", None, "sgd"),
}
QUICK = {
    (0, "sft-packed", 0.5, "sgd"),
    (1, "sft-packed", None, "adamw"),
    (2, "sft-padded", None, "sgd"),
    (3, "sft-padded", 0.5, "adamw"),
}
PRODUCT = list(product((0, 1, 2, 3), ("sft-padded", "sft-packed"), (None, 0.5), ("adamw", "sgd")))


def test_every_two_of_stage_scenario_clipping_and_optimizer_meet() -> None:
    def meetings(rows: object) -> set[tuple[int, object, int, object]]:
        return {(i, row[i], j, row[j]) for row in rows for i in range(4) for j in range(i)}  # type: ignore[attr-defined]

    assert meetings(PAIRWISE) == meetings(PRODUCT)


@pytest.mark.parametrize(
    ("stage", "scenario", "clip", "optimizer"),
    [one if one in QUICK else slow(*one) if one in PAIRWISE else exhaustive(*one) for one in PRODUCT],
)
def test_every_stage_with_and_without_accumulation_and_clipping(
    session: Session, stage: int, scenario: str, clip: float | None, optimizer: str
) -> None:
    # A rate at which an update is well above the rounding of the weight, whatever instructions the CPU has.
    rate = {"sgd": 0.05, "adamw": 1e-3}[optimizer]
    options = {"name": optimizer, "lr": rate, "max_grad_norm": clip, **({"eps": 1e-3} if optimizer == "adamw" else {})}
    name = f"{scenario}-{optimizer}-{'unclipped' if clip is None else 'clipped'}"
    layout = f"dp2.zero{stage}"
    assert_honest(session, cell_of("deepspeed", scenario, "llama", layout, "exact", name=name, optimizer=options))


HALF_LAYOUTS = ("dp2.zero0", "dp2.zero1", "dp2.zero2", "dp2.zero3", "tp2.zero0", "tp2.zero1", "ulysses2.zero2")
FAST = {("dp2.zero3", "bf16")}  # and .github/workflows/test.yml has ("dp2.zero1", "fp16")
LOWER: tuple[PrecisionName, ...] = ("bf16", "fp16", "fp32")


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        pytest.param(layout, precision, marks=() if (layout, precision) in FAST else pytest.mark.exhaustive)
        for layout in HALF_LAYOUTS
        for precision in LOWER
    ],
)
def test_lower_precisions_are_as_good_as_a_single_process(
    session: Session, layout: str, precision: PrecisionName
) -> None:
    asked = cell_of("deepspeed", "sft-packed", "qwen3", layout, precision, rows=12)
    verdict = session.run(asked).verdict
    half = precision in ("bf16", "fp16")
    assert verdict.state == ("expected_difference" if "zero0" in layout and half else "conforms"), verdict.reason
    resolved = record_of(session, asked).header["resolved"]
    compute = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]
    assert resolved["compute_dtype"] == compute
    accumulated = compute.removeprefix("torch.") if "zero0" in layout else "float32"
    assert resolved["code"]["gradients"].startswith(accumulated)


@pytest.mark.parametrize(
    ("layout", "accumulation", "state"),
    [
        exhaustive("dp4.zero0", 1, "expected_difference"),
        exhaustive("dp1.zero0", 3, "expected_difference"),
        ("tp2.zero0", 2, "conforms"),
        exhaustive("dp2.zero0", 1, "conforms"),
        exhaustive("sp2.zero0", 1, "conforms"),
        exhaustive("sp2.zero0", 2, "expected_difference"),
        exhaustive("ulysses2.zero0", 2, "expected_difference"),
    ],
)
def test_sums_in_half_precision_are_expected_where_they_can_be_told(
    session: Session, layout: str, accumulation: int, state: str
) -> None:
    """Of a sum of two, too many elements are numbers of bf16 by chance."""
    asked = cell_of("deepspeed", "sft-packed", "llama", layout, "bf16", accumulation=accumulation, steps=1)
    verdict = session.run(asked).verdict
    assert verdict.state == state, verdict.reason


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["dp2.zero0.shipped", "dp2.tp2.zero0.shipped", "dp2.zero3.shipped"])
def test_rounded_masters_are_an_expected_difference(session: Session, layout: str) -> None:
    verdict = session.run(cell_of("deepspeed", "sft-packed", "qwen3", layout, "bf16")).verdict
    assert verdict.state == "expected_difference", verdict.reason
    assert verdict.worst["weights"].observed < 2**-8  # one rounding to bf16 and nothing else


@pytest.mark.parametrize(
    "layout",
    ["ulysses2.zero3.shipped", exhaustive("ulysses2.shipped"), exhaustive("dp2.ulysses2.zero3.ckpt.shipped")],
)
def test_gradients_of_ulysses_at_zero_3_are_an_expected_difference(session: Session, layout: str) -> None:
    verdict = session.run(cell_of("deepspeed", "sft-sgd", "llama", layout, "exact")).verdict
    assert verdict.state == "expected_difference", verdict.reason


@pytest.mark.parametrize("layout", [exhaustive("ulysses2.zero2.shipped"), exhaustive("tp2.ulysses2.zero3.shipped")])
def test_elsewhere_ulysses_is_right_as_shipped(session: Session, layout: str) -> None:
    verdict = session.run(cell_of("deepspeed", "sft-sgd", "llama", layout, "exact")).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.parametrize(
    ("layout", "precision", "advice"),
    [
        ("ulysses2.zero1", "bf16", "use zero0, zero2 or zero3"),
        ("pp2", "exact", "use pp1"),
        ("dp2.rep2", "exact", "use rep1, or zero0"),
        ("dp2.lastsync", "exact", "leave it out"),
        ("dp2.zero0.offload", "exact", "use zero1, zero2 or zero3"),
        ("dp2.zero2.leaf", "exact", "use zero3"),
        ("dp2.zero0.buckets", "exact", "use zero2 or zero3"),
        ("dp2.zero1.buckets", "bf16", "use zero2 or zero3"),
        ("dp2.zero2.pertoken", "exact", "leave it out"),
        ("dp2.zero0.ownopt", "fp16", "use zero1, zero2 or zero3"),
    ],
)
def test_what_is_not_claimed_says_what_would_work(
    session: Session, layout: str, precision: PrecisionName, advice: str
) -> None:
    verdict = session.run(cell_of("deepspeed", "sft-packed", "llama", layout, precision)).verdict
    assert verdict.state == "unsupported"
    assert advice in verdict.reason


def test_frozen_parameters_are_refused_where_they_would_be_rounded(session: Session) -> None:
    verdict = session.run(cell_of("deepspeed", "sft-frozen", "llama", "dp2.zero1", "bf16")).verdict
    assert verdict.state == "unsupported"
    assert "has no float32 master" in verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_own_muon(session: Session, stage: int) -> None:
    """The backend clips before DeepSpeed's Muon at ZeRO 1 to 3. An epsilon is added to the norm of the momentum."""
    verdict = assert_honest(session, cell_of("deepspeed", "sft-muon", "llama", f"dp2.zero{stage}.ownopt", "exact"))
    assert [str(one) for one in verdict.conventions] == ["MuonEpsilon"]


@pytest.mark.parametrize(
    "layout", [exhaustive("tp2.zero0.ownopt"), "dp2.tp2.zero1.ownopt", exhaustive("dp2.tp2.zero3.ownopt")]
)
def test_own_muon_of_shares_is_an_expected_difference(session: Session, layout: str) -> None:
    verdict = session.run(cell_of("deepspeed", "sft-muon", "llama", layout, "exact")).verdict
    assert verdict.state == "expected_difference", verdict.reason
    assert "docs/findings/deepspeed-muon-autotp.md" in verdict.reason


def test_a_resume_from_a_layout_that_is_expected_to_differ_is_refused(session: Session) -> None:
    """The reference has a known defect in all steps, or in none."""
    cell = cell_of("deepspeed", "sft-muon", "llama", "dp2.tp2.zero1.ownopt", "exact", steps=4)
    (whole,) = cell.phases
    phases = (
        replace(whole, steps=2, save="state"),
        replace(whole, steps=2, layout=Layout.parse("dp2.zero1.ownopt")),
    )
    verdict = session.run(replace(cell, phases=phases, program="state")).verdict
    assert verdict.state == "unsupported"
    assert "deepspeed-muon-autotp.md), which is not modelled where layouts change" in verdict.reason


@pytest.mark.parametrize(
    ("layout", "precision", "advice"),
    [
        ("dp2.zero2.offload.ownopt", "exact", "clips by the norm of the orthogonalized updates"),
        ("dp2.zero1", "exact", "add the layout option ownopt"),
        ("dp2.zero2.ownopt", "bf16", "adds gradients up in it, or loses some"),
    ],
)
def test_muon_is_refused_with_the_reason(session: Session, layout: str, precision: PrecisionName, advice: str) -> None:
    verdict = session.run(cell_of("deepspeed", "sft-muon", "llama", layout, precision)).verdict
    assert verdict.state == "unsupported"
    assert advice in verdict.reason
