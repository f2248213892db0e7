"""Megatron: every way of cutting a model computes what the oracle computes.

The sweep over all families, world sizes and scenarios is the full profile; here is one cell of each kind.
"""

import re
import runpy
import shutil
from itertools import product
from pathlib import Path

import pytest
from cells import BACKENDS, STEPS, assert_honest, cell_of, exhaustive, needs, record_of, slow

from conformance.core.host import FIXTURES
from conformance.matrix.cell import Cell
from conformance.runner.session import Session
from conformance.spec.layout import Layout
from conformance.spec.precision import PrecisionName
from conformance.spec.scenario import load_scenario

pytestmark = needs("megatron-core")


@pytest.mark.parametrize(
    ("scenario", "model", "layout"),
    [
        exhaustive("sft-packed", "pangu", "dp1"),
        exhaustive("sft-packed", "pangu", "dp2.zero1"),
        exhaustive("sft-padded", "llama", "tp2"),
        exhaustive("sft-sgd", "qwen3", "tp2.seqpar"),
        exhaustive("sft-packed", "pangu", "tp2.seqpar.ckpt"),
        exhaustive("sft-packed", "qwen3", "tp4"),
        exhaustive("sft-sgd", "llama", "pp2"),
        exhaustive("sft-padded", "qwen3", "pp2"),
        exhaustive("sft-packed", "pangu", "pp4.zero1"),
        exhaustive("sft-packed", "qwen3", "pp2.vpp2"),
        ("sft-packed", "llama", "pp2.vpp2.zero1.overlap"),
        exhaustive("sft-packed", "qwen3", "dp2.zero1.overlap"),
        ("sft-packed", "llama", "dp2.zero3.mfsdp"),
        exhaustive("sft-packed", "pangu", "dp2.zero2.mfsdp"),
        exhaustive("sft-warmup", "llama", "dp2.zero1.mfsdp"),
        exhaustive("sft-packed", "qwen3", "dp2.tp2.zero3.mfsdp.ckpt"),
        exhaustive("sft-packed", "qwen3-moe", "dp2.zero3.mfsdp"),
        exhaustive("sft-packed", "llama", "sp2"),
        exhaustive("sft-padded", "pangu", "sp2.zigzag"),
        exhaustive("sft-padded", "llama", "sp2.torchcp"),
        exhaustive("sft-packed", "pangu", "sp2.tp2.seqpar"),
        exhaustive("sft-packed", "qwen3", "sp2.pp2"),
        exhaustive("sft-padded", "llama", "sp2.pp2.zigzag"),
        exhaustive("sft-packed", "pangu", "sp2.pp2.ring"),
        exhaustive("sft-packed", "pangu", "tp2.pp2.zero1"),
        exhaustive("sft-packed", "qwen3", "dp2.pp2.zero1"),
        exhaustive("sft-uneven", "pangu", "dp3.zero1"),
        ("sft-uneven", "qwen3", "pp3"),
        ("sft-frozen", "qwen3", "pp2.ckpt"),
        exhaustive("sft-cosine-end", "llama", "dp2"),
        exhaustive("sft-linear-end", "llama", "dp2"),
        exhaustive("sft-long", "pangu", "pp2"),
        exhaustive("sft-warmup", "qwen3", "dp2.zero1"),
        exhaustive("sft-warmup", "pangu", "tp2.seqpar"),
        exhaustive("sft-warmup", "llama", "pp2.vpp2"),
    ],
)
def test_exact(session: Session, scenario: str, model: str, layout: str) -> None:
    asked = cell_of("megatron", scenario, model, layout, "exact")
    verdict = assert_honest(session, asked)
    assert "gradient norm" in verdict.worst
    assert_is_what_it_says(session, asked)


@pytest.mark.exhaustive
def test_exact_over_five_steps(session: Session) -> None:
    assert_honest(session, cell_of("megatron", "sft-packed", "qwen3", "dp2.zero1", "exact", steps=5))


