"""Checks runs of the oracle: complete records, the error of each precision, fresh optimizers, and several models."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_objectives
from conftest import make_cell
from oracle_cells import as_cell
from safetensors.torch import save_file
from torch import Tensor

from conformance.core.host import FIXTURES
from conformance.judge.verdict import judge
from conformance.models.components import parameter_shapes
from conformance.models.families import read_architecture
from conformance.models.folders import prepare_model
from conformance.numerics.float64_tier import exact_tier
from conformance.oracle.decoder import forward, load_weights
from conformance.oracle.loss_terms import target_logprobs, target_positions
from conformance.oracle.optimizer import global_norm
from conformance.oracle.primitives import Weights
from conformance.oracle.run import POLICIES, policy_of, run_oracle
from conformance.records.step_tensors import Record, StepRecord, read_record
from conformance.spec.batch import Batch, Document, Row
from conformance.spec.known_defects import Defect, DividedGradients
from conformance.spec.objectives import Objective
from conformance.spec.offline import Sft
from conformance.spec.precision import PrecisionName, noise_runs
from conformance.spec.scenario import OptimizerConfig, Scenario, ScheduleConfig, scenario_to_json

PANGU = FIXTURES / "models" / "pangu"
FLOAT64 = POLICIES["float64"]
SCENARIO = Scenario(
    name="oracle-test",
    model="models/pangu",
    precision="exact",
    steps=3,
    optimizer=OptimizerConfig(name="adamw", lr=1e-2, weight_decay=0.1, max_grad_norm=0.5),
    schedule=ScheduleConfig(name="cosine", warmup_steps=1, total_steps=4),
)


def document(seed: int, length: int, prompt: int) -> Document:
    tokens = torch.randint(3, 260, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Document(tuple(tokens), tuple(i >= prompt for i in range(length)))


def batches(steps: int) -> list[Batch]:
    """Every step has three documents of its own, two of them in one row, and a row without a target."""
    rows = [
        [(document(3 * s, 30, 9),), (document(3 * s + 1, 7, 2), document(3 * s + 2, 11, 5)), (document(99, 6, 6),)]
        for s in range(steps)
    ]
    return [Batch(s, 64, tuple(Row(i, documents) for i, documents in enumerate(rows[s]))) for s in range(steps)]


BATCHES = batches(4)


def relative(x: Tensor, reference: Tensor) -> float:
    return float((x.double() - reference).norm() / reference.norm())


def run(
    out: Path,
    scenario: Scenario = SCENARIO,
    *,
    models: dict[str, Path] | None = None,
    steps: list[Batch] | None = None,
    policy: str = "float64",
    restarts: tuple[int, ...] = (),
) -> Record:
    chosen = BATCHES[: scenario.steps] if steps is None else steps
    run_oracle(
        scenario=scenario,
        models=models or {"policy": PANGU},
        batches=chosen,
        out=out,
        policy_name=policy,
        restarts=restarts,
    )
    return read_record(out)


def tensors(step: StepRecord, key: str) -> Weights:
    """The tensors of one observable, by name."""
    return {name.removeprefix(f"{key}/"): t for name, t in step.tensors().items() if name.startswith(f"{key}/")}


# --- records ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    names = ("float64", "fp32", "bf16", "fp16", "fp32-plain", "bf16-plain", "fp16-plain")
    return {name: run(tmp_path_factory.mktemp("oracle") / name, policy=name) for name in names}


@pytest.mark.parametrize(("policy", "tier"), [("float64", "exact"), ("fp32-plain", "fp32"), ("bf16", "bf16")])
def test_kernels_are_chosen_as_in_the_cells_of_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, tier: PrecisionName
) -> None:
    """So that the noise that bounds a cell is not that of other kernels."""
    asked: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def settings(precision: PrecisionName, device: str) -> Iterator[dict[str, str]]:
        asked.append((precision, device))
        yield {"deterministic": "yes"}

    monkeypatch.setattr("conformance.oracle.run.settings_of", settings)
    assert run(tmp_path / "oracle", policy=policy).header["environment"]["deterministic"] == "yes"
    assert asked == [(tier, "cpu")]


def test_a_record_is_complete_and_says_how_it_was_made(records: dict[str, Record]) -> None:
    record = records["float64"]
    assert record.header["cell"] == "oracle"
    assert record.header["backend"]["name"] == "oracle"
    assert record.header["layout"] == "dp1"
    assert record.header["scenario"] == scenario_to_json(SCENARIO)
    assert record.header["environment"]["torch"] == torch.__version__
    assert record.header["environment"]["deterministic"] == "no"  # on a CPU, where nothing is set
    assert record.header["resolved"]["compute_dtype"] == "torch.float64"
    assert record.header["resolved"]["architecture"].keys() == {"policy"}
    assert record.footer["steps"] == 3
    assert record.footer["seconds"] > 0
    names = parameter_shapes(read_architecture(PANGU))
    assert record.loaded.tensors().keys() == {f"weight/{name}" for name in names}
    expected = {f"{kind}/{name}" for kind in ("gradient", "weight") for name in names}
    assert record.steps[0].tensors().keys() == expected | {"logprob/0", "logprob/1"}


def test_values_of_a_step_are_those_of_its_tensors(records: dict[str, Record]) -> None:
    for step, batch in zip(records["float64"].steps, BATCHES, strict=False):
        logprobs = torch.cat([*tensors(step, "logprob").values()])
        assert step.value("token_count") == batch.target_count == len(logprobs)
        assert step.value("loss") == pytest.approx(-logprobs.mean().item(), rel=1e-14, abs=0)
        norm = step.value("grad_norm")
        assert norm == pytest.approx(global_norm(tensors(step, "gradient")), rel=1e-15, abs=0)
        assert norm is not None
        assert norm > 0.5, "clipping is active, and what is recorded is not clipped"
        assert step.value("lr") == pytest.approx(1e-2 * SCENARIO.schedule.factor(step.step), rel=1e-15, abs=0)


def test_warmup_starts_at_zero_and_weights_move_only_then(records: dict[str, Record]) -> None:
    loaded, first, second = (s.tensors() for s in (records["float64"].loaded, *records["float64"].steps[:2]))
    assert all(torch.equal(loaded[name], first[name]) for name in loaded)
    assert not any(torch.equal(first[name], second[name]) for name in loaded)


@pytest.mark.parametrize(("name", "least", "most"), [("fp32", 1e-7, 3e-6), ("fp16", 3e-4, 2e-2), ("bf16", 3e-3, 2e-1)])
def test_a_lower_precision_shows_its_own_error(
    records: dict[str, Record], name: str, least: float, most: float
) -> None:
    found, reference = records[name].steps[0].tensors(), records["float64"].steps[0].tensors()
    errors = [relative(found[key], reference[key]) for key in reference if key.startswith("gradient/")]
    assert least < max(errors) < most
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}, "masters and gradients stay float32"
    assert {tensor.dtype for tensor in reference.values()} == {torch.float64}


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_the_formula_of_attention_rounds_otherwise_than_the_kernel(records: dict[str, Record], name: str) -> None:
    fused, plain, reference = (records[run].steps[0].tensors() for run in (*noise_runs(name), "float64"))
    for key in (key for key in reference if key.startswith("gradient/") and "q_proj" in key):
        one, other = relative(fused[key], reference[key]), relative(plain[key], reference[key])
        assert one != other
        assert 1 / 4 < one / other < 4


def test_on_a_gpu_the_further_noise_run_has_products_as_large_as_a_backends() -> None:
    """Of one of two data-parallel ranks: four rows of 64 tokens, two micro-batches."""
    scenario = replace(SCENARIO, accumulation=2)
    of_four_rows = [replace(batch, rows=(*batch.rows, batch.rows[0])) for batch in BATCHES]
    names = ("float64", "fp32", "fp32-plain", "bf16-plain")
    sizes = {name: policy_of(name, scenario, of_four_rows, "cuda").tokens for name in names}
    assert sizes == {"float64": 0, "fp32": 0, "fp32-plain": 64, "bf16-plain": 64}
    assert policy_of("fp32-plain", scenario, of_four_rows, "cpu").tokens == 0


def test_too_few_batches_and_the_exact_tier_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 steps but only 1 batches"):
        run(tmp_path / "a", steps=BATCHES[:1])
    with exact_tier(), pytest.raises(AssertionError, match="outside"):
        run(tmp_path / "b", policy="bf16")


# --- optimizers that begin anew --------------------------------------------------------------------------------------

LONG = replace(SCENARIO, steps=4, schedule=ScheduleConfig(name="linear", warmup_steps=1, total_steps=6))
PARTS = replace(LONG, steps=2)
MOMENTUM = OptimizerConfig(name="sgd", lr=0.1, momentum=0.9, max_grad_norm=0.5)


@pytest.mark.parametrize("optimizer", [LONG.optimizer, MOMENTUM], ids=["adamw", "sgd"])
def test_a_restart_is_a_run_from_the_exported_weights(tmp_path: Path, optimizer: OptimizerConfig) -> None:
    long, parts = (replace(scenario, optimizer=optimizer) for scenario in (LONG, PARTS))
    whole = run(tmp_path / "whole", long, restarts=(2,))
    before = run(tmp_path / "before", parts)
    exported = prepare_model(parts, parts.objective.roles[0], tmp_path / "exported")
    (exported / "model.safetensors").unlink()  # a link to the fixture
    save_file(tensors(before.steps[-1], "weight"), exported / "model.safetensors")
    after = run(tmp_path / "after", parts, models={"policy": exported}, steps=BATCHES[2:])
    for found, expected in zip(whole.steps, (*before.steps, *after.steps), strict=True):
        assert found.line["values"] == expected.line["values"]
        theirs = expected.tensors()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in found.tensors().items())


def test_without_a_restart_optimizer_and_schedule_go_on(tmp_path: Path) -> None:
    gone_on, begun_anew = run(tmp_path / "on", LONG), run(tmp_path / "anew", LONG, restarts=(2,))
    assert [step.value("lr") for step in gone_on.steps] == [1e-2 * LONG.schedule.factor(k) for k in (0, 1, 2, 3)]
    assert [step.value("lr") for step in begun_anew.steps] == [1e-2 * LONG.schedule.factor(k) for k in (0, 1, 0, 1)]
    third, same = (tensors(record.steps[2], "gradient") for record in (gone_on, begun_anew))
    assert all(torch.equal(third[name], same[name]) for name in third), "the restart changes the step, not the gradient"
    moved, kept = (tensors(record.steps[2], "weight") for record in (gone_on, begun_anew))
    assert not any(torch.equal(moved[name], kept[name]) for name in moved)


# --- several models --------------------------------------------------------------------------------------------------

CONSTANT = replace(SCENARIO, steps=2, schedule=ScheduleConfig(), optimizer=OptimizerConfig(name="sgd", lr=0.1))


def of_objective(objective: Objective, **optimizer: Any) -> Scenario:
    return replace(CONSTANT, objective=objective, optimizer=replace(CONSTANT.optimizer, **optimizer))


SEVERAL = of_objective(toy_objectives.PolicyAndValue(), max_grad_norm=0.01)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], list[Batch], Record]:
    """The folders of a reference, a policy and a value model, twice the same batch, and the record of two steps."""
    root = tmp_path_factory.mktemp("several")
    models = {role.name: prepare_model(SEVERAL, role, root / role.name) for role in SEVERAL.objective.roles}
    steps = SEVERAL.objective.annotate([BATCHES[0], replace(BATCHES[0], step=1)])
    return models, steps, run(root / "record", SEVERAL, models=models, steps=steps)


Several = tuple[dict[str, Path], list[Batch], Record]


def test_every_model_is_recorded_under_its_own_keys(several: Several) -> None:
    models, _, record = several
    assert tensors(record.loaded, "reference.weight").keys() == load(models["reference"]).keys()
    assert "score.weight" in tensors(record.loaded, "critic.weight")
    assert "score.weight" not in tensors(record.loaded, "weight")
    assert record.header["resolved"]["architecture"].keys() == {"reference", "policy", "critic"}
    for step in record.steps:
        keys = {name.partition("/")[0] for name in step.names()}
        assert keys == {
            *("reference.logprob", "logprob", "critic.value"),
            *("gradient", "weight", "critic.gradient", "critic.weight"),
            *("critic.value_gradient", "critic.shifted"),  # of the oracle alone
        }
        assert step.line["values"].keys() == {
            *("token_count", "loss", "grad_norm", "lr"),
            *("critic.loss", "critic.grad_norm", "critic.lr"),
        }


def test_only_the_reference_says_how_far_rows_move(several: Several, tmp_path: Path) -> None:
    """Nobody asks a run in another precision, and gradients of one with a defect may be others than these are of."""
    models, steps, record = several
    assert tensors(record.steps[1], "critic.shifted").keys() == {"model.embed_tokens.weight"}
    runs: list[tuple[str, tuple[Defect, ...]]] = [("fp32", ()), ("float64", (DividedGradients(by=2),))]
    for policy, defects in runs:
        out, scenario = tmp_path / policy, replace(SEVERAL, steps=1)
        run_oracle(scenario=scenario, models=models, batches=steps, out=out, policy_name=policy, defects=defects)
        (step,) = read_record(out).steps
        assert tensors(step, "critic.value_gradient").keys() == tensors(step, "critic.value").keys()
        assert not tensors(step, "critic.shifted")


def test_a_frozen_model_is_never_updated_and_the_others_are(several: Several) -> None:
    _, _, record = several
    first, second = record.steps
    for key, same in (("reference.logprob", True), ("logprob", False), ("critic.value", False)):
        before, after = tensors(first, key), tensors(second, key)
        assert {torch.equal(before[row], after[row]) for row in before} == {same}, key


def test_losses_and_gradients_are_those_of_the_formulas(several: Several) -> None:
    """Written out once more, in one graph over all documents, with autograd."""
    models, steps, record = several
    documents = [document for document in steps[0].documents if any(document.targets)]
    count = steps[0].target_count
    policy, critic = (leaves(models[role]) for role in ("policy", "critic"))
    with torch.no_grad():
        known = [logprobs(models["reference"], load(models["reference"]), d) for d in documents]
    pairs = zip(documents, known, strict=True)
    loss = sum(((logprobs(models["policy"], policy, d) - k) ** 2).sum() for d, k in pairs) / (2 * count)
    values = [outputs(models["critic"], critic, d)[target_positions(d) - 1, 0] for d in documents]
    wanted = [toy_objectives.RETURNS * toy_objectives.number_of(d, 0) for d in documents]
    value_loss = sum(((v - w) ** 2).sum() for v, w in zip(values, wanted, strict=True)) / (2 * count)
    for key, prefix, total, weights in (("loss", "", loss, policy), ("critic.loss", "critic.", value_loss, critic)):
        assert isinstance(total, Tensor)
        assert record.steps[0].value(key) == pytest.approx(total.item(), rel=1e-14, abs=0)
        gradients = torch.autograd.grad(total, [*weights.values()])
        found = tensors(record.steps[0], f"{prefix}gradient")
        for name, gradient in zip(weights, gradients, strict=True):
            assert relative(found[name], gradient) < 1e-13, name


def test_every_model_is_clipped_by_its_own_norm(several: Several) -> None:
    _, _, record = several
    for prefix in ("", "critic."):
        gradients = tensors(record.steps[0], f"{prefix}gradient")
        norm = record.steps[0].value(f"{prefix}grad_norm")
        assert norm == pytest.approx(global_norm(gradients), rel=1e-15, abs=0)
        assert norm is not None
        assert norm > 0.01
        before, after = tensors(record.loaded, f"{prefix}weight"), tensors(record.steps[0], f"{prefix}weight")
        for name, gradient in gradients.items():
            torch.testing.assert_close(after[name], before[name] - 0.1 * 0.01 / (norm + 1e-6) * gradient)


def test_an_objectives_columns_and_options_reach_its_functions(tmp_path: Path) -> None:
    """Weights of power 0 are all 1: that is SFT. Of another power they are not."""
    plain = run(tmp_path / "sft", of_objective(Sft())).steps[0]
    found = {}
    for power in (0.0, 1.0, 2.0):
        scenario = of_objective(toy_objectives.WeightedSft(power=power))
        annotated = scenario.objective.annotate(BATCHES[:2])
        found[power] = run(tmp_path / str(power), scenario, steps=annotated).steps[0]
    assert found[0.0].value("weight_sum") == BATCHES[0].target_count
    assert found[0.0].value("loss") == pytest.approx(plain.value("loss"), rel=1e-14, abs=0)
    gradients = tensors(plain, "gradient")
    for power, same in ((0.0, True), (1.0, False), (2.0, False)):
        errors = [relative(g, gradients[name]) for name, g in tensors(found[power], "gradient").items()]
        assert (max(errors) < 1e-13) == same
        assert tensors(found[power], "entropy").keys() == {"0", "1"}
    assert found[1.0].value("weight_sum") != found[2.0].value("weight_sum")


@cache
def load(folder: Path) -> Weights:
    return load_weights(folder, read_architecture(folder), torch.float64)


def leaves(folder: Path) -> Weights:
    return {name: weight.clone().requires_grad_() for name, weight in load(folder).items()}


def outputs(folder: Path, weights: Weights, document: Document) -> Tensor:
    return forward(torch.tensor(document.tokens), weights, read_architecture(folder), FLOAT64)


def logprobs(folder: Path, weights: Weights, document: Document) -> Tensor:
    return target_logprobs(outputs(folder, weights, document), document, stable=torch.float64)


def test_the_further_noise_run_of_a_data_parallel_cell_adds_up_the_embeddings_of_one_ranks_rows(tmp_path: Path) -> None:
    """A backend that adds up those of all rows in bf16 is too far off for eight data-parallel ranks, not for one: each
    row has 64 times the same token, and a sum of 512 numbers grows too little."""
    cell = make_cell("sft-packed", "pangu", "dp1", "bf16", steps=1)
    rows = [(*document(row, 16, 1).tokens, *(3,) * 64) for row in range(8)]
    of_row = [Document(tokens, tuple(at > 0 for at in range(len(tokens)))) for tokens in rows]
    steps = [Batch(0, 80, tuple(Row(row, (one,)) for row, one in enumerate(of_row)))]
    scenario = replace(SCENARIO, precision="bf16", steps=1)
    names = [noise_runs("bf16", ranks)[1] for ranks in (1, 8)]
    exact, half, *further = (
        run(tmp_path / name, scenario, steps=steps, policy=name) for name in ("float64", "bf16", *names)
    )
    of_all = as_cell(further[0], tmp_path / "cell", replace(cell, scenario=scenario))
    verdicts = [judge([of_all], oracle=exact, noise=[half, one]) for one in further]
    assert [verdict.state for verdict in verdicts] == ["conforms", "differs"]
    assert "model.embed_tokens.weight" in verdicts[1].findings[0].tensor
