"""Pickles in checkpoints: read by an allow list, because whatever else a pickle names is called when it is read.

Two files of libraries are pickles: the ``.pt`` of DeepSpeed, which torch reads with everything allowed, and the
``.metadata`` of torch.distributed.checkpoint. Both are checked before the library opens them; the latter is also read
here, and never by the library. The lists are what honest checkpoints hold and no more; tests/test_checkpoints.py plants
code and sees it refused.
"""

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
ALLOWED_IN_TORCH_FILES: set[str] = set()


def check_pickle(path: Path) -> None:
    """Raises UsageError where a file is a pickle that a library would read, and holds what no honest one does."""
    if path.name == METADATA:
        read_metadata(path)
    elif path.suffix == ".pt":
        _check_torch_file(path)


def read_metadata(path: Path) -> Any:
    """What a ``.metadata`` file of torch.distributed.checkpoint holds. Raises UsageError; runs no code of the file."""
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
