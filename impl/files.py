"""Reads slices of tensors from safetensors files and writes tensors one by one, without holding a whole model."""

import contextlib
import json
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from conformance.backend import NamedTensors
from conformance.inputs.model import INDEX, SINGLE
from conformance.validation import UsageError
from impl.together import agree

# torch dtypes by their names in safetensors files.
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FILE_SIZE = 2**30  # the most bytes of tensors in one file; a single larger tensor has a file of its own


class SliceReader:
    """Reads slices of named tensors from several safetensors files. Use it in a ``with`` statement.

    All methods give the dtype of the file, and raise UsageError for a tensor that is in none of the files.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._where: dict[str, Any] = {}

    def __enter__(self) -> "SliceReader":
        self._files = contextlib.ExitStack()
        for path in self._paths:
            file = self._files.enter_context(safe_open(path, framework="pt"))
            self._where |= dict.fromkeys(file.keys(), file)
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def __call__(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """The slice ``[start:stop]`` of a tensor along dimension ``dim``, 0 or 1."""
        piece = self._file(name).get_slice(name)
        tensor: torch.Tensor = piece[start:stop] if dim == 0 else piece[:, start:stop]
        return tensor

    def region(self, name: str, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """The region of a tensor that begins at the indices ``start`` and has this ``shape``."""
        piece = self._file(name).get_slice(name)
        tensor: torch.Tensor = piece[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))]
        return tensor

    def whole(self, name: str) -> torch.Tensor:
        """The whole tensor."""
        tensor: torch.Tensor = self._file(name).get_tensor(name)
        return tensor

    def _file(self, name: str) -> Any:
        if name not in self._where:
            files = ", ".join(map(str, self._paths))
            raise UsageError(f"no tensor {name!r} in {files or 'an empty folder'}; give the complete folder")
        return self._where[name]


class TensorWriter:
    """Writes tensors into a folder in Hugging Face's layout: one safetensors file, or several files with an index.

    Use it in a ``with`` statement. At most one file's tensors are in memory. The safetensors files of an older save are
    removed from the folder first.
    """

    def __init__(self, folder: Path, *, file_size: int = FILE_SIZE) -> None:
        self._folder, self._file_size = folder, file_size
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_size = self._size = 0
        self._files: list[tuple[Path, list[str]]] = []

    def __enter__(self) -> "TensorWriter":
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in (*self._folder.glob("*.safetensors"), self._folder / INDEX):
            old.unlink(missing_ok=True)
        return self

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._pending and self._pending_size + tensor.nbytes > self._file_size:
            self._write()
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_size += tensor.nbytes
        self._size += tensor.nbytes

    def _write(self) -> None:
        path = self._folder / f"part-{len(self._files)}.safetensors"
        save_file(self._pending, path, metadata={"format": "pt"})
        self._files.append((path, list(self._pending)))
        self._pending, self._pending_size = {}, 0

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        if self._pending or not self._files:
            self._write()
        count = len(self._files)
        if count == 1:
            self._files[0][0].rename(self._folder / SINGLE)
            return
        where: dict[str, str] = {}
        for number, (path, names) in enumerate(self._files, start=1):
            name = f"model-{number:05d}-of-{count:05d}.safetensors"
            path.rename(self._folder / name)
            where |= dict.fromkeys(names, name)
        told = {"metadata": {"total_size": self._size}, "weight_map": where}
        (self._folder / INDEX).write_text(json.dumps(told, indent=2), encoding="utf-8")


def write_tensors(folder: Path, tensors: NamedTensors, *, file_size: int) -> None:
    """Write full tensors into a folder, from the first rank; collective. A full disk is told on every rank."""
    failed = None
    try:
        if dist.get_rank() == 0:
            with TensorWriter(folder, file_size=file_size) as writer:
                for name, tensor in tensors:
                    writer.add(name, tensor)
                    del tensor  # before the next one is put together
    except Exception as error:
        failed = error
    run_through(tensors)
    agree(f"writing tensors into {folder}", failed)


def run_through(tensors: Iterator[object]) -> None:
    """Put tensors together without holding any: on the first rank, what is left when it cannot write."""
    deque(tensors, maxlen=0)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder, which replaces ``folder`` when the ``with`` block ends without an error.

    If the process ends before that, an older ``folder`` stays as it was. The replacement takes two renames; between
    them the older folder is called ``.NAME.replaced``, and the next call restores it if the process ended there.
    """
    beside = folder.with_name(f".{folder.name}.unfinished")
    replaced = folder.with_name(f".{folder.name}.replaced")
    if replaced.exists() and not folder.exists():  # a process ended between the two renames
        replaced.rename(folder)
    for left in (beside, replaced):
        shutil.rmtree(left, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(replaced)
    beside.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)
