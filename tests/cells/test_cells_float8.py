"""FSDP2 in float8: torchao's recipes compute what the oracle's model of them computes, and lose nothing unseen.

torchao is in no environment of the suite, because transformers imports it wherever it is installed, which takes a
second in each process. scripts/third-opinion fetches it into a folder, and only these tests put that on the path.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from cells import assert_honest, cell_of, exhaustive, session_with

from conformance.backends.faults import catalogue
from conformance.matrix.cell import Handover
from conformance.runner.session import Session
from conformance.spec.layout import Layout
from conformance.spec.precision import PrecisionName
from impl.faults.float8 import FLOAT8_FAULTS
from impl.fsdp2 import float8

STEPS_OF = {"scales-of-first-update": 3, "stale-transposed-weight": 2}
OF_TORCHAO = {fault.name: fault.cells.layouts["fsdp2"] for fault in FLOAT8_FAULTS if "fsdp2" in fault.cells.layouts}
OF_DELAYED = [name for name, layout in OF_TORCHAO.items() if layout == "dp2.fp8delayed"]
# Six micro-batches, so that the first magnitudes leave the histories of four.
LONGER = {"steps": 2, "accumulation": 3, "rows": 24}


@pytest.fixture
def delayed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """torchao 0.9, the last release with delayed scaling. A test has it to itself: two releases share no process."""
    with session_with("torchao-delayed", tmp_path_factory.mktemp("delayed")) as session:
        yield session


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with session_with("torchao", tmp_path_factory.mktemp("float8")) as session:
        yield session


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "dp2.fp8tensor",
        "dp2.fp8row.ckpt",
        "dp2.fp8rowhp",
        "dp2.fp8mx",
        "dp2.fp8tensor.fp8gather",
        "tp2.plan.fp8row",
        "tp2.plan.fp8tensor",
    ],
)
def test_exact(session: Session, layout: str) -> None:
    verdict = assert_honest(session, cell_of("fsdp2", "sft-packed", "llama", layout, "exact"))
    assert len(verdict.conventions) == 1, "the numbers differ from those without float8"


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["grpo", exhaustive("ppo")])
def test_rollouts(session: Session, scenario: str) -> None:
    """Passes over a rollout share scales within a micro-batch as updates do."""
    assert_honest(session, cell_of("fsdp2", scenario, "llama", "dp2.fp8tensor", "exact"))


@pytest.mark.slow
def test_delayed_scaling(delayed: Session) -> None:
    """Scales follow from four micro-batches of all ranks, where torchao by itself forgets those in between."""
    assert_honest(delayed, cell_of("fsdp2", "sft-packed", "llama", "dp2.fp8delayed", "exact", **LONGER))
    for name in OF_DELAYED:
        verdict = delayed.run(
            cell_of("fsdp2", "sft-packed", "llama", "dp2.fp8delayed", "exact", name, **LONGER)
        ).verdict
        assert verdict.state == "differs", verdict.reason
        assert verdict.first_stage == catalogue()[name].stage, verdict.reason
    resumed = delayed.run(cell_of("fsdp2", "sft-warmup", "llama", "dp2.fp8delayed", "exact")).verdict
    assert resumed.state == "unsupported"
    assert "no checkpoint of torchao holds the histories of fp8delayed" in resumed.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "saves", "after"),
    [
        ("dp2.fp8mx", "checkpoint", "dp2.fp8mx"),
        ("dp2.fp8tensor.fp8gather", "checkpoint", "dp2.fp8tensor.fp8gather"),
        ("dp2.fp8row", "state", "dp2.tp2.plan.fp8row"),
        ("dp2.fp8tensor.fp8gather", "state", "dp2.ckpt.fp8tensor"),
    ],
)
def test_resumes(session: Session, before: str, saves: Handover, after: str) -> None:
    """Of float8 nothing is saved: scales follow from the tensors of a step."""
    cell = cell_of("fsdp2", "sft-warmup", "llama", before, "exact")
    first, second = cell.phases
    phases = (replace(first, save=saves), replace(second, layout=Layout.parse(after)))
    assert_honest(session, replace(cell, phases=phases, program=saves))


@pytest.mark.slow
def test_ends_are_left_out(session: Session) -> None:
    assert_honest(session, cell_of("fsdp2", "sft-packed", "gemma3", "dp2.fp8tensor.fp8ends", "exact"))


@pytest.mark.slow
def test_fp32_is_judged_by_the_noise_of_ties(session: Session) -> None:
    cell = cell_of("fsdp2", "sft-sgd", "llama", "dp2.fp8tensor", "fp32", rows=24, accumulation=2, steps=1)
    verdict = session.run(cell).verdict
    assert verdict.state == "conforms", verdict.reason
    assert "not judged: single rows" in verdict.reason
    assert "a kernel for products in float8, which are emulated" in verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OF_TORCHAO if name not in OF_DELAYED])
def test_fault_is_caught_at_the_predicted_stage(session: Session, name: str) -> None:
    place = catalogue()[name].cells
    steps = STEPS_OF.get(name, 1)
    cell = cell_of("fsdp2", place.scenario, place.model, place.layouts["fsdp2"], "exact", name, steps=steps)
    verdict = session.run(cell).verdict
    assert verdict.state == "differs", verdict.reason
    assert verdict.first_stage == catalogue()[name].stage, verdict.reason


@pytest.mark.parametrize(
    ("scenario", "model", "layout", "precision", "reason"),
    [
        ("dpo", "llama", "dp2.fp8tensor", "exact", "tried for sft, grpo, ppo only"),
        ("sft-lora", "llama", "dp2.fp8tensor", "exact", "not tried with adapters"),
        ("grpo", "llama", "dp2.fp8delayed", "exact", "passes over rollouts are not modelled"),
        ("sft-packed", "qwen3-moe", "dp2.fp8row", "exact", "dense models"),
        ("sft-packed", "llama", "dp2.fp8row", "fp16", "use bf16"),
        ("sft-packed", "llama", "sp2.fp8row", "exact", "leave other axes out"),
        ("sft-packed", "llama", "dp2.fp8row.compile", "exact", "compile is not built"),
        ("sft-packed", "llama", "tp2.fp8tensor", "exact", "add the layout option 'plan'"),
        ("sft-packed", "llama", "tp2.plan.fp8mx", "exact", "use tp1, or fp8row"),
        ("sft-packed", "llama", "dp2.fp8tensor.fp8ends", "exact", "the model has no other"),
        ("sft-packed", "llama", "tp2.plan.fp8delayed", "exact", "use tp1, or fp8tensor"),
        ("sft-packed", "llama", "dp2.fp8block", "bf16", "use fp8mx, or Megatron's layers of te"),
        ("sft-packed", "llama", "dp2.fp8delayed", "exact", "pip install 'torchao==0.9.*'"),
        ("sft-packed", "llama", "dp2.fp8tensor", "exact", ""),
    ],
)
def test_refusals_name_the_way_out(
    monkeypatch: pytest.MonkeyPatch, scenario: str, model: str, layout: str, precision: PrecisionName, reason: str
) -> None:
    monkeypatch.setattr(float8, "find_spec", lambda name: object())
    monkeypatch.setattr(float8, "is_older", lambda package, *version: False)
    cell = cell_of("fsdp2", scenario, model, layout, precision)
    found = float8.float8_support(cell.scenario, cell.phases[0].layout)
    assert reason in found if reason else not found


def test_a_missing_torchao_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "find_spec", lambda name: None)
    cell = cell_of("fsdp2", "sft-packed", "llama", "dp2.fp8tensor", "exact")
    assert "pip install 'backend-parity[fp8]'" in float8.float8_support(cell.scenario, cell.phases[0].layout)


@pytest.mark.parametrize(("version", "reason"), [("0.18.1", ""), ("0.19.0", "torchao 0.19.0 is installed, and fp8mx")])
def test_mxfp8_needs_the_torchao_that_it_is_built_on(
    monkeypatch: pytest.MonkeyPatch, version: str, reason: str
) -> None:
    monkeypatch.setattr(float8, "find_spec", lambda name: name)
    monkeypatch.setattr(float8, "package_version", lambda package: version)
    monkeypatch.setattr(float8, "is_older", lambda package, *first: False)
    cell = cell_of("fsdp2", "sft-packed", "llama", "dp2.fp8mx", "exact")
    found = float8.float8_support(cell.scenario, cell.phases[0].layout)
    assert found.startswith(reason) if reason else not found
