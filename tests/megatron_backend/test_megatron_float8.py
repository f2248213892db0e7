"""Float8 of TransformerEngine in Megatron: who claims it, what Megatron is told, and cells.

TransformerEngine needs a GPU, so cells run on GPU machines only, at the end of this file.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cells import BACKENDS, cell_of

from conformance.backends.faults import Resumes, catalogue
from conformance.backends.protocol import Unsupported
from conformance.core.host import FIXTURES
from conformance.core.packages import is_installed
from conformance.matrix.cell import Cell
from conformance.models.synthetic import with_skeleton
from conformance.runner.placement import SessionConfig
from conformance.runner.preflight import Refusals
from conformance.runner.session import Session
from conformance.runtime import gpu_inventory
from conformance.runtime.gpu_inventory import Gpu, gpus_of_host, shares_of
from conformance.spec.layout import Layout
from conformance.spec.precision import PRECISIONS, PrecisionName
from conformance.spec.scenario import load_scenario
from conformance.worker.transformer_engine import HISTORIES
from impl.faults.declaration import with_program, with_resume
from impl.faults.transformer_engine import TE_FAULTS
from impl.megatron import refusals
from impl.megatron.model_config import read_shape, stages
from impl.megatron.refusals import RECIPES, float8_refused

GPUS = torch.cuda.device_count()
NAMES = [fault.name for fault in TE_FAULTS]


def cell(
    layout: str,
    precision: PrecisionName = "fp32",
    *faults: str,
    scenario: str = "sft-packed",
    model: str = "llama-even",
    steps: int = 2,
) -> Cell:
    file = FIXTURES / "scenarios" / f"{scenario}.toml"
    found = load_scenario(file, model=with_skeleton(f"models/{model}"), precision=precision)
    return Cell.single(
        scenario=replace(found, steps=steps), backend=BACKENDS["megatron"], layout=Layout.parse(layout), faults=faults
    )


@pytest.mark.parametrize(
    ("scenario", "layout", "precision", "changes", "advice"),
    [
        ("sft-packed", "dp2.fp8tensor", "fp32", {}, "use te with fp8tensor, fp8delayed, fp8block, or fsdp2"),
        ("sft-packed", "dp2.te.fp8row", "fp32", {}, "use te with fp8tensor, fp8delayed, fp8block, or fsdp2"),
        (
            "dpo",
            "dp2.te.fp8tensor",
            "bf16",
            {},
            "for sft, grpo, ppo, and not for dpo; use one of these, or leave",
        ),
        *((name, "dp2.te.fp8delayed", "fp32", {}, "") for name in ("grpo", "ppo", "sft-lora", "grpo-lora")),
        ("sft-packed", "pp2.vpp2.te.fp8delayed", "fp32", {}, ""),
        ("grpo", "pp2.vpp2.te.fp8tensor", "fp32", {}, ""),
        (
            "grpo",
            "pp2.vpp2.te.fp8delayed",
            "fp32",
            {},
            "which then end a rollout apart .*; use vpp1, or fp8tensor",
        ),
        ("sft-packed", "sp2.te.fp8block", "fp32", {}, "only dp, tp, pp, vpp, zero are built .*; leave other axes out"),
        ("sft-packed", "dp2.te.fp8tensor", "fp16", {}, "use bf16"),
        ("sft-packed", "pp2.te.fp8block", "fp32", {}, ""),
        ("sft-packed", "pp2.te.fp8block.fp8ends", "fp32", {}, "the model has no other; leave it out"),
        (
            "sft-packed",
            "dp2.tp2.te.fp8block",
            "fp32",
            {},
            "16, also on each of 2 ranks, .* has intermediate_size=336; use",
        ),
        ("sft-packed", "dp2.tp2.te.fp8block", "fp32", {"ffn": 352}, ""),
        ("sft-packed", "tp2.te.fp8block.seqpar", "fp32", {"ffn": 352}, "blocks of 128 x 128 .* hidden_size=192; use"),
        ("sft-packed", "tp2.te.fp8block.seqpar", "fp32", {"ffn": 352, "hidden": 256}, ""),
        ("sft-packed", "tp2.te.fp8delayed.seqpar", "fp32", {"ffn": 352}, ""),
        ("sft-packed", "dp2.te.fp8tensor.ckpt", "fp32", {}, ""),
        (
            "sft-packed",
            "tp2.te.fp8tensor.losspar",
            "fp32",
            {"ffn": 352},
            "losspar is not built into .* beside fp8tensor",
        ),
        ("sft-packed", "dp2.te.fp8block", "fp32", {"ffn": 56}, "multiples of 16, .* has intermediate_size=56; use"),
        ("sft-packed", "dp2.te.fp8block", "fp32", {"fused": True}, "keeps apart only; leave it out"),
        ("sft-packed", "dp2.te.fp8block", "fp32", {"qkv_bias": True}, "biases in float32 to bfloat16; use bf16"),
        ("sft-packed", "dp2.te.fp8block", "bf16", {"qkv_bias": True}, ""),
        ("sft-packed", "dp2.te.fp8tensor.fp8ends", "fp32", {}, "the model has no other; leave it out"),
        ("sft-packed", "dp2.te.fp8delayed.fp8ends", "fp32", {}, "leave fp8ends out, or use fp8tensor"),
        ("sft-packed", "dp2.zero1.te.fp8tensor.overlap", "fp32", {}, ""),
        ("sft-packed", "dp2.te", "fp32", {"ffn": 56}, ""),
    ],
)
def test_refusals_name_the_way_out(
    scenario: str, layout: str, precision: PrecisionName, changes: dict[str, Any], advice: str
) -> None:
    shape = replace(read_shape(FIXTURES / "models" / "llama-even"), **changes)
    asked = cell(layout, precision, scenario=scenario)
    found = float8_refused(asked.scenario, asked.phases[0].layout, shape)
    assert re.search(advice, found) if advice else not found


@pytest.mark.parametrize(
    ("layout", "release", "capabilities", "visible", "advice"),
    [
        ("dp2.te.fp8block", "2.10.0", [(9, 0)], None, ""),
        ("dp2.te.fp8tensor", "2.10.0", [(8, 9)], None, ""),
        ("dp2.te.fp8tensor", "2.10.0", [(9, 0), (8, 0)], None, r"8\.9 or higher, and GPU1 has 8\.0; use te without"),
        ("dp2.te.fp8tensor", "2.10.0", [(9, 0), (8, 0)], "0", ""),
        ("dp2.te.fp8block", "2.10.0", [(8, 9)], None, r"9\.0 or higher, and GPU0 has 8\.9; use te without fp8block"),
        ("dp2.te.fp8block", "2.10.0", [None], None, ""),  # NVML does not say
        ("dp2.te", "2.10.0", [(8, 0)], None, ""),
        ("dp2.te.fp8block", "2.2.0", [(9, 0)], None, r"2\.2\.0 has no fp8block; run: pip install .*>=2\.3', or leave"),
        ("dp2.te.fp8tensor", "2.1.1+cu12", [(9, 0)], None, r"2\.1\.1\+cu12 has no fp8tensor; run: .*>=2\.2'"),
        ("dp2.te.fp8delayed", "2.1.1", [], None, ""),
    ],
)
def test_machines_without_float8_are_refused_before_a_process_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    release: str,
    capabilities: list[tuple[int, int] | None],
    visible: str | None,
    advice: str,
) -> None:
    (info := tmp_path / f"transformer_engine-{release}.dist-info").mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {release}\n")
    monkeypatch.syspath_prepend(tmp_path)
    gpus = [Gpu(uuid=f"GPU-{n}", name=f"GPU{n}", capability=one) for n, one in enumerate(capabilities)]
    monkeypatch.setattr(refusals, "installed_gpus", lambda: gpus)
    monkeypatch.setattr(gpu_inventory, "installed_gpus", lambda: gpus)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    asked = cell(layout)
    answer = BACKENDS["megatron"].load().supports(asked.scenario, asked.phases[0].layout)
    assert isinstance(answer, Unsupported) is bool(advice)
    assert re.search(advice, str(answer))


@pytest.mark.parametrize(
    ("layouts", "saves", "advice"),
    [
        ("dp2.te.fp8delayed", "checkpoint", ""),
        ("dp2.te.fp8tensor", "checkpoint", ""),
        ("dp2.te.fp8block", "state", ""),
        ("dp2.te", "state", ""),
        ("dp2.te.fp8delayed", "state", "no training state holds the histories .*; hand over a checkpoint, or use"),
        ("dp2.te.fp8delayed", "export", "no export holds the histories of fp8delayed"),
        (
            "dp2.te.fp8delayed-to-tp2.te.fp8delayed",
            "checkpoint",
            "one layout for all phases; use layouts with equal ranks",
        ),
        ("dp2.te.fp8delayed-to-dp2.te.fp8delayed.ckpt", "checkpoint", ""),
        ("dp2.te.fp8tensor-to-dp2.zero1.te.fp8tensor", "state", ""),
        ("tp2.te.fp8delayed-to-tp2.te.fp8delayed.seqpar", "checkpoint", "depends on the layout"),
        ("dp2.te-to-dp2.te.fp8tensor", "checkpoint", "depends on the layout, .*leave te and float8 out"),
        ("dp2.te.fp8tensor-to-dp2.te", "checkpoint", "depends on the layout"),
    ],
)
def test_resumes_in_float8(layouts: str, saves: Resumes, advice: str) -> None:
    first, _, second = layouts.partition("-to-")
    asked = cell(first, scenario="sft-warmup")
    before = replace(asked.phases[0], save=saves)
    after = replace(before, layout=Layout.parse(second or first), save=None)
    found = Refusals("cpu")._handover_refusal(asked, before, after)
    assert re.search(advice, found.reason) if advice and found else found is None and not advice


def test_megatron_is_told_the_recipe() -> None:
    from impl.megatron.gpt_model import transformer_config

    shape = replace(read_shape(FIXTURES / "models" / "llama-even"), layers=3)
    told = {}
    for layout in ("dp2.te", *(f"dp2.te.{name}" for name in RECIPES), "dp2.te.fp8block.fp8ends"):
        config = transformer_config(
            shape, Layout.parse(layout), PRECISIONS["fp32"], stages(layers=shape.layers, pp=1, vpp=1)
        )
        told[layout.removeprefix("dp2.")] = (config.fp8, config.fp8_recipe, config.first_last_layers_bf16)
        assert not config.fp8_param
        assert not config.fp8_dot_product_attention
    assert (config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16) == (1, 1)
    assert told == {
        "te": (None, "delayed", False),
        "te.fp8tensor": ("hybrid", "tensorwise", False),
        "te.fp8delayed": ("hybrid", "delayed", False),
        "te.fp8block": ("e4m3", "blockwise", False),
        "te.fp8block.fp8ends": ("e4m3", "blockwise", True),
    }
    delayed = transformer_config(
        shape, Layout.parse("dp2.te.fp8delayed"), PRECISIONS["fp32"], stages(layers=3, pp=1, vpp=1)
    )
    assert (delayed.fp8_margin, delayed.fp8_amax_history_len, delayed.fp8_amax_compute_algo) == (0, 4, "max")


def test_a_convention_is_in_force_with_a_recipe_only() -> None:
    (found,) = [one for one in BACKENDS["megatron"].load().conventions if type(one).__name__ == "Float8Products"]  # type: ignore[attr-defined]
    assert found.in_cell(cell("dp2").scenario, Layout.parse("dp2.te")) is None
    one = found.in_cell(cell("dp2").scenario, Layout.parse("dp2.te.fp8block"))
    assert (one.recipe, one.transformer_engine, one.multiple, one.data_ranks, one.micro_batches) == (
        "fp8block",
        True,
        16,
        2,
        3,
    )


def test_histories_end_with_their_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine holds those of all models of a process, with process groups that are gone."""
    from impl.megatron import context

    ended: list[str] = []
    manager = SimpleNamespace(reset=lambda: ended.append("histories"))
    monkeypatch.setitem(sys.modules, HISTORIES, SimpleNamespace(FP8GlobalStateManager=manager))
    monkeypatch.setattr(context.MODEL_PARALLEL, "leave", lambda: ended.append("groups"))
    one = object.__new__(context.MegatronContext)
    one.config, one.ring = SimpleNamespace(device="cpu", tier=PRECISIONS["fp32"]), None  # type: ignore[assignment]
    one.teardown()
    assert ended == ["groups", "histories"]


