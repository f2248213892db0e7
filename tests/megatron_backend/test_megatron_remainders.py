"""Megatron with masters of bf16 parameters and remainders, the layout option ``remainders``.

TransformerEngine keeps them and needs a GPU, so cells of them run on GPU machines only, at the end of this file.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cells import BACKENDS, cell_of

from conformance.backends.faults import catalogue
from conformance.backends.protocol import Unsupported
from conformance.backends.registry import adapter_of
from conformance.core.packages import is_installed
from conformance.judge import layout_evidence
from conformance.judge.step_evidence import Step
from conformance.judge.work_evidence import _away_from_zero, remainder_claim
from conformance.matrix.cell import Cell
from conformance.runner.placement import SessionConfig
from conformance.runner.session import Session
from conformance.runtime.gpu_inventory import gpus_of_host, shares_of
from conformance.spec.layout import Layout
from conformance.spec.precision import BF16, PrecisionName
from conformance.worker.evidence import Watch
from conformance.worker.transformer_engine import FUSED_ADAM
from impl.faults.declaration import with_program
from impl.faults.rounding import REMAINDER_FAULTS
from impl.megatron import refusals

KEPT, OF_EXPERTS = "dp2.zero1.remainders", "ep2.zero1.remainders"
GPUS = torch.cuda.device_count()
NUMBERS = [0.0, -0.0, 1.0, -1.0, 1.00390625, -1.00390625, 1.00389, 3e-39, -3e-39, 1e-45, 3.3e38]  # ties, subnormals


def test_parameters_and_remainders_are_their_masters_bit_by_bit() -> None:
    pytest.importorskip("megatron.core")
    from impl.megatron.library_optimizers import halves, with_remainders

    torch.manual_seed(0)
    masters = torch.cat([torch.tensor(NUMBERS), torch.randn(2**16) * torch.logspace(-38, 38, 2**16)])
    parameter, remainders = halves(masters)
    assert (parameter.dtype, remainders.dtype) == (torch.bfloat16, torch.int16)
    assert with_remainders(parameter, remainders).view(torch.int32).equal(masters.view(torch.int32))
    assert parameter.view(torch.int16).equal(_away_from_zero(masters).view(torch.int16))
    nearest = masters.bfloat16()
    assert (parameter - masters).abs().equal((nearest - masters).abs())
    away = parameter != nearest  # of two nearest numbers, where torch takes the even one
    assert away.any()
    assert (parameter[away].abs() > nearest[away].abs()).all()


@pytest.mark.parametrize(
    ("scenario", "model", "layout", "precision", "advice"),
    [
        ("sft-packed", "llama", KEPT, "exact", "use bf16, or leave remainders out"),
        ("sft-packed", "llama", KEPT, "fp16", "use bf16"),
        ("sft-packed", "llama", KEPT, "bf16-reduce", "use bf16"),
        ("sft-sgd", "llama", "dp2.remainders", "bf16", "use an AdamW scenario"),
        ("sft-packed", "llama", "dp2.remainders", "bf16", "add zero1, or leave remainders out"),
        ("sft-packed", "llama", "dp2.zero1.mfsdp.remainders", "bf16", "leave mfsdp or remainders out"),
        ("sft-packed", "qwen3-moe", "ep2.remainders", "bf16", "add zero1, or leave remainders out"),
    ],
)
def test_what_has_no_remainders_says_what_would_work(
    scenario: str, model: str, layout: str, precision: PrecisionName, advice: str
) -> None:
    cell = cell_of("megatron", scenario, model, layout, precision)
    answer = adapter_of(BACKENDS["megatron"]).supports(cell.scenario, cell.phases[0].layout)
    assert isinstance(answer, Unsupported)
    assert re.search(advice, answer.reason), answer.reason


def refusal(monkeypatch: pytest.MonkeyPatch, *, gpus: tuple[str, ...], release: str) -> str:
    """``release``: of TransformerEngine; empty if it is not installed."""
    monkeypatch.setattr(refusals, "gpus_of_host", lambda: gpus)
    monkeypatch.setattr(refusals, "version", lambda _: release)
    installed, older = refusals.is_installed, refusals.is_older
    monkeypatch.setattr(refusals, "is_installed", lambda n: bool(release) if "engine" in n else installed(n))
    own = tuple(map(int, release.split("."))) if release else ()
    monkeypatch.setattr(refusals, "is_older", lambda n, *least: own < least if "engine" in n else older(n, *least))
    cell = cell_of("megatron", "sft-packed", "llama", KEPT, "bf16")
    return getattr(BACKENDS["megatron"].load().supports(cell.scenario, cell.phases[0].layout), "reason", "")


@pytest.mark.parametrize(
    ("gpus", "release", "advice"),
    [
        ((), "", "^there is no GPU, and remainders needs one"),
        (("GPU-1",), "", r"^remainders needs TransformerEngine .*run: pip install"),
        (("GPU-1",), "2.0", r"TransformerEngine 2\.0 keeps no remainders; run: pip install .*>=2\.1"),
        (("GPU-1",), "2.10", "^$"),
    ],
)
def test_what_a_machine_lacks_is_said_before_a_run(
    gpus: tuple[str, ...], release: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = refusal(monkeypatch, gpus=gpus, release=release)
    assert re.search(advice, found), found


def test_a_checkpoint_of_remainders_goes_on_with_them_only() -> None:
    adapter, cell = adapter_of(BACKENDS["megatron"]), cell_of("megatron", "sft-warmup", "llama", KEPT, "bf16")
    for before, after in ((KEPT, "dp2.zero1"), ("tp2.zero1", KEPT)):
        answer = adapter.supports_checkpoint(cell.scenario, Layout.parse(before), Layout.parse(after))
        assert "transfer a training state" in str(answer)
    both = Layout.parse(KEPT), Layout.parse("tp2.zero1.remainders")
    assert str(adapter.supports_checkpoint(cell.scenario, *both)) == "Supported()"


def test_remainders_are_loaded_as_integers() -> None:
    """megatron-core saves them as float32 numbers (docs/findings/megatron-remainder-checkpoints.md)."""
    pytest.importorskip("megatron.core")
    from impl.megatron.checkpoint import _set_states

    parameter, loaded = torch.zeros(3, dtype=torch.bfloat16), {}
    inner = SimpleNamespace(
        param_groups=[{"params": [parameter]}],
        state={parameter: {"master_param": torch.zeros(3, dtype=torch.int16)}},
        set_scaled_state=lambda _, name, state: loaded.update({name: state}),
    )
    config = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=True)
    own = SimpleNamespace(model_param_group_index_map={parameter: (0, 0)}, optimizer=inner, config=config)
    tensors = {"param": torch.tensor([-32768.0, 0.0, 32767.0]), "exp_avg": torch.ones(3)}
    _set_states(own, parameter, tensors)
    assert {name: state.dtype for name, state in loaded.items()} == {
        "master_param": torch.int16,
        "exp_avg": torch.float32,
    }
    assert loaded["master_param"].tolist() == [-32768, 0, 32767]


@pytest.mark.parametrize("kind", [torch.nn.Buffer, partial(torch.nn.Parameter, requires_grad=False)])
def test_what_is_not_trained_has_no_remainders(kind: Any) -> None:
    """Such as a router's correction bias, a float32 buffer, which lost its lower half in halves."""
    pytest.importorskip("megatron.core")
    from impl.megatron.library_optimizers import RemainderTensors

    own, full = kind(torch.zeros(2)), torch.tensor([1.00001, -0.3])
    RemainderTensors._set_master(object.__new__(RemainderTensors), own, full)
    assert own.equal(full)


