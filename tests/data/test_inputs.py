"""Frozen inputs: what is written to disk for backends and oracle is what was built, columns included, and made once."""

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import toy_objectives
from safetensors import safe_open

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.core.io import complete_or_nothing
from conformance.data.inputs import FrozenInputs, build_batches, prepare_inputs
from conformance.models import folders
from conformance.models.families import read_architecture
from conformance.models.folders import prepare_model
from conformance.spec.batch import Batch, Document, Row, read_batches, write_batches
from conformance.spec.objectives import Objective, Ppo
from conformance.spec.offline import Sft
from conformance.spec.scenario import Scenario, parse_scenario

TOKENS = (5, 0, 17, 2)


def scenario(objective: Objective | None = None, **changes: Any) -> Scenario:
    values: dict[str, Any] = {
        "name": "any",
        "model": "models/llama",
        "precision": "exact",
        "optimizer": {"name": "sgd", "lr": 0.1},
    }
    values |= {"steps": 2, "objective": objective or Sft(), "data": {"rows": 6}}
    return parse_scenario(values | changes)


def document(*, columns: dict[str, Any], length: int = 4) -> Document:
    return Document(TOKENS[:length], (False, *([True] * (length - 1))), columns)


def batches(rows: Sequence[tuple[Document, ...]], *, steps: int = 1) -> list[Batch]:
    """Batches whose first step is not 0 and whose last row has another number of documents in every step."""
    return [
        Batch(3 + step, 96, tuple(Row(i, documents) for i, documents in enumerate((*rows, rows[0] * (step + 1)))))
        for step in range(steps)
    ]


# --- the file of batches ---------------------------------------------------------------------------------------------


def test_batches_survive_the_way_through_a_file(tmp_path: Path) -> None:
    short, whole = document(columns={}, length=1), document(columns={})
    masked = dataclasses.replace(whole, targets=(False,) * 4)
    built = batches([(short, whole), (masked,), (whole, short, masked)], steps=3)
    write_batches(tmp_path / "batches", built)
    assert read_batches(tmp_path / "batches") == built


def test_columns_survive_to_the_last_digit_per_token_and_per_document(tmp_path: Path) -> None:
    third = 1 / 3  # has no end in binary, and would not survive float32
    first = document(columns={"advantage": (0.0, third, -2.5, 1e300), "reward": third})
    second = document(columns={"advantage": (-third,), "reward": -0.0}, length=1)
    built = batches([(first, second), (second,)], steps=2)
    write_batches(tmp_path / "batches", built)
    (read, *_) = again = read_batches(tmp_path / "batches")
    assert again == built
    assert [d.columns["advantage"] for d in read.documents[:2]] == [(0.0, third, -2.5, 1e300), (-third,)]
    assert [d.columns["reward"] for d in read.documents[:2]] == [third, -0.0]
    assert all(isinstance(d.columns["reward"], float) for d in read.documents)


def test_a_number_per_document_is_not_taken_for_one_per_token_of_a_single_token(tmp_path: Path) -> None:
    built = batches([(document(columns={"a": (0.5,), "b": 0.5}, length=1),)])
    write_batches(tmp_path / "batches", built)
    (read,) = read_batches(tmp_path / "batches")
    assert read.documents[0].columns == {"a": (0.5,), "b": 0.5}


