"""Megatron: every way of cutting a model computes what the oracle computes, and leaves the process as it was.

The sweep over all families, world sizes and scenarios is the full profile; here is one cell of each kind.
"""

import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_cell
from safetensors.torch import load_file

from conformance.backend import BackendEntry
from conformance.plan.cell import Cell
from conformance.judge.verdict import Verdict
from conformance.layout import Layout
from conformance.paths import FIXTURES
from conformance.record.tensors import read_record
from conformance.run.oracles import prepare_inputs
from conformance.scenario import Precision, load_scenario, scenario_to_json
from conformance.run.session import Session, task_arguments
from conformance.world import Outcome, Pool, WorldConfig

pytest.importorskip("megatron.core")

HONEST = 1e-12  # what the exact tier shows when nothing is wrong; the bound is ten times that
MEGATRON = BackendEntry(name="megatron", target="impl.megatron.adapter:MegatronBackend")
PRELOAD = ("impl.megatron.adapter", "impl.megatron.strategy", "impl.fsdp2.strategy")


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


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Worlds that both backends share, which a session never lets them."""
    with Pool(work_dir=tmp_path_factory.mktemp("pool")) as pool:
        yield pool


def in_ranks(
    pool: Pool,
    folder: Path,
    task: str,
    layout: str,
    *,
    model: str = "qwen3",
    precision: Precision = "exact",
    **more: Any,
) -> list[Any]:
    asked = cell("sft-packed", model, layout, precision)
    inputs = prepare_inputs(asked.scenario, folder)
    outcome = pool.run(
        key="shared",
        config=WorldConfig(size=asked.layout.world_size, device="cpu", preload=PRELOAD),
        task=f"megatron_tasks:{task}",
        kwargs={
            "scenario": scenario_to_json(asked.scenario),
            "layout": layout,
            "weights": str(inputs.model),
            "batches": str(inputs.batches),
            **more,
        },
        log_dir=folder / "logs",
        budget_s=240.0,
    )
    assert outcome.state == "done", outcome.reason
    return outcome.results


def test_many_layouts_in_one_process_leave_nothing(pool: Pool, tmp_path: Path) -> None:
    layouts = ["tp2.seqpar", "pp2.vpp2", "sp2", "dp2.zero1"]
    for held in in_ranks(pool, tmp_path, "train_in_turn", "dp2", precision="fp32", layouts=layouts * 3):
        first, last = held[len(layouts) - 1], held[-1]
        assert last["groups"] == 1  # the default group
        # Threads and sockets of a destroyed group end a little later.
        assert last["fds"] <= first["fds"] + 4
        assert last["threads"] <= first["threads"] + 4
        for after in held:
            assert (after["environment"], after["cuda"], after["model_alive"]) == ([], "torch.cuda", False)


@pytest.mark.parametrize(
    ("model", "layout"),
    [("pangu", "dp1"), ("pangu", "tp2"), ("qwen3", "pp2.vpp2"), ("llama", "tp2.pp2.zero1"), ("qwen3", "tp4")],
)
def test_a_saved_model_is_the_one_that_was_loaded(pool: Pool, tmp_path: Path, model: str, layout: str) -> None:
    in_ranks(pool, tmp_path, "save", layout, model=model, precision="fp32", out=str(tmp_path / "saved"))
    (source,) = (tmp_path / "inputs").glob(f"{model}-*")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "saved"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.int32), after[name].view(torch.int32)) for name in before)
    assert (tmp_path / "saved" / "config.json").read_text() == (source / "config.json").read_text()


@pytest.mark.parametrize("layout", ["dp2", "dp2.zero1", "tp2.seqpar", "pp2.vpp2.zero1"])
def test_optimizer_state_has_canonical_names_and_is_whole(pool: Pool, tmp_path: Path, layout: str) -> None:
    for errors in in_ranks(pool, tmp_path, "optimizer_state", layout):
        assert max(errors.values()) < HONEST


@pytest.mark.parametrize(
    ("layout", "other"),
    [("tp2.seqpar", "pp2.vpp2"), ("pp2", "dp2.zero1"), ("dp2.zero1", "sp2"), ("dp2.zero1.overlap", "tp2.zero1")],
)
def test_training_goes_on_in_another_layout(pool: Pool, tmp_path: Path, layout: str, other: str) -> None:
    out = str(tmp_path / "checkpoint")
    assert max(in_ranks(pool, tmp_path, "go_on_elsewhere", layout, other=other, out=out)) < HONEST


@pytest.mark.parametrize(("model", "layout"), [("pangu", "tp2"), ("qwen3", "tp2.seqpar"), ("llama", "sp2")])
def test_a_value_model_gives_what_transformers_gives(pool: Pool, tmp_path: Path, model: str, layout: str) -> None:
    assert max(in_ranks(pool, tmp_path, "values", layout, model=model)) < HONEST


@pytest.mark.parametrize("layout", ["tp2.seqpar", "pp2.vpp2", "dp2.zero1"])
def test_fsdp2_gives_the_same_bits_before_and_after_megatron(pool: Pool, tmp_path: Path, layout: str) -> None:
    fsdp2 = make_cell("sft-packed", "qwen3", "tp2" if "tp2" in layout else "dp2", "fp32")
    between = cell("sft-packed", "qwen3", layout, "fp32")
    digests = []
    for asked, name in ((fsdp2, "before"), (between, "between"), (fsdp2, "after")):
        outcome = train(pool, asked, tmp_path, name)
        assert outcome.state == "done", outcome.reason
        record = read_record(tmp_path / name)
        digests.append([{k: t.numpy().tobytes() for k, t in step.tensors().items()} for step in record.steps])
    assert digests[0] == digests[2]


def train(pool: Pool, asked: Cell, folder: Path, name: str) -> Outcome:
    inputs = prepare_inputs(asked.scenario, folder / "inputs")
    return pool.run(
        key="shared",
        config=WorldConfig(size=asked.layout.world_size, device="cpu", preload=PRELOAD),
        task="conformance.plan.cell:run_cell",
        kwargs=task_arguments(asked, inputs, folder / name),
        log_dir=folder / f"{name}-logs",
        budget_s=120.0,
    )