def test_updates_are_counted_by_the_kind_of_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = SimpleNamespace(multi_tensor_applier=lambda kernel, flag, lists, *rest: kernel(lists, *rest))
    monkeypatch.setitem(sys.modules, FUSED_ADAM, library)
    parameter, seen = torch.zeros(5, dtype=torch.bfloat16), []
    whole, remainders = torch.zeros(5), torch.zeros(5, dtype=torch.int16)
    watch = Watch()
    with watch.step():
        for masters in ([[whole]], [[remainders]], []):
            lists = [[whole], [parameter], [whole], [whole], *masters]
            library.multi_tensor_applier(lambda lists, rate: seen.append((len(lists), rate)), None, lists, 0.1)
    assert seen == [(5, 0.1), (5, 0.1), (4, 0.1)]
    kinds = [["bfloat16", "bfloat16", 5], ["bfloat16", "float32", 5], ["bfloat16", "int16", 5]]
    assert watch.to_json()["updated"] == kinds


@pytest.mark.parametrize(
    ("updates", "holds"),
    [
        ([[["bfloat16", "int16", 60]], [["bfloat16", "int16", 40]]], True),
        ([[["bfloat16", "int16", 60]], [["bfloat16", "int16", 39]]], False),
        ([[["bfloat16", "int16", 60]], [["bfloat16", "float32", 40]]], False),
        ([[["float32", "int16", 60]], [["bfloat16", "int16", 40]]], False),
        ([[], []], False),
    ],
)
def test_all_masters_are_parameters_and_remainders(updates: list[Any], holds: bool) -> None:
    step = Step([{"updated": of_rank} for of_rank in updates], rows=())
    assert remainder_claim(step, 100)[1] is holds
    assert remainder_claim(Step(step.ranks, rows=(), skipped=True), 100)[1]
    # Of 90 numbers, each of two tensor-parallel ranks holds and updates 10: these may not stand in for others.
    assert remainder_claim(step, 90, copies=10)[1] is holds


