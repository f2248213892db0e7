"""Pickles in checkpoints: read by an allow list, because whatever else a pickle names is called when it is read.

Two files of libraries are pickles: the ``.pt`` of torch, which DeepSpeed reads with everything allowed, and the
``.metadata`` of torch.distributed.checkpoint. Both are checked before a library opens them; here they are read without
calling anything of a library but its plain containers. The lists are what honest checkpoints hold and no more.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from conformance.validation import UsageError, one_line, shown

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint.metadata"
ALLOWED_IN_METADATA = {
    *((_DCP, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex")),
    *((_DCP, name) for name in ("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # a layout by its name
    *(("torch", dtype) for dtype in ("float64", "float32", "bfloat16", "float16", "int64", "bool")),
    ("pathlib", "PosixPath"),
}
# Beside what torch itself allows where only weights are read.
ALLOWED_IN_TORCH_FILES = {
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}


class Opaque:
    """Stands for an object of a library: its attributes as they are in the file, none of its code."""

    def __init__(self, *values: Any) -> None:
        self.values = values


def check_pickle(path: Path) -> None:
    """Raises UsageError where a file is a pickle that a library would read, and holds what no honest one does."""
    if path.name == METADATA:
        read_metadata(path)
    elif path.suffix == ".pt":
        _check_torch_file(path)


def read_metadata(path: Path) -> Any:
    """The object in a ``.metadata`` of torch.distributed.checkpoint. Raises UsageError; runs no code of the file."""
    try:
        with path.open("rb") as file:
            return _Metadata(file).load()
    except pickle.UnpicklingError as error:
        raise UsageError(f"{path} is refused: {one_line(error)}") from None
    except Exception as error:  # pickle raises what it likes at a broken file
        raise UsageError(
            f"{path} is no metadata that can be read: {one_line(error)}; give another checkpoint"
        ) from None


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED_IN_METADATA:
            raise pickle.UnpicklingError(f"it names {shown(f'{module}.{name}')}, which no checkpoint needs")
        return super().find_class(module, name)


def _check_torch_file(path: Path) -> None:
    """torch disassembles the pickle without running it, and raises at opcodes that could hide a name."""
    try:
        named = set(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    except Exception as error:  # ValueError, RuntimeError, UnpicklingError, EOFError and more
        raise UsageError(f"{path} is refused: torch cannot tell what is in it: {one_line(error)}") from None
    if foreign := sorted(named - ALLOWED_IN_TORCH_FILES):
        raise UsageError(f"{path} is refused: it names {shown(', '.join(foreign))}, which no checkpoint needs")


def read_torch_file(path: Path) -> Any:
    """What torch.save wrote, with tensors that are read from the file when they are used, and Opaque for objects of
    DeepSpeed. Raises UsageError; runs no code of the file."""
    _check_torch_file(path)
    return _load(path, mmap=True)


def read_torch_bytes(data: bytes, *, source: Path) -> Any:
    """The same for a part of the file ``source``, as torch.distributed.checkpoint has one for each small value."""
    return _load(source, io.BytesIO(data))


def _load(path: Path, data: io.BytesIO | None = None, **options: Any) -> Any:
    # torch wants another type for each name.
    stand_ins: list[Any] = [(type("Opaque", (Opaque,), {}), name) for name in sorted(ALLOWED_IN_TORCH_FILES)]
    try:
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(data or path, map_location="cpu", weights_only=True, **options)
    except Exception as error:  # UnpicklingError, RuntimeError, EOFError and more
        raise UsageError(f"{path} is no file of torch that can be read: {one_line(error)}") from None
