"""Replay: below the exact tier each forward pass of a step is given the oracle's choices for it, and no other's."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conformance.core.host import FIXTURES
from conformance.data.inputs import FrozenInputs, prepare_inputs
from conformance.judge.provenance import read_choices
from conformance.oracle.run import NO_PASS, run_oracle
from conformance.records.record_format import RecordError
from conformance.records.step_tensors import Record, read_record
from conformance.spec.batch import CHOICES, EXPERTS, Batch, Document, Row, expert_column, read_batches, write_batches
from conformance.spec.scenario import Scenario, load_scenario
from impl.engine.trainer import RolloutColumns, Rollouts
from impl.interface.micro_batches import collate
from impl.models.router import choices_for

pytestmark = pytest.mark.slow

PASSES = ("routing", "old_routing", "reference.routing")  # of a step of GRPO, as they are recorded
SLOTS = [(layer, slot) for layer in range(2) for slot in range(2)]  # of qwen3-moe's two routers


def grpo(steps: int) -> Scenario:
    file = FIXTURES / "scenarios" / "grpo.toml"
    scenario = load_scenario(file, model="models/qwen3-moe", precision="exact", steps=steps)
    return replace(scenario, data=replace(scenario.data, rows=6))


def computed(scenario: Scenario, inputs: FrozenInputs, out: Path) -> Record:
    batches = read_batches(inputs.batches)
    run_oracle(scenario=scenario, models=inputs.models, batches=batches, out=out, policy_name="float64")
    return read_record(out)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> FrozenInputs:
    return prepare_inputs(grpo(3), tmp_path_factory.mktemp("replay"))


@pytest.fixture(scope="module")
def record(inputs: FrozenInputs, tmp_path_factory: pytest.TempPathFactory) -> Record:
    return computed(grpo(3), inputs, tmp_path_factory.mktemp("oracle") / "float64")


def experts(batch: Batch, key: str) -> list[tuple[float, ...]]:
    """By document, layer and slot, the number of each token's expert."""
    columns = [d.columns[expert_column(layer, slot, key)] for d in batch.documents for layer, slot in SLOTS]
    assert all(isinstance(column, tuple) for column in columns)
    return columns  # type: ignore[return-value]


def test_each_pass_of_each_step_has_choices_of_its_own(record: Record) -> None:
    """The first update is made by the weights that looked ahead; from then on all differ."""
    first, second, again = read_batches(record.path / CHOICES)
    assert experts(first, "routing") == experts(first, "old_routing") != experts(first, "reference.routing")
    assert experts(second, "routing") != experts(second, "old_routing")
    assert experts(again, "routing") != experts(first, "routing")
    assert [experts(again, key) for key in PASSES[1:]] == [experts(first, key) for key in PASSES[1:]]


def test_what_was_chosen_is_what_is_recorded_of_the_pass(record: Record) -> None:
    for batch, step in zip(read_batches(record.path / CHOICES), record.steps, strict=True):
        tensors = step.tensors()
        for row in batch.rows:
            for key in PASSES:
                weights = tensors[f"{key}/{row.index}"].view(row.length, 2, -1)
                for layer, slot in SLOTS:
                    numbers = [x for d in row.documents for x in d.columns[expert_column(layer, slot, key)]]  # type: ignore[union-attr]
                    given = torch.tensor(numbers).long()
                    assert bool((weights[torch.arange(row.length), layer, given] > 0).all())


def test_a_rollout_that_ends_after_the_last_step_has_choices(tmp_path: Path) -> None:
    cut = grpo(1)
    record = computed(cut, prepare_inputs(cut, tmp_path), tmp_path / "float64")
    assert [batch.step for batch in read_choices(record, replace(cut, precision="bf16"))] == [0, 1]


def test_choices_that_were_changed_after_the_run_are_not_judged_by(record: Record, tmp_path: Path) -> None:
    """Ranks were given others then, and would be held against sums of tokens that their experts never had."""
    half = replace(grpo(3), precision="bf16")
    copy = read_record(Path(shutil.copytree(record.path, tmp_path / "float64")))
    assert [batch.step for batch in read_choices(copy, half)] == [0, 1, 2]
    first, *others = read_batches(copy.path / CHOICES)
    write_batches(copy.path / CHOICES, [replace(first, rows=first.rows[::-1]), *others])
    with pytest.raises(RecordError, match="was changed after the run, but ranks used its choices"):
        read_choices(copy, half)
    (copy.path / CHOICES).unlink()
    with pytest.raises(RecordError, match="cannot be read"):
        read_choices(copy, half)