@pytest.mark.parametrize(("layout", "due"), [("dp2.zero1", 100), ("tp2.zero1", 110), ("dp2.tp4.zero1", 130)])
def test_norms_are_due_on_every_tensor_parallel_rank(monkeypatch: pytest.MonkeyPatch, layout: str, due: int) -> None:
    for name in ("work_claims", "exchange_claims", "_trained"):
        monkeypatch.setattr(layout_evidence, name, lambda *_, **__: ())
    sizes: Any = SimpleNamespace(gradients=100, norms=10, experts=(), linear=None, layers=1, sums=1)
    scenario: Any = SimpleNamespace(accumulation=1, tier=SimpleNamespace(compute=BF16))
    step = Step([{}], rows=())
    [(_, _, where)] = layout_evidence._work(Layout.parse(f"{layout}.remainders"), step, scenario, sizes, stage=None)
    assert where.startswith(f"requested {due} numbers")


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    each = 1 if GPUS > 1 else 2
    config = SessionConfig(
        out=tmp_path_factory.mktemp("remainders"),
        device="cuda",
        gpus=shares_of(gpus_of_host()[:2], each),
        ranks_per_gpu=each,
    )
    with Session(config) as session:
        yield session


needs_te = pytest.mark.skipif(
    not (GPUS and is_installed("transformer-engine")), reason="needs TransformerEngine and a GPU"
)


@pytest.mark.exhaustive
@needs_te
@pytest.mark.parametrize(
    ("scenario", "model", "layout"),
    [
        *(("sft-packed", "llama", f"{axis}.zero1.remainders") for axis in ("dp2", "tp2", "pp2", "dp2.te")),
        *(("sft-packed", model, OF_EXPERTS) for model in ("qwen3-moe", "deepseek-v3")),
        *(("sft-lora", "llama", f"{axis}.zero1.remainders") for axis in ("dp2", "tp2")),
    ],
)
def test_masters_conform(on_gpus: Session, scenario: str, model: str, layout: str) -> None:
    verdict = on_gpus.run(cell_of("megatron", scenario, model, layout, "bf16")).verdict
    assert verdict.state == "conforms", verdict.reason


def resumed(scenario: str, model: str, before: str, after: str, saves: Any) -> Cell:
    cell = cell_of("megatron", scenario, model, before, "bf16", steps=4)
    (first,) = cell.phases
    phases = (replace(first, steps=2, save=saves), replace(first, steps=2, layout=Layout.parse(after)))
    return replace(cell, phases=phases, program=saves)


@pytest.mark.exhaustive
@needs_te
@pytest.mark.parametrize(
    ("scenario", "model", "before", "after", "saves"),
    [
        ("sft-warmup", "llama", KEPT, KEPT, "checkpoint"),
        ("sft-warmup", "llama", KEPT, "tp2.zero1.remainders", "checkpoint"),
        ("sft-warmup", "llama", KEPT, "tp2.zero1.remainders", "state"),
        ("sft-warmup", "qwen3-moe", OF_EXPERTS, OF_EXPERTS, "checkpoint"),
        ("sft-lora", "llama", KEPT, "tp2.zero1.remainders", "checkpoint"),
    ],
)
def test_remainders_go_on(on_gpus: Session, scenario: str, model: str, before: str, after: str, saves: Any) -> None:
    verdict = on_gpus.run(resumed(scenario, model, before, after, saves)).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.exhaustive
@needs_te
@pytest.mark.parametrize("name", [fault.name for fault in REMAINDER_FAULTS])
def test_fault_is_caught_at_the_predicted_stage(on_gpus: Session, name: str, tmp_path: Any) -> None:
    fault = catalogue()[name]
    place = fault.cells
    cell = cell_of("megatron", place.scenario, place.model, place.layouts["megatron"], "bf16", name)
    verdict = on_gpus.run(with_program(cell, fault, tmp_path)).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", fault.stage), verdict.reason