def test_numbers_have_a_place_each_and_are_float64(tmp_path: Path) -> None:
    write_batches(tmp_path / "batches", batches([(document(columns={"a": (0.1, 0.2, 0.3, 0.4), "b": 1.0}),)], steps=2))
    with safe_open(tmp_path / "batches", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert str(tensors["column/a"].dtype) == str(tensors["column/b"].dtype) == "torch.float64"
    assert tensors["column/a"].shape == tensors["tokens"].shape
    assert tensors["column/b"].shape == tensors["documents"].shape
    assert tensors["steps"].tolist() == [2, 2]
    assert tensors["rows"].tolist() == [1, 1, 1, 2]


@pytest.mark.parametrize("numbers", [(1.0, 2.0, 3.0), (1.0,) * 5])
def test_a_column_has_a_number_for_every_token(numbers: tuple[float, ...]) -> None:
    with pytest.raises(AssertionError, match="advantage needs a number per token"):
        document(columns={"advantage": numbers})


# --- the folder ------------------------------------------------------------------------------------------------------


def test_what_is_frozen_is_what_was_built(tmp_path: Path) -> None:
    frozen = prepare_inputs(scenario(), tmp_path)
    assert frozen.models.keys() == {"policy"}
    assert read_batches(frozen.batches) == build_batches(scenario(), FIXTURES / "models" / "llama")


def test_the_objective_fills_in_its_columns_before_batches_are_frozen(tmp_path: Path) -> None:
    for objective, column in ((toy_objectives.WeightedSft(), "weight"), (toy_objectives.PolicyAndValue(), "return")):
        frozen = read_batches(prepare_inputs(scenario(objective), tmp_path).batches)
        assert frozen == objective.annotate(build_batches(scenario(), FIXTURES / "models" / "llama"))
        for batch in frozen:
            assert all(tuple(document.columns) == (column,) for document in batch.documents)


def test_every_role_has_a_folder_of_its_own(tmp_path: Path) -> None:
    frozen = prepare_inputs(scenario(toy_objectives.PolicyAndValue()), tmp_path)
    assert list(frozen.models) == ["reference", "policy", "critic"]
    contents = {(folder / "model.safetensors").read_bytes() for folder in frozen.models.values()}
    assert len(contents) == 3
    heads = {role: read_architecture(folder).value_head for role, folder in frozen.models.items()}
    assert heads == {"reference": False, "policy": False, "critic": True}
    assert prepare_inputs(scenario(), tmp_path).models["policy"] == frozen.models["policy"]


def files_of(frozen: FrozenInputs) -> list[Path]:
    return [frozen.batches, *(file for folder in frozen.models.values() for file in folder.iterdir())]


def test_inputs_are_made_once_and_shared(tmp_path: Path) -> None:
    frozen = prepare_inputs(scenario(), tmp_path)
    times = {file: file.lstat().st_mtime_ns for file in files_of(frozen)}
    same = scenario(precision="bf16", accumulation=3, name="other", optimizer={"name": "adamw", "lr": 0.3})
    assert prepare_inputs(same, tmp_path) == frozen
    assert {file: file.lstat().st_mtime_ns for file in files_of(frozen)} == times


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"steps": 3},
        {"model": "models/qwen3"},
        {"data": {"rows": 12}},
        {"data": {"rows": 6, "packed": True, "max_len": 160}},
        {"objective": toy_objectives.WeightedSft()},
        {"objective": toy_objectives.WeightedSft(power=2.0)},
    ],
    ids=str,
)
def test_what_would_be_other_batches_is_another_file(tmp_path: Path, change: dict[str, Any]) -> None:
    base = scenario(toy_objectives.WeightedSft(power=0.5))
    changed = scenario(**{"objective": toy_objectives.WeightedSft(power=0.5), **change})
    first, second = (prepare_inputs(each, tmp_path) for each in (base, changed))
    assert first.batches != second.batches
    assert (first.models == second.models) == (set(change) <= {"steps", "data", "objective"})


def test_what_was_interrupted_is_made_again(tmp_path: Path) -> None:
    frozen = prepare_inputs(scenario(), tmp_path)
    before = read_batches(frozen.batches)
    folders = frozen.models["policy"]
    frozen.batches.rename(frozen.batches.with_name(f"{frozen.batches.name}.unfinished"))
    folders.rename(folders.with_name(f"{folders.name}.unfinished"))
    again = prepare_inputs(scenario(), tmp_path)
    assert again == frozen
    assert read_batches(again.batches) == before
    assert (folders / "config.json").is_file()


def test_a_model_that_no_oracle_can_compute_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ValueError, match="MambaForCausalLM, which takes no position_ids"):
        prepare_inputs(scenario(model=str(folder)), tmp_path / "out")
    assert not list((tmp_path / "out").glob("inputs/mine*"))


def test_a_data_set_that_cannot_be_used_leaves_no_file_behind(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no column 'prompt'"):
        prepare_inputs(scenario(data={"rows": 6, "input_key": "prompt"}), tmp_path)
    assert not list(tmp_path.glob("inputs/batches*"))


# --- what belongs to the user ----------------------------------------------------------------------------------------


def save_in_place(tensors: dict[str, torch.Tensor], target: Path, *, metadata: dict[str, str] | None) -> None:
    """As versions of safetensors write that do not rename a new file: through a link."""
    target.write_bytes(safetensors.torch.save(tensors, metadata=metadata))


@pytest.mark.parametrize("save", [safetensors.torch.save_file, save_in_place])
def test_nothing_is_written_through_the_links_to_the_users_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[..., None]
) -> None:
    """Nor where an earlier attempt left links, or a caller would write where one is."""
    monkeypatch.setattr(folders, "save_file", save)
    source = Path(shutil.copytree(FIXTURES / "models" / "llama", tmp_path / "llama"))
    before = {file: file.read_bytes() for file in source.rglob("*") if file.is_file()}
    asked = scenario(Ppo(), model=str(source), data={"path": "data/rollouts.jsonl", "rows": 6})
    of_role = {role.name: role for role in asked.objective.roles}
    policy = prepare_model(asked, of_role["policy"], tmp_path / "policy")
    (link,) = policy.glob("*.safetensors")
    assert link.resolve() == source / "model.safetensors"
    with complete_or_nothing(tmp_path / "made") as unfinished:
        unfinished.mkdir()
        (unfinished / link.name).symlink_to(link.resolve())
    with complete_or_nothing(tmp_path / "critic") as unfinished:
        prepare_model(asked, of_role["critic"], unfinished)
    folders._perturb(source / link.name, link, key="7", twins={}, role=of_role["critic"], rounded=False)
    folders._make_value_model(policy, key="7")
    assert not link.is_symlink()
    assert {file: file.read_bytes() for file in source.rglob("*") if file.is_file()} == before
