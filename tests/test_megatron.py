"""Megatron: every way of cutting a model computes what the oracle computes.

The sweep over all families, world sizes and scenarios is the full profile; here is one cell of each kind.
"""

import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import make_cell

from conformance.backend import BackendEntry
from conformance.judge.verdict import Verdict
from conformance.layout import Layout
from conformance.paths import FIXTURES
from conformance.plan.cell import Cell
from conformance.record.tensors import read_record
from conformance.run.session import Session
from conformance.scenario import Precision, load_scenario

pytest.importorskip("megatron.core")

HONEST = 1e-12  # what the exact tier shows when nothing is wrong; the bound is ten times that
MEGATRON = BackendEntry(name="megatron", target="impl.megatron.adapter:MegatronBackend")


def cell(scenario: str, model: str, layout: str, precision: Precision, *faults: str, **overrides: Any) -> Cell:
    return make_cell(scenario, model, layout, precision, faults=faults, backend=MEGATRON, **overrides)


def run(session: Session, cell: Cell) -> Verdict:
    return session.run(cell).verdict


@pytest.mark.parametrize(
    ("scenario", "model", "layout"),
    [
        ("sft-packed", "pangu", "dp1"),
        ("sft-packed", "pangu", "dp2.zero1"),
        ("sft-padded", "llama", "tp2"),
        ("sft-sgd", "qwen3", "tp2.seqpar"),
        ("sft-packed", "pangu", "tp2.seqpar.ckpt"),
        ("sft-packed", "qwen3", "tp4"),
        ("sft-sgd", "llama", "pp2"),
        ("sft-padded", "qwen3", "pp2"),
        ("sft-packed", "pangu", "pp4.zero1"),
        ("sft-packed", "qwen3", "pp2.vpp2"),
        ("sft-packed", "llama", "pp2.vpp2.zero1.overlap"),
        ("sft-packed", "qwen3", "dp2.zero1.overlap"),
        ("sft-packed", "llama", "sp2"),
        ("sft-padded", "pangu", "sp2.zigzag"),
        ("sft-padded", "llama", "sp2.torchcp"),
        ("sft-packed", "pangu", "sp2.tp2.seqpar"),
        ("sft-packed", "qwen3", "sp2.pp2"),
        ("sft-padded", "llama", "sp2.pp2.zigzag"),
        ("sft-packed", "pangu", "sp2.pp2.ring"),
        ("sft-packed", "pangu", "tp2.pp2.zero1"),
        ("sft-packed", "qwen3", "dp2.pp2.zero1"),
        ("sft-resume", "qwen3", "dp2.zero1"),
        ("sft-resume", "pangu", "tp2.seqpar"),
        ("sft-resume", "llama", "pp2.vpp2"),
    ],
)
def test_exact(session: Session, scenario: str, model: str, layout: str) -> None:
    asked = cell(scenario, model, layout, "exact")
    verdict = run(session, asked)
    assert verdict.state == "conforms", verdict.reason
    assert max(quantity["observed"] for quantity in verdict.quantities) < HONEST
    assert "gradient norm" in verdict.stages
    footer = (session.config.out / "cells" / asked.slug / "record" / "record.jsonl").read_text().splitlines()[-1]
    assert json.loads(footer)["leaks"] == []
    assert_is_what_it_says(session, asked)


def assert_is_what_it_says(session: Session, asked: Cell) -> None:
    """A layout changes no number, so what really runs has to be asked of the library's objects."""
    resolved = read_record(session.config.out / "cells" / asked.slug / "record").header["resolved"]
    layout, options = asked.layout, asked.layout.options
    distributed = layout.zero == 1
    assert resolved["optimizer_wrapper"] == ("DistributedOptimizer" if distributed else "FP32Optimizer")
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
    assert resolved["mesh"] == {axis: getattr(layout, axis) for axis in ("pp", "vpp", "dp", "sp", "tp")}


@pytest.mark.parametrize("model", ["pangu", "llama", "qwen3"])
@pytest.mark.parametrize("layout", ["dp2.tp2.pp2", "dp2.tp2.pp2.vpp2.seqpar.zero1"])
def test_eight_ranks(session: Session, model: str, layout: str) -> None:
    verdict = run(session, cell("sft-packed", model, layout, "exact", steps=2))
    assert verdict.state == "conforms", verdict.reason
    assert max(quantity["observed"] for quantity in verdict.quantities) < HONEST