def test_every_fault_has_a_place() -> None:
    assert {Layout.parse(catalogue()[name].cells.layouts["megatron"]).float8 for name in NAMES} == {*RECIPES}
    refused = cell_of("megatron", "sft-packed", "llama", "dp2.te.fp8tensor", "fp32")
    answer = BACKENDS["megatron"].load().supports(refused.scenario, refused.phases[0].layout)
    assert "use another model" in str(answer)


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    per_gpu = 1 if GPUS > 1 else 2
    gpus = shares_of(gpus_of_host()[:2], per_gpu)
    config = SessionConfig(out=tmp_path_factory.mktemp("float8"), device="cuda", gpus=gpus, ranks_per_gpu=per_gpu)
    with Session(config) as session:
        yield session


needs_te = pytest.mark.skipif(
    not (GPUS and is_installed("transformer-engine")), reason="needs TransformerEngine and a GPU"
)


@pytest.mark.exhaustive
@needs_te
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("options", ["", ".ckpt"])
def test_recipes_conform(on_gpus: Session, recipe: str, options: str) -> None:
    verdict = on_gpus.run(cell(f"dp2.te.{recipe}{options}")).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.exhaustive
@needs_te
@pytest.mark.parametrize("recipe", ["fp8tensor", "fp8delayed"])
def test_parts_of_the_sequence_conform(on_gpus: Session, recipe: str) -> None:
    verdict = on_gpus.run(cell(f"tp2.te.{recipe}.seqpar", model="llama-even-deep")).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.exhaustive
@needs_te
@pytest.mark.parametrize("layout", [*(f"dp2.te.{recipe}" for recipe in RECIPES), "dp2.te.fp8delayed.ckpt"])
def test_resumes_conform(on_gpus: Session, layout: str) -> None:
    resumed = with_resume(cell(layout, scenario="sft-warmup", steps=4), "checkpoint")
    verdict = on_gpus.run(resumed).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.exhaustive
@needs_te
@pytest.mark.parametrize("name", NAMES)
def test_fault_is_caught_at_the_predicted_stage(on_gpus: Session, name: str, tmp_path: Path) -> None:
    fault = catalogue()[name]
    of, steps = fault.cells, 4 if fault.cells.saves else 2
    planted = cell(of.layouts["megatron"], "fp32", name, scenario=of.scenario, model=of.model, steps=steps)
    verdict = on_gpus.run(with_program(planted, fault, tmp_path)).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", fault.stage), verdict.reason