def assert_is_what_it_says(session: Session, asked: Cell) -> None:
    """A layout changes no number, so what really runs has to be asked of the library's objects."""
    resolved, layout = record_of(session, asked).header["resolved"], asked.phases[0].layout
    options, distributed = layout.options, bool(layout.zero)
    if "mfsdp" in options:
        assert resolved["wrapper"] == "FullyShardedDataParallel"
        return
    assert resolved["code"]["optimizer"] == ("DistributedOptimizer" if distributed else "FP32Optimizer")
    assert resolved["overlaps_reduction"] == ("overlap" in options)
    assert resolved["overlaps_gathering"] == ("overlap" in options and distributed)
    if layout.pp == 1:  # a stage may hold a single parameter, and a tied one has a bucket of its own
        assert (resolved["buckets"] > 1) == ("overlap" in options)
    assert resolved["sequence_parallel"] == ("seqpar" in options)
    assert resolved["recompute"] == ("full" if "ckpt" in options else None)
    schedules = {(False, False): "no_pipelining", (True, False): "pipelining_without_interleaving"}
    schedule = schedules.get((layout.pp > 1, layout.vpp > 1), "pipelining_with_interleaving")
    assert resolved["schedule"] == f"forward_backward_{schedule}"
    assert len(resolved["layers"]) == layout.pp * layout.vpp
    assert resolved["mesh"] == {axis: getattr(layout, axis) for axis in ("pp", "vpp", "dp", "sp", "ep", "tp")}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *((model, "dp2.tp2.pp2.vpp2.seqpar.zero1") for model in ("pangu", "llama", "qwen3")),
        *((model, "dp2.tp2.pp2") for model in ("pangu", "llama", "qwen3")),
    ],
)
def test_eight_ranks(session: Session, model: str, layout: str) -> None:
    assert_honest(session, cell_of("megatron", "sft-packed", model, layout, "exact"))


@pytest.mark.parametrize(
    ("model", "layers", "layout", "accumulation"),
    [
        exhaustive("llama", 8, "pp4.vpp2", 8),
        exhaustive("llama", 8, "pp2.vpp4.zero1", 6),
        exhaustive("qwen3", 7, "pp2.vpp3", 4),
        exhaustive("pangu", 5, "tp2.pp2.vpp3.seqpar", 3),
    ],
)
def test_deeper_models_than_the_fixtures(
    session: Session, tmp_path: Path, model: str, layers: int, layout: str, accumulation: int
) -> None:
    make = runpy.run_path(str(FIXTURES / "make.py"))
    folder = tmp_path / f"{model}-of-{layers}"
    make["write_config"](folder, make["TINY"][model] | {"num_hidden_layers": layers})
    for code in (FIXTURES / "models" / model).glob("*.py"):
        shutil.copyfile(code, folder / code.name)
    make["write_weights"](folder)
    make["make_tokenizer"]().save_pretrained(folder)
    scenario = load_scenario(
        FIXTURES / "scenarios" / "sft-packed.toml",
        model=str(folder),
        precision="exact",
        accumulation=accumulation,
        steps=STEPS,
    )
    layouts = Layout.parse(layout)
    assert_honest(session, Cell.single(scenario=scenario, backend=BACKENDS["megatron"], layout=layouts))


PAIRWISE = {  # every two of scenario, clipping and optimizer meet
    ("sft-padded", None, "adamw"),
    ("sft-padded", 0.5, "sgd"),
    ("sft-packed", None, "sgd"),
    ("sft-packed", 0.5, "adamw"),
}
QUICK = {("sft-padded", None, "sgd"), ("sft-packed", 0.5, "adamw")}  # each value once


@pytest.mark.parametrize(
    ("scenario", "clip", "optimizer"),
    [
        one if one in QUICK else slow(*one) if one in PAIRWISE else exhaustive(*one)
        for one in product(("sft-padded", "sft-packed"), (None, 0.5), ("adamw", "sgd"))
    ],
)
def test_with_and_without_accumulation_and_clipping(
    session: Session, scenario: str, clip: float | None, optimizer: str
) -> None:
    options = {"name": optimizer, "lr": 1e-3, "max_grad_norm": clip, **({"eps": 1e-3} if optimizer == "adamw" else {})}
    name = f"{scenario}-{optimizer}-{'unclipped' if clip is None else 'clipped'}"
    assert_honest(session, cell_of("megatron", scenario, "llama", "pp2", "exact", name=name, optimizer=options))


