"""No code of a checkpoint runs: planted in each kind of pickle that a library would read, it is refused before."""

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from conformance.core.errors import UsageError
from impl.checkpoints import manifest
from impl.checkpoints.manifest import FILE, About, FileEntry, Manifest, digest, file_names, verify
from impl.checkpoints.safe_pickle import checked_float8

ABOUT = About(
    form="native", backend="fsdp2", layout="dp2", precision="fp32", objective="sft", optimizer="adamw", step=1,
    world_size=2, models={},
)  # fmt: skip


class Planted:
    """When it is read, a folder is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.folder,)


class Misled(Planted):
    """By way of a function that torch itself allows in other places."""

    def __reduce__(self) -> Any:
        return getattr, (self.folder, "mkdir")


def saved_by_torch(path: Path, planted: Planted) -> None:
    torch.save({"module": planted, "weight": torch.ones(2)}, path / "state.pt")


def with_stack_globals(path: Path, planted: Planted) -> None:
    torch.save([planted], path / "state.pt", pickle_protocol=4)


def of_old_torch(path: Path, planted: Planted) -> None:
    torch.save([planted], path / "state.pt", _use_new_zipfile_serialization=False)


def plain_pickle(path: Path, planted: Planted) -> None:
    (path / "state.pt").write_bytes(pickle.dumps(planted))


def torchscript(path: Path, planted: Planted) -> None:
    saved_by_torch(path, planted)
    with zipfile.ZipFile(path / "state.pt", "a") as archive:
        archive.writestr("state/constants.pkl", pickle.dumps(()))


def in_metadata(path: Path, planted: Planted) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(planted))


def inside_of_metadata(path: Path, planted: Planted) -> None:
    metadata = distributed(path, {"weight": torch.ones(2)})
    metadata.planner_data = planted
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def in_a_value(path: Path, planted: Planted) -> None:
    distributed(path, {"weight": torch.ones(2), "scheduler": planted})


def in_a_value_elsewhere(path: Path, planted: Planted) -> None:
    """The metadata leads out of the folder."""
    metadata = distributed(path, {"scheduler": 1})
    torch.save(planted, path.parent / "elsewhere")
    for place in metadata.storage_data.values():
        place.relative_path = "../elsewhere"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def in_what_should_be_a_tensor(path: Path, planted: Planted) -> None:
    """No entry says what kind of value it is."""
    metadata = distributed(path, {"scheduler": planted})
    metadata.state_dict_metadata.clear()
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def distributed(path: Path, state: dict[str, Any]) -> Any:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return dcp.FileSystemReader(path).read_metadata()


PLANTS = (
    *(saved_by_torch, with_stack_globals, of_old_torch, plain_pickle, torchscript, in_metadata, inside_of_metadata),
    *(in_a_value, in_a_value_elsewhere, in_what_should_be_a_tensor),
)


def forge(folder: Path) -> None:
    """The manifest that whoever planted the code would write."""
    files = {n: FileEntry(size=(folder / n).stat().st_size, sha256=digest(folder / n)) for n in file_names(folder)}
    (folder / FILE).write_text(manifest.to_text(Manifest(suite_version="", about=ABOUT, files=files)), encoding="utf-8")


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("kind", [Planted, Misled])
def test_planted_code_is_refused_and_not_run(
    tmp_path: Path, plant: Callable[[Path, Planted], None], kind: type[Planted]
) -> None:
    folder, made = tmp_path / "checkpoint" / "policy", tmp_path / "made"
    folder.mkdir(parents=True)
    plant(folder, kind(made))
    forge(folder.parent)
    with pytest.raises(UsageError, match=f"{folder}.* is rejected: "):
        verify(folder.parent, ABOUT)
    assert not made.exists()


def test_the_planted_code_would_run(tmp_path: Path) -> None:
    saved_by_torch(tmp_path, Planted(tmp_path / "made"))
    torch.load(tmp_path / "state.pt", weights_only=False)
    assert (tmp_path / "made").exists()
    with pytest.raises(FileExistsError):
        pickle.load(io.BytesIO(pickle.dumps(Planted(tmp_path / "made"))))


def test_a_value_outside_of_the_folder_is_refused_whatever_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    metadata = distributed(folder, {"lr": 0.1})
    torch.save(0.1, tmp_path / "elsewhere")
    for place in metadata.storage_data.values():
        place.relative_path, place.offset, place.length = "../elsewhere", 0, (tmp_path / "elsewhere").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    forge(folder)
    with pytest.raises(UsageError, match=r"\.metadata is rejected: it says that 'lr' lies in .*elsewhere"):
        verify(folder, ABOUT)


def test_honest_values_are_not_refused(tmp_path: Path) -> None:
    distributed(tmp_path, {"weight": torch.ones(2), "lr": 0.1, "betas": (0.9, 0.95), "name": "adamw", "none": None})
    torch.save({"module": {"weight": torch.ones(2)}, "lr": 0.1}, tmp_path / "state.pt")
    forge(tmp_path)
    verify(tmp_path, ABOUT)


@pytest.mark.parametrize("kind", [Planted, Misled])
def test_no_code_of_a_state_of_float8_runs(tmp_path: Path, kind: type[Planted]) -> None:
    """TransformerEngine unpickles these bytes; a tensor in them is a pickle of its own."""

    class Hidden:
        def __reduce__(self) -> Any:
            torch.save(kind(tmp_path / "planted"), file := io.BytesIO())
            return torch.storage._load_from_bytes, (file.getvalue(),)

    for found in (kind(tmp_path / "planted"), {"scale_fwd": Hidden()}):
        state = torch.frombuffer(bytearray(pickle.dumps(found)), dtype=torch.uint8)
        with pytest.raises(UsageError, match=r"is rejected: (it|a tensor in it) names "):
            checked_float8(state, "layer 1")
    with pytest.raises(UsageError, match="layer 1 is rejected: invalid load key"):
        checked_float8(torch.tensor([1, 2, 3], dtype=torch.uint8), "layer 1")
    assert not (tmp_path / "planted").exists()


def test_a_state_of_float8_is_what_it_was() -> None:
    state: dict[str, Any] = {
        "scale_fwd": torch.arange(3.0),
        "amax_history_fwd": torch.rand(4, 3),
        "extra_fp8_variables": {"num_gemms": 1},
    }
    checked = checked_float8(torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8), "")
    found = pickle.loads(checked.numpy().tobytes())
    assert found["extra_fp8_variables"] == state["extra_fp8_variables"]
    assert all(torch.equal(found[name], state[name]) for name in ("scale_fwd", "amax_history_fwd"))
    assert not checked_float8(torch.empty(0, dtype=torch.uint8), "").numel()