def test_given_its_own_choices_the_oracle_computes_the_same(
    inputs: FrozenInputs, record: Record, tmp_path: Path
) -> None:
    given = FrozenInputs(models=inputs.models, batches=record.path / CHOICES)
    again = computed(grpo(3), given, tmp_path / "float64")
    for one, other in zip(record.steps, again.steps, strict=True):
        assert one.value("loss") == pytest.approx(other.value("loss"), rel=1e-13, abs=0)
        assert one.value("grad_norm") == pytest.approx(other.value("grad_norm"), rel=1e-13, abs=0)


@pytest.mark.exhaustive
def test_choices_of_another_pass_compute_something_else(inputs: FrozenInputs, record: Record, tmp_path: Path) -> None:
    """So a replay that takes the wrong pass is not neutral at the fixtures' sizes."""
    swapped = []
    for batch in read_batches(record.path / CHOICES):
        rows = [Row(row.index, tuple(_with_old_for_reference(d) for d in row.documents)) for row in batch.rows]
        swapped.append(Batch(batch.step, batch.max_len, tuple(rows)))
    swapped[0] = Batch(0, swapped[0].max_len, swapped[0].rows, rollout=tuple(swapped[:2]))
    run_oracle(scenario=grpo(1), models=inputs.models, batches=swapped[:2], out=tmp_path / "o", policy_name="float64")
    own, other = record.steps[0].tensors(), read_record(tmp_path / "o").steps[0].tensors()
    assert float((own["reference.logprob/0"] - other["reference.logprob/0"]).abs().max()) > 1e-3


def _with_old_for_reference(document: Document) -> Document:
    columns = dict(document.columns)
    for layer, slot in SLOTS:
        columns[expert_column(layer, slot, "reference.routing")] = columns[expert_column(layer, slot, "old_routing")]
    return Document(document.tokens, document.targets, columns)


def test_a_mini_batch_that_is_not_trained_on_is_looked_at_all_the_same(tmp_path: Path) -> None:
    scenario = grpo(1)
    computed(scenario, prepare_inputs(scenario, tmp_path), tmp_path / "float64")
    first, second = read_batches(tmp_path / "float64" / CHOICES)
    assert {x for column in experts(second, "routing") for x in column} == {NO_PASS}
    for key in PASSES[1:]:
        assert min(x for column in experts(second, key) for x in column) >= 0
    assert first.rollout[1] == second


def test_a_backend_gives_a_pass_its_own_choices(record: Record) -> None:
    (batch, *_) = read_batches(record.path / CHOICES)
    inputs = collate(batch.rows[:2])
    for key in PASSES:
        given = choices_for(inputs, key).columns
        chosen = {name for name in given if name.startswith(EXPERTS)}
        assert chosen == {expert_column(layer, slot) for layer, slot in SLOTS}
        for layer, slot in SLOTS:
            assert torch.equal(given[expert_column(layer, slot)], inputs.columns[expert_column(layer, slot, key)])
    assert not any(name.startswith(EXPERTS) for name in choices_for(inputs, "critic.routing").columns)
    assert choices_for(inputs, "routing").columns.keys() - inputs.columns.keys() == set()


def test_an_update_keeps_the_choices_of_its_own_step_in_a_later_epoch(record: Record) -> None:
    first, _, again = read_batches(record.path / CHOICES)
    known = [Batch(b.step, b.max_len, tuple(_with(row, "advantage", 2.0) for row in b.rows)) for b in first.rollout]
    rollouts = Rollouts(None, {}, None, known=RolloutColumns(known))  # type: ignore[arg-type]
    found = rollouts.annotated(again)
    assert experts(found, "routing") == experts(again, "routing") != experts(known[0], "routing")
    assert all(document.columns["advantage"] == 2.0 for document in found.documents)


def _with(row: Row, name: str, number: float) -> Row:
    return Row(row.index, tuple(Document(d.tokens, d.targets, {**d.columns, name: number}) for d in row.documents))