@pytest.mark.parametrize(
    ("model", "layers", "layout", "accumulation"),
    [
        ("llama", 8, "pp4.vpp2", 8),
        ("llama", 8, "pp2.vpp4.zero1", 6),
        ("qwen3", 7, "pp2.vpp3", 4),
        ("pangu", 5, "tp2.pp2.vpp3.seqpar", 3),
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
    make["write_weights"](folder, norm_centre=1.0)
    make["make_tokenizer"]().save_pretrained(folder)
    scenario = load_scenario(
        FIXTURES / "scenarios" / "sft-packed.toml",
        model=str(folder),
        precision="exact",
        accumulation=accumulation,
        steps=2,
    )
    verdict = run(session, Cell(scenario=scenario, backend=MEGATRON, layout=Layout.parse(layout)))
    assert verdict.state == "conforms", verdict.reason
    assert max(quantity["observed"] for quantity in verdict.quantities) < HONEST


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("scenario", ["sft-padded", "sft-packed"])
def test_with_and_without_accumulation_and_clipping(
    session: Session, scenario: str, clip: float | None, optimizer: str
) -> None:
    options = {"name": optimizer, "lr": 1e-3, "max_grad_norm": clip, **({"eps": 1e-3} if optimizer == "adamw" else {})}
    name = f"{scenario}-{optimizer}-{'unclipped' if clip is None else 'clipped'}"
    verdict = run(session, cell(scenario, "llama", "pp2", "exact", name=name, optimizer=options))
    assert verdict.state == "conforms", verdict.reason
    assert max(quantity["observed"] for quantity in verdict.quantities) < HONEST


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", ["dp2", "dp2.zero1", "tp2.seqpar", "pp2.vpp2", "sp2", "tp2.zero1"])
def test_lower_precisions_are_as_good_as_a_single_process(session: Session, layout: str, precision: Precision) -> None:
    verdict = run(session, cell("sft-packed", "qwen3", layout, precision))
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.parametrize("layout", ["dp2.shipped", "dp2.zero1.shipped"])
def test_rounded_masters_are_an_expected_difference(session: Session, layout: str) -> None:
    verdict = run(session, cell("sft-packed", "llama", layout, "bf16"))
    assert verdict.state == "expected_difference", verdict.reason


@pytest.mark.parametrize(("layout", "precision"), [("dp1.shipped", "exact"), ("tp2.shipped", "fp32")])
def test_padding_in_the_softmax_is_an_expected_difference(session: Session, layout: str, precision: Precision) -> None:
    verdict = run(session, cell("sft-padded", "llama", layout, precision))
    assert verdict.state == "expected_difference", verdict.reason
    assert verdict.first_stage == "log-probs"


FAULTS = {
    "dropped-o-bias": ("sft-padded", "pangu", "dp2"),
    "leaking-documents": ("sft-packed", "llama", "tp2"),
    "local-token-mean": ("sft-padded", "pangu", "dp2.zero1"),
    "copied-micro-batch": ("sft-packed", "llama", "pp2"),
    "divided-by-world": ("sft-sgd", "llama", "tp2"),
    "ring-not-counted": ("sft-sgd", "llama", "sp2"),
    "unreduced-replicas": ("sft-sgd", "llama", "dp2"),
    "clip-never": ("sft-sgd", "llama", "dp2"),
    "schedule-per-micro-batch": ("sft-sgd", "llama", "dp2"),
    "rolled-labels": ("sft-packed", "llama", "sp2"),
    "merged-in-bf16": ("sft-packed", "llama", "sp2.ring"),
    "concatenated-qkv": ("sft-padded", "llama", "dp1"),
    "o-bias-per-rank": ("sft-padded", "pangu", "tp2"),
    "batched-p2p": ("sft-packed", "llama", "pp2.vpp2"),
    "stage-local-layers": ("sft-padded", "llama", "pp2"),
    "norms-not-summed": ("sft-sgd", "llama", "tp2.seqpar"),
    "broken-tie": ("sft-sgd", "qwen3", "pp2"),
    "duplicates-counted": ("sft-sgd", "llama", "tp2"),
}


def test_each_seam_has_a_fault_here() -> None:
    from conformance.faults import CATALOGUE

    assert {CATALOGUE[name].seam for name in FAULTS} == MEGATRON.load().seams.keys()  # type: ignore[attr-defined]


@pytest.mark.parametrize("precision", ["exact", "fp32"])
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught_at_the_predicted_stage(session: Session, name: str, precision: Precision) -> None:
    from conformance.faults import CATALOGUE

    verdict = run(session, cell(*FAULTS[name], precision, name))
    assert verdict.state == "differs", verdict.reason
    assert verdict.first_stage == CATALOGUE[name].stage, verdict.reason
    first_loss = next(q for q in verdict.quantities if (q["stage"], q["tensor"], q["step"]) == ("loss", "loss", 0))
    assert (first_loss["observed"] <= first_loss["allowed"]) == CATALOGUE[name].loss_blind
    if name in ("unreduced-replicas", "norms-not-summed", "broken-tie"):
        assert verdict.stages["replicas"]["ratio"] > 1


def test_norms_of_heads_have_to_be_summed_without_sequence_parallelism_too(session: Session) -> None:
    verdict = run(session, cell("sft-sgd", "qwen3", "tp2", "exact", "norms-not-summed"))
    assert verdict.first_stage == "gradients", verdict.reason
    wrong = {f.tensor.rpartition("self_attn.")[2] for f in verdict.findings if (f.stage, f.step) == ("gradients", 0)}
    assert wrong == {"q_norm.weight", "k_norm.weight"}


@pytest.mark.parametrize(
    ("scenario", "model", "layout", "advice"),
    [
        ("sft-packed", "gemma3", "dp2", "Gemma3ForCausalLM is not among the architectures .*; use fsdp2 or deepspeed"),
        ("sft-packed", "llama", "dp2.rep2", "use rep1, or zero0"),
        ("sft-packed", "llama", "ulysses2", "use sp, the ring, instead"),
        ("sft-packed", "llama", "dp2.zero3", "use zero1, or zero0"),
        ("sft-sgd", "llama", "dp2.zero1", "use zero0, or an AdamW scenario"),
        ("sft-packed", "llama", "dp2.offload", "offload is not built into this backend; leave it out"),
        ("sft-packed", "llama", "pp8", "pp4 would work"),
        ("sft-padded", "llama", "pp2.vpp2", "pp2 would work"),
    ],
)
def test_what_is_not_claimed_says_what_would_work(
    session: Session, scenario: str, model: str, layout: str, advice: str
) -> None:
    verdict = run(session, cell(scenario, model, layout, "exact"))
    assert verdict.state == "unsupported"
    assert re.search(advice, verdict.reason)
