"""fp16: an update that overflows is skipped, and the loss scale falls and grows: the oracle's model, and cells."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import cell_of, folder_of, record_of, small
from safetensors.torch import save_file

from conformance.core.host import FIXTURES
from conformance.judge.rebuilt import UNCHANGED, rebuilt_updates
from conformance.judge.side_by_side import compare_lines
from conformance.numerics.sketch import kept, sampled
from conformance.oracle.optimizer import LARGEST, MARGIN, LossScale
from conformance.oracle.run import POLICIES
from conformance.records.step_tensors import Record, StepRecord, read_record
from conformance.runner.session import Session
from conformance.spec.batch import Batch, Document, Row
from conformance.spec.objectives import all_observables
from conformance.spec.offline import Sft
from conformance.spec.precision import PrecisionName
from conformance.spec.scenario import LossScaleConfig, Scenario, load_scenario

CONFIG = LossScaleConfig(initial_power=8, growth_interval=2)
SMALL, LARGE = 1.0, 1e9
DEEPSPEED = ("dp2.zero0", "dp2.zero1.offload", "dp2.zero2.offload", "dp2.zero3.offload", "ulysses2.zero2")
MEGATRON = ("dp2.zero1.overlap", "tp2.seqpar", "pp2.vpp2")


def scenario_in(precision: PrecisionName) -> Scenario:
    return load_scenario(FIXTURES / "scenarios" / "sft-overflow.toml", model="models/llama", precision=precision)


def told(*gradients: float, policy: Any = POLICIES["float64"]) -> list[tuple[float, float, float]]:
    """(skipped, loss scale, good steps) after updates with these gradients."""
    scale = LossScale(CONFIG)
    steps = [scale.update({"w": torch.tensor([g])}, policy, step=i) for i, g in enumerate(gradients)]
    return [(step["skipped"], step["loss_scale"], step["good_steps"]) for step in steps]


# The oracle's model


def test_loss_scale_halves_at_overflow_and_grows_after_window() -> None:
    found = told(SMALL, LARGE, LARGE, SMALL, SMALL, SMALL, SMALL)
    assert [skipped for skipped, _, _ in found] == [0, 1, 1, 0, 0, 0, 0]
    assert [scale for _, scale, _ in found] == [256, 128, 64, 64, 128, 128, 256]
    assert [good for _, _, good in found] == [1, 0, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("scaled", [LARGEST / MARGIN * 1.01, LARGEST, LARGEST * MARGIN * 0.99])
def test_a_scenario_in_which_an_overflow_is_marginal_is_refused(scaled: float) -> None:
    with pytest.raises(ValueError, match=r"step 0: .* marginal whether it overflows in fp16 .*initial_power"):
        told(scaled / 256)


def test_a_run_in_fp16_overflows_where_its_own_gradients_do() -> None:
    assert [skipped for skipped, _, _ in told(1.0, float("inf"), float("nan"), policy=POLICIES["fp16"])] == [0, 1, 1]


def test_only_fp16_has_a_loss_scale_that_is_judged() -> None:
    scale = {"skipped", "loss_scale", "good_steps"}
    for precision in ("exact", "fp32", "bf16", "fp16"):
        scenario = scenario_in(precision)
        declared = {o.key for o in all_observables(Sft(), scaled=scenario.judged_loss_scale is not None)}
        assert (scale <= declared) == (scenario.reference.loss_scale is not None) == (precision == "fp16")


def test_the_first_document_with_targets_of_a_step_has_its_weight() -> None:
    documents = [Document((1, 2), (False, target)) for target in (False, True, True)]
    rows = (Row(0, tuple(documents[:1])), Row(1, tuple(documents[1:])))
    batches = Sft(document_weights=(1.0, 9.0)).annotate([Batch(step, 2, rows) for step in range(3)])
    weights = [[document.columns["weight"] for document in batch.documents] for batch in batches]
    assert weights == [[1.0, 1.0, 1.0], [1.0, 9.0, 1.0], [1.0, 1.0, 1.0]]
    assert not Sft().annotate([Batch(0, 2, rows)])[0].documents[0].columns


# Cells


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "layout", "model"),
    [
        ("fsdp2", "dp2", "llama"),
        ("deepspeed", "dp2.zero2", "llama"),
        ("megatron", "dp2", "llama"),
        *(("fsdp2", layout, "qwen3") for layout in ("dp2.rep2", "tp2.seqpar.losspar", "dp2.sp2")),
        *(("deepspeed", layout, "pangu") for layout in DEEPSPEED),
        *(("megatron", layout, "qwen3") for layout in MEGATRON),
        ("megatron", "ep2.zero1", "qwen3-moe"),
    ],
)
def test_an_overflow_is_skipped_and_the_scale_falls_and_grows(
    session: Session, backend: str, layout: str, model: str
) -> None:
    cell = cell_of(backend, "sft-overflow", model, layout, "fp16", steps=6, **small("sft-overflow"))
    verdict = session.run(cell).verdict
    assert verdict.state == ("expected_difference" if "zero0" in layout else "conforms"), verdict.reason
    steps = record_of(session, cell).steps
    assert [step.value("skipped") for step in steps] == [0, 1, 0, 0, 0, 0]
    assert [step.value("loss_scale") for step in steps] == [256, 128, 128, 256, 256, 512]
    assert [step.value("good_steps") for step in steps] == [1, 0, 1, 0, 1, 0]
    judged = {(q.tensor, q.step) for q in verdict.quantities}
    for step in range(6):
        assert {(key, step) for key in ("skipped", "loss_scale", "good_steps", "lr")} <= judged
        assert (("grad_norm", step) in judged) == (step != 1)  # which is no number where gradients are none
    assert ("model.norm.weight" + UNCHANGED, 1) in judged


def test_a_scale_that_optimizers_share_moves_once_a_step_by_the_gradients_of_all() -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    from impl.megatron.config import SharedScale
    from impl.megatron.device_placement import placed

    with placed("cpu", exact=False):
        numbers = {"min_scale": 1.0, "growth_factor": 2.0, "backoff_factor": 0.5}
        scaler = DynamicGradScaler(initial_scale=256.0, growth_interval=2, hysteresis=1, **numbers)
        shared = SharedScale(scaler, sharers=2)
        seen = []
        for dense, experts in ((False, False), (False, True), (True, False), (False, False), (False, False)):
            shared.update(dense)
            before = float(shared.scale)  # by which the second one's gradients are divided
            shared.update(experts)
            seen.append((before, float(shared.scale), shared._growth_tracker))
    assert seen == [(256, 256, 1), (256, 128, 0), (128, 64, 0), (64, 64, 1), (64, 128, 0)]


@pytest.fixture(scope="module")
def records(session: Session) -> tuple[Record, Record]:
    """Of a cell, and of its oracle."""
    cell = cell_of("fsdp2", "sft-overflow", "llama", "dp2", "fp16", steps=6, **small("sft-overflow"))
    folder = folder_of(session, cell)
    if not folder.exists():  # else it has been run above
        session.run(cell)
    return record_of(session, cell), read_record(session._oracles.folder(cell) / "float64")


@pytest.mark.exhaustive
def test_a_weight_that_changes_in_the_least_where_the_update_is_skipped_is_found(
    records: tuple[Record, Record], tmp_path: Path
) -> None:
    record, oracle = records
    first, skipped, *others = record.steps
    tensors, weight = skipped.tensors(), "weight/model.norm.weight"
    tensors[weight][3] = torch.nextafter(tensors[weight][3], torch.tensor(9.0))
    save_file(tensors, tmp_path / "changed.safetensors")
    record = replace(record, steps=(first, replace(skipped, path=tmp_path / "changed.safetensors"), *others))
    scenario = record.scenario
    found = [m for m in rebuilt_updates([record], oracle, scenario) if m.error > (m.fixed or 0.0)]
    assert (found[0].tensor, found[0].step, found[0].where) == ("model.norm.weight" + UNCHANGED, 1, "[3]")
    assert 0 < found[0].error < 2.0**-22


@pytest.mark.exhaustive
@pytest.mark.parametrize("sampled_too", [True, False])
def test_a_change_of_a_sketched_weight_is_found_also_outside_of_its_sample(
    records: tuple[Record, Record], tmp_path: Path, sampled_too: bool
) -> None:
    record, oracle = records
    name = "model.embed_tokens.weight"

    def sketched(which: StepRecord, row: int | None, column: int) -> StepRecord:
        tensors, path = which.tensors(), tmp_path / f"{which.path.parent.name}-{which.path.name}"
        weight = tensors.pop(f"weight/{name}")
        if row is not None:
            weight[row, column] = torch.nextafter(weight[row, column], torch.tensor(9.0))
        save_file(tensors | kept([(f"weight/{name}", weight)], above=0), path)
        return replace(which, path=path)

    height, width = record.loaded.tensors()[f"weight/{name}"].shape
    places = {*sampled(name, height, width, device=torch.device("cpu")).tolist()}
    at = next(place for place in range(height * width) if (place in places) == sampled_too)
    row, column = divmod(at, width)
    steps = [sketched(step, row if step.step == 1 else None, column) for step in record.steps[:2]]
    record = replace(record, steps=tuple(steps))
    found = [m for m in rebuilt_updates([record], oracle, record.scenario) if m.step == 1]
    (wrong,) = [m for m in found if m.error > 0]
    assert wrong.tensor == name + UNCHANGED
    assert wrong.where == (f"[{row}, {column}]" if sampled_too else f"row {row} by sketch")


@pytest.mark.exhaustive
def test_what_overflowed_is_not_recorded_and_not_compared_between_backends(records: tuple[Record, Record]) -> None:
    record, oracle = records
    for each in records:
        assert [step.value("grad_norm") is None for step in each.steps] == [step == 1 for step in range(6)]
        assert not any(name.startswith("gradient/") for name in each.steps[1].names())
    lines, reference = [step.line for step in record.steps], [step.line for step in oracle.steps]
    found = compare_lines([lines, lines], reference, observables=oracle.observables, bounds={})
    assert found[0, 1]["gradient norm"].observed == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["fsdp2", "deepspeed", "megatron"])
@pytest.mark.parametrize("precision", ["exact", "fp32", "bf16"])
def test_other_precisions_have_no_overflow(session: Session, backend: str, precision: PrecisionName) -> None:
    verdict = session.run(cell_of(backend, "sft-overflow", "llama", "dp2", precision, steps=3)).verdict
    assert verdict.state == "conforms", verdict.reason
    assert "skipped" not in {q.tensor for q in verdict.quantities}
