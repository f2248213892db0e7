"""Reads checkpoints of torch.distributed.checkpoint that FSDP2 wrote, and their common parts with megatron-core's.

Their ``.metadata`` is a pickle. Only impl.checkpoints.safe_pickle reads it, even when the library loads a tensor.
"""

import io
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata

from conformance.core.errors import UsageError, one_line, shown
from impl.checkpoints.safe_pickle import METADATA, check_sums, read_metadata, read_torch_bytes
from impl.checkpoints.training_state import WRITTEN, Checkpoint, StoredTensor
from impl.convert import torchtitan

HEAD_ALONE = "lm_head.weight"  # its name in a model's own state dict, which some trainers save without a prefix
_STATE = re.compile(r"optimizer\.state\.(.+)\.([^.]+)")


def open_fsdp2(folder: Path) -> Checkpoint:
    """Opens a checkpoint of FSDP2: ``model.NAME``, ``optimizer.state.NAME.KIND``, schedule and loss scale."""
    metadata = read_metadata(folder / METADATA)
    stored = stored_tensors(metadata)
    prefix = "" if HEAD_ALONE in stored else "model."
    of = torchtitan.FORM if torchtitan.has_names(stored) else ""
    is_weight = torchtitan.is_weight if of else lambda key: key.startswith("model.") or key == HEAD_ALONE
    tensors = tuple(_describe(key, entry, prefix, is_weight=is_weight) for key, entry in stored.items())
    whole = tensor_reader(folder, metadata)

    def read(tensor: StoredTensor) -> torch.Tensor:
        return whole(tensor.place)

    values = {
        name: read_value(folder, metadata, key)
        for name, key in (
            ("schedule", "scheduler.last_epoch"),
            ("schedule", "lr_scheduler.last_epoch"),  # of torchtitan
            ("loss_scale", "scaler.scale"),
            ("good_steps", "scaler._growth_tracker"),
        )
        if isinstance(metadata.state_dict_metadata.get(key), BytesStorageMetadata)
    }
    steps = {float(read(tensor)) for tensor in tensors if tensor.kind == "step"}
    return Checkpoint(
        format=f"torch.distributed.checkpoint{of}",
        facts={"writers": writers(metadata), **({"step": max(steps)} if steps else {})},
        tensors=tensors,
        progress={name: float(value) for name, value in values.items()},
        read=read,
    )


def tensor_reader(folder: Path, metadata: Metadata) -> Callable[[str], torch.Tensor]:
    """Returns a function that reads whole tensors by key; the library assembles them from the pieces in its files."""
    stored, reader = stored_tensors(metadata), _Reader(folder, metadata)
    pieces = defaultdict[str, list[Any]](list)
    for index, place in (metadata.storage_data or {}).items():
        pieces[index.fqn].append(place)

    def read(key: str) -> torch.Tensor:
        for place in pieces[key]:
            path, piece = _piece(folder, place)
            check_sums(io.BytesIO(piece), f"{path}, {shown(key)},")
        tensor = torch.empty(tuple(stored[key].size), dtype=stored[key].properties.dtype)
        try:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # it warns of a single process
                dcp.load({key: tensor}, storage_reader=reader, no_dist=True)
        except (Exception, CheckpointException) as error:  # the latter is not an Exception
            failures = getattr(error, "failures", {})
            cause = next((one for one, _ in failures.values()), error)
            raise UsageError(
                f"{folder}: the tensor {shown(key)} cannot be read: {type(cause).__name__}: {one_line(cause)}; a file "
                f"is missing or damaged, give another checkpoint"
            ) from None
        return tensor

    return read


def stored_tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    found = metadata.state_dict_metadata.items()
    return {key: entry for key, entry in found if isinstance(entry, TensorStorageMetadata)}


def _describe(key: str, entry: TensorStorageMetadata, prefix: str, *, is_weight: Callable[[str], bool]) -> StoredTensor:
    kind, name = "other", key
    if match := _STATE.fullmatch(key):
        if match[2] in WRITTEN:
            name, kind = match.groups()
    elif is_weight(key):
        kind, name = "weight", key.removeprefix(prefix)
    return StoredTensor(kind=kind, name=name, shape=tuple(entry.size), dtype=entry.properties.dtype, place=key)


def writers(metadata: Metadata) -> int:
    """Counts the ranks that have written a file; the first number of a file's name is the rank."""
    files = Counter(Path(stored.relative_path).name for stored in (metadata.storage_data or {}).values())
    return len({match[1] for name in files if (match := re.match(r"__(\d+)_", name))})


def read_value(folder: Path, metadata: Metadata, key: str) -> Any:
    """Reads a small value, which torch has saved separately within one of the files."""
    (stored,) = (entry for index, entry in (metadata.storage_data or {}).items() if index.fqn == key)
    path, piece = _piece(folder, stored)
    return read_torch_bytes(piece, source=path)


def _piece(folder: Path, stored: Any) -> tuple[Path, bytes]:
    """Reads the part of a file that holds a value or a part of a tensor."""
    path = _inside(folder, stored.relative_path)
    try:
        with path.open("rb") as file:
            file.seek(stored.offset)
            return path, file.read(stored.length)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; give another checkpoint") from None


def _inside(folder: Path, name: str) -> Path:
    if Path(name).name != name:
        raise UsageError(f"{folder / METADATA} names the file {name!r}, which is not in this folder")
    return folder / name


class _Reader(dcp.FileSystemReader):
    """Gives the library's reader metadata that has been read safely, so it does not unpickle the file."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        for stored in (metadata.storage_data or {}).values():
            _inside(folder, stored.relative_path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata
