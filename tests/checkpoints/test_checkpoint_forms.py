"""Checkpoints of other trainers are read, or refused with the command to run first; damage gives a clear error."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from test_checkpoint_pickles import forge

from conformance.cli import main as cli
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from impl.convert.convert import FOREIGN, LFS, ForeignForm, convert, open_checkpoint

MODEL = FIXTURES / "models" / "llama"
DTYPES = ("int64", "bool", "uint8", "int8", "int32", "complex64", "float8_e4m3fn", "float16")


def saved(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def weights() -> dict[str, torch.Tensor]:
    return dict(load_file(MODEL / "model.safetensors"))


def to_hf(folder: Path) -> dict[str, torch.Tensor]:
    new = folder.with_name("new")
    convert(folder, new, to="hf", model=MODEL, report=lambda *_: None)
    return dict(load_file(new / "model.safetensors"))


def refused(folder: Path, *, only: str = "convert") -> str:
    """The message of a conversion that is refused and leaves nothing."""
    before = sorted(folder.parent.iterdir())
    with pytest.raises(UsageError) as error:
        open_checkpoint(folder) if only == "inspect" else to_hf(folder)
    assert sorted(folder.parent.iterdir()) == before
    return str(error.value)


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES])
def test_inspect_lists_tensors_of_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    extra = torch.zeros(3).to(dtype)
    found = open_checkpoint(saved(tmp_path / "ckpt", {"model": {"w": torch.ones(2)}, "extra": extra}))
    assert [(one.kind, one.name, one.dtype) for one in found.of_kind("other")] == [("other", "extra", dtype)]


@pytest.mark.parametrize("nested", [True, False], ids=["under model", "state dict alone"])
def test_weights_keep_their_names_in_either_nesting(tmp_path: Path, nested: bool) -> None:
    found = to_hf(saved(tmp_path / "ckpt", {"model": weights()} if nested else weights()))
    assert found.keys() == weights().keys()
    assert all(torch.equal(found[name], weight) for name, weight in weights().items())


@pytest.mark.parametrize("form", FOREIGN, ids=lambda form: form.name)
def test_foreign_form_is_refused_with_its_command(tmp_path: Path, form: ForeignForm) -> None:
    folder = tmp_path / "run" / "step_1" / "ckpt"
    for pattern in form.patterns:
        path = folder / pattern.replace("*", "0")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    message = refused(folder)
    assert form.name in message
    assert form.advice.format(folder=folder) in message
    assert f"give one of {folder}" in refused(tmp_path / "run")


def test_moments_of_the_trainer_are_said_to_be_unread(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MODEL, tmp_path / "ckpt"))
    (folder / "optimizer.pt").write_bytes(b"")
    assert open_checkpoint(folder).facts["not read"] == "optimizer.pt"
    assert "its optimizer.pt numbers moments without names" in refused(folder)


def test_moments_without_a_number_of_updates_are_refused(tmp_path: Path) -> None:
    state = {name: {"exp_avg": weight} for name, weight in weights().items()}
    folder = saved(tmp_path / "ckpt", {"model": weights(), "optimizer": {"state": state}})
    with pytest.raises(UsageError, match="does not say after how many updates"):
        convert(folder, tmp_path / "new", to="state", model=None, report=lambda *_: None)
    assert to_hf(folder).keys() == weights().keys()


@pytest.mark.parametrize("command", [["inspect"], ["convert", "new", "--to", "hf", "--model", str(MODEL)]])
def test_damage_is_found_by_the_manifest_above(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = saved(tmp_path / "step" / "policy", {"model": weights()})
    forge(folder.parent)
    arguments = [command[0], str(folder), *command[1:]]
    assert cli.main(arguments) == 0
    shutil.rmtree("new", ignore_errors=True)
    file = next(folder.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    assert cli.main(arguments) == 2
    assert f"{file} is damaged: its bytes have changed" in capsys.readouterr().err
    assert not Path("new").exists()


@pytest.mark.parametrize("key", ["model.norm.weight", "optimizer.state.model.norm.weight.exp_avg"])
def test_fp8_is_refused_by_name(tmp_path: Path, key: str) -> None:
    scaled = {key: torch.ones(64).to(torch.float8_e4m3fn)}
    message = refused(saved(tmp_path / "ckpt", {"model": weights()} | scaled))
    assert "norm.weight is float8_e4m3fn, whose scales no training state has" in message


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def fill(path: Path) -> None:
    path.write_bytes(b"no checkpoint" * 10_000)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def point(path: Path) -> None:
    path.write_bytes(LFS + b"v1\noid sha256:0\nsize 1\n")


def break_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


DAMAGES = (Path.unlink, cut, fill, pipe, point, break_link, lambda path: os.truncate(path, 0))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_damaged_shard_is_one_error_and_leaves_nothing(
    tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    folder = saved(tmp_path / "ckpt", {"model": weights()})
    damage(folder / name)
    assert str(folder) in refused(folder)


@pytest.mark.parametrize(
    ("damage", "words"),
    [(pipe, "is a folder, a pipe, "), (break_link, "is .* or a broken link"), (point, "is a Git LFS .*: git lfs pull")],
)
@pytest.mark.parametrize("name", ["model.safetensors", "extra/notes.txt"])
def test_what_is_no_file_is_refused_by_its_name(
    tmp_path: Path, damage: Callable[[Path], None], words: str, name: str
) -> None:
    folder = Path(shutil.copytree(MODEL, tmp_path / "ckpt"))
    (folder / "extra").mkdir()
    (folder / "extra" / "notes.txt").write_text("x")
    damage(folder / name)
    with pytest.raises(UsageError, match=f"{name} {words}"):
        open_checkpoint(folder)


HUGE: Any = ["x"] * 10
for _ in range(9):
    HUGE = [HUGE] * 10


@pytest.mark.parametrize(
    "changes",
    [{"global_steps": HUGE}, {"mp_world_size": {}}, {"checkpoint_parallel_dimensions": {"pp_degree": HUGE}}],
)
def test_facts_of_deepspeed_are_numbers(tmp_path: Path, changes: dict[str, Any]) -> None:
    torch.save({"module": {}, "ds_config": {}, "global_steps": 1} | changes, tmp_path / "mp_rank_00_model_states.pt")
    assert "must be a number, got a" in refused(tmp_path, only="inspect")


@pytest.mark.parametrize("tag", [b"\xff", b"x" * 300, b"../x"])
def test_latest_of_deepspeed_may_hold_anything(tmp_path: Path, tag: bytes) -> None:
    (tmp_path / "latest").write_bytes(tag)
    refused(tmp_path, only="inspect")