LOWER: tuple[PrecisionName, ...] = ("fp32", "bf16", "fp16")
FAST = {("dp2.zero1", "bf16")}


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        pytest.param(layout, precision, marks=() if (layout, precision) in FAST else pytest.mark.exhaustive)
        for layout in ("dp2", "dp2.zero1", "tp2.seqpar", "pp2.vpp2", "sp2", "tp2.zero1")
        for precision in LOWER
    ],
)
def test_lower_precisions_are_as_good_as_a_single_process(
    session: Session, layout: str, precision: PrecisionName
) -> None:
    verdict = session.run(cell_of("megatron", "sft-packed", "qwen3", layout, precision, rows=12)).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.parametrize("layout", [exhaustive("dp2.shipped"), exhaustive("dp2.zero1.shipped")])
def test_rounded_masters_are_an_expected_difference(session: Session, layout: str) -> None:
    verdict = session.run(cell_of("megatron", "sft-packed", "qwen3", layout, "bf16")).verdict
    assert verdict.state == "expected_difference", verdict.reason


@pytest.mark.parametrize(("layout", "precision"), [("dp1.shipped", "exact"), exhaustive("tp2.shipped", "fp32")])
def test_padding_in_the_softmax_is_an_expected_difference(
    session: Session, layout: str, precision: PrecisionName
) -> None:
    verdict = session.run(cell_of("megatron", "sft-padded", "llama", layout, precision)).verdict
    assert verdict.state == "expected_difference", verdict.reason
    assert verdict.first_stage == "log-probs"


@pytest.mark.parametrize(
    ("scenario", "model", "layout", "advice"),
    [
        (
            "sft-packed",
            "gemma3",
            "dp2",
            "Gemma3ForCausalLM needs what megatron-core does not have: .*; use fsdp2 or deepspeed",
        ),
        ("sft-packed", "llama", "dp2.rep2", "use rep1, or zero0"),
        ("sft-packed", "llama", "ulysses2", "Ulysses needs DeepSpeed; use sp"),
        ("sft-packed", "llama", "dp2.zero3", "use zero1, or zero0.*or add mfsdp"),
        ("sft-sgd", "llama", "dp2.zero1", "use zero0, or an AdamW scenario"),
        ("sft-packed", "llama", "dp2.offload", "offload is not built into this backend; leave it out"),
        ("sft-packed", "llama", "dp2.overlap.buckets", "use overlap, which has several"),
        ("sft-packed", "llama", "dp2.manual", "use manual with overlap"),
        ("sft-packed", "llama", "dp2.ownaux", "leave ownaux out"),
        ("mtp", "deepseek-v3-mtp", "dp2.dropout", "the objective mtp runs models without dropout"),
        ("sft-packed", "llama", "dp2.mfsdp", "add zero1, zero2 or zero3"),
        ("sft-packed", "llama", "tp2.zero3.mfsdp", "issues/6660.*use dp2"),
        ("sft-packed", "llama", "dp2.zero1.mfsdp.overlap", "adds reduced gradients to the rank's own"),
        ("sft-packed", "llama", "dp2.pp2.zero3.mfsdp", "beside pp and ep is not built in"),
        ("sft-lora", "llama", "dp2.zero3.mfsdp", "cannot hook a frozen parameter"),
        ("sft-packed", "llama", "dp2.te.dropout", "not built in for te; leave te or dropout out"),
        ("sft-packed", "llama", "pp8", "pp4 would work"),
        ("sft-padded", "llama", "pp2.vpp2", "pp2 would work"),
    ],
)
def test_what_is_not_claimed_says_what_would_work(
    session: Session, scenario: str, model: str, layout: str, advice: str
) -> None:
    verdict = session.run(cell_of("megatron", scenario, model, layout, "exact")).verdict
    assert verdict.state == "unsupported"
    assert re.search(advice, verdict.reason)


@pytest.mark.parametrize(
    ("scenario", "precision", "changes", "advice"),
    [
        ("sft-frozen", "bf16", {}, "a frozen parameter has no float32 master"),
        ("sft-cosine-end", "exact", {"steps": 5}, "after the end of a cosine schedule .*; use at least total_steps=4"),
    ],
)
def test_scenarios_that_megatron_computes_in_another_way_are_refused(
    session: Session, scenario: str, precision: PrecisionName, changes: dict[str, int], advice: str
) -> None:
    verdict = session.run(cell_of("megatron", scenario, "llama", "dp2", precision, **changes)).verdict
    assert verdict.state == "unsupported"
    assert re.search(advice, verdict.reason)
