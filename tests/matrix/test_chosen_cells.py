"""Cells that options choose: scenarios, layouts and precisions instead of a profile, models by their name on a hub."""

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from conformance.cli import main as cli
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES, dataset_folder, model_folder
from conformance.data.forms import pair, read_samples
from conformance.matrix.options import Ranks, Selection
from conformance.matrix.profile import select_cells


def chosen(*arguments: str) -> Selection:
    return Selection.from_options(cli._parser().parse_args(["run", "--backend", "fsdp2", *arguments]))


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        (["--layout", "dp2.tp2"], ["sft-packed/pangu/fsdp2/dp2.tp2/exact"]),
        (["--precision", "bf16"], ["sft-packed/pangu/fsdp2/dp2/bf16"]),
        (
            ["--scenario", "sft-sgd,grpo", "--model", "models/llama"],
            ["grpo/llama/fsdp2/dp2/exact", "sft-sgd/llama/fsdp2/dp2/exact"],
        ),
        (
            ["--layout", "tp2, dp2", "--layout", "dp4", "--precision", "fp32,exact"],
            [f"sft-packed/pangu/fsdp2/{layout}" for layout in ("dp2", "tp2", "dp4") for _ in range(2)],
        ),
    ],
)
def test_each_combination_of_the_options_is_a_cell(arguments: list[str], ids: list[str]) -> None:
    cells = select_cells(chosen(*arguments))
    assert len(cells) == len(ids)
    assert all(str(cell).startswith(name) for cell, name in zip(cells, ids, strict=True))


def test_chosen_cells_are_described_by_their_options() -> None:
    """A report names them, a history tells them from those of a profile, and the arguments choose them again."""
    selection = chosen("--layout", "dp2,tp2", "--precision", "bf16")
    assert selection.profile_name == "options"
    assert "profile" not in selection.text(Ranks())
    assert chosen(*Selection(layout=("dp2", "tp2"), precision=("bf16",)).arguments()) == selection


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--layout", "dp2.zp4"], "'zp4' is neither an axis"),
        (["--layout", "dp2-to-tp2"], "is neither an axis"),
        (["--precision", "fp23"], "--precision fp23: did you mean 'fp32'"),
        (["--scenario", "sft-paked"], "did you mean 'sft-packed'"),
        (["--layout", "dp2", "--profile", "full"], "instead of --profile full; leave out one or the other"),
    ],
)
def test_what_cannot_be_chosen_is_explained(arguments: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        select_cells(chosen(*arguments))


# --- models of a hub --------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts a model into an empty cache of the hub, which is offline; returns the folder of the model."""
    repository = tmp_path / "models--acme--tiny-7B"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a1b2")
    folder = repository / "snapshots" / "a1b2"
    shutil.copytree(FIXTURES / "models" / "llama", folder)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


def test_a_model_is_found_by_its_name_in_the_cache(hub: Path) -> None:
    assert model_folder("acme/tiny-7B") == str(hub)
    (cell,) = select_cells(chosen("--layout", "tp2", "--model", "acme/tiny-7B"))
    assert (cell.scenario.model, str(cell)) == (str(hub), "sft-packed/tiny-7B/fsdp2/tp2/exact")


def test_a_folder_goes_before_a_model_of_the_hub(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme" / "tiny-7B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_folder("acme/tiny-7B") == "acme/tiny-7B"


@pytest.mark.usefixtures("hub")
def test_an_unknown_model_is_not_downloaded_offline() -> None:
    with pytest.raises(UsageError, match=r"there is no 'acme/none', .*HF_HUB_OFFLINE is set: unset it, or run: hf"):
        model_folder("acme/none")
    with pytest.raises(UsageError, match=r"there is no 'models/lama', .*did you mean 'models/llama'[^;]*$"):
        model_folder("models/lama")


def test_a_model_without_weights_in_the_cache_is_downloaded(
    hub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def download(name: str, *, local_files_only: bool = False, **_: Any) -> str:
        calls.append(local_files_only)
        return str(hub)

    (hub / "model.safetensors").unlink()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert model_folder("acme/tiny-7B") == str(hub)
    assert calls == [True, False]
    assert "downloading acme/tiny-7B" in capsys.readouterr().err


def test_cells_without_rollouts_of_the_model_are_left_out(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ("--model", str(hub))
    assert {cell.scenario.objective.reads for cell in select_cells(chosen(*own))} == {"samples", "preferences"}
    assert len(select_cells(chosen(*own, "--scenario", "sft-sgd,grpo"))) == 1
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "--backend", "fsdp2", *own, "--scenario", "grpo"]) == 2
    assert "there are no rollouts of tiny-7B, which scenario grpo needs" in capsys.readouterr().err
    assert not (tmp_path / "parity-out").exists()


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prepares a data set of two splits in an empty cache of datasets, which is offline; returns its name's folder."""
    datasets = pytest.importorskip("datasets")
    for split, answer in (("train", "b"), ("test", "d")):
        rows = "".join(f'{{"question": "a{n}", "answer": "{answer}"}}\n' for n in range(2))
        (tmp_path / f"{split}.jsonl").write_text(rows)
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "test")}
    builder = datasets.load_dataset_builder("json", data_files=files, cache_dir=str(tmp_path / "made"))
    builder.download_and_prepare()
    folder = tmp_path / "acme___my_sums"
    shutil.copytree(Path(builder.cache_dir), folder / "main" / "0.0.0" / "a1b2")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return folder


@pytest.mark.parametrize("name", ["acme/MySums", "acme/MySums:main"])
def test_a_data_set_is_found_by_its_name_in_the_cache(cached: Path, name: str) -> None:
    own = chosen("--layout", "dp2", "--data", name, "--split", "test", "--max-len", "50")
    (cell,) = select_cells(own)
    assert read_samples(cell.scenario.data) == [pair("a0", "d"), pair("a1", "d")]
    with pytest.raises(UsageError, match=r"several splits; add --split .*: train, test"):
        select_cells(chosen("--layout", "dp2", "--data", name))


def test_a_data_set_that_is_not_in_the_cache_is_explained(cached: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no 'acme/none', .*HF_HUB_OFFLINE is set"):
        dataset_folder("acme/none")
    shutil.copytree(cached / "main", cached / "socratic")
    with pytest.raises(UsageError, match=r"several configurations .*give one of main, socratic: acme/MySums:NAME"):
        dataset_folder("acme/MySums")
    assert dataset_folder("acme/MySums:socratic") == str(cached / "socratic" / "0.0.0" / "a1b2")
