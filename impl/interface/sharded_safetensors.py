"""Reads slices of tensors from safetensors files and writes tensors one by one, without holding a whole model."""

import contextlib
import copy
import json
import math
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from conformance.backends.protocol import NamedTensors
from conformance.core.errors import UsageError
from conformance.models.folders import INDEX, SINGLE
from impl.interface.distributed import agree

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
CHUNK = 2**20  # elements that are read at a time
MAPPED = 2**25  # bytes of files that a reader keeps mapped into memory, at most, beside the chunk that it reads


class Regions(Protocol):
    """Declares a reader of regions of named tensors."""

    def region(self, name: str, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor: ...


class SliceReader:
    """Reads slices of named tensors from several safetensors files. Use it in a ``with`` statement.

    device: where slices are put, in the dtype of the file. Casts afterwards run there: a host takes seconds to cast a
        billion numbers to float64, and bfloat16 is a quarter of the bytes to copy.

    All methods return the dtype of the file, and raise UsageError for a tensor that is in none of the files. A slice on
    the CPU may lie in the file's own pages, so copy it and drop the reference.
    """

    def __init__(self, paths: Sequence[Path], *, device: str = "cpu") -> None:
        self._paths, self.device = paths, device
        self._where: dict[str, Path] = {}
        self._opened: dict[Path, Any] = {}
        self._mapped = 0

    def __enter__(self) -> "SliceReader":
        for path in self._paths:
            self._where |= dict.fromkeys(self._file(path).keys(), path)
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def __call__(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Reads the slice ``[start:stop]`` of a tensor along dimension ``dim``, 0 or 1."""
        span = slice(start, stop)
        return self.slice(name, (span,) if dim == 0 else (slice(None), span))

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(self._where[name]).get_slice(name).get_shape())

    def of_stacked(self, name: str, number: int, dim: int, start: int, stop: int) -> torch.Tensor:
        """Reads the slice ``[start:stop]`` along dimension ``dim``, 0 or 1, of matrix ``number`` in a stack."""
        matrix, span = slice(number, number + 1), slice(start, stop)
        return self.slice(name, (matrix, span) if dim == 0 else (matrix, slice(None), span))[0]

    def region(self, name: str, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Reads the region of a tensor that begins at the indices ``start`` and has this ``shape``."""
        return self.slice(name, tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True)))

    def whole(self, name: str) -> torch.Tensor:
        """Reads the whole tensor."""
        return self.slice(name, ())

    def slice(self, name: str, spans: tuple[slice, ...]) -> torch.Tensor:
        """Reads the slice of a tensor with one span for each of its first dimensions."""
        if name not in self._where:
            files = ", ".join(map(str, self._paths))
            raise UsageError(f"no tensor {name!r} in {files or 'an empty folder'}; give the complete folder")
        if self._mapped > MAPPED:  # pages that were read stay in memory while a file is open
            self._close()
        piece = self._file(self._where[name]).get_slice(name)
        tensor: torch.Tensor = piece[spans] if spans else piece[...]
        self._mapped += tensor.nbytes
        return tensor.to(self.device)

    def on_host(self) -> "SliceReader":
        """Returns a reader of the same files whose slices stay on the CPU."""
        other = copy.copy(self)
        other.device = "cpu"
        return other

    def _file(self, path: Path) -> Any:
        if path not in self._opened:
            self._opened[path] = safe_open(path, framework="pt")
        return self._opened[path]

    def _close(self) -> None:
        self._opened.clear()
        self._mapped = 0


def chunks(start: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Splits the region with these first indices and this shape into chunks of at most CHUNK elements, in order."""
    if math.prod(shape) <= CHUNK or not shape:
        if math.prod(shape):
            yield [*start], [*shape]
        return
    row = math.prod(shape[1:])
    rows = max(1, CHUNK // row)
    for first in range(0, shape[0], rows):
        count = min(rows, shape[0] - first)
        if count * row <= CHUNK:
            yield [start[0] + first, *start[1:]], [count, *shape[1:]]
            continue
        for inside, size in chunks(start[1:], shape[1:]):
            yield [start[0] + first, *inside], [1, *size]


def fill(
    tensor: torch.Tensor,
    name: str,
    start: Sequence[int],
    region: Callable[[str, Sequence[int], Sequence[int]], torch.Tensor],
) -> None:
    """Sets ``tensor`` to the region of the tensor ``name`` that begins at ``start``, one chunk at a time."""
    for begin, shape in chunks(start, tensor.shape):
        inside = tuple(slice(at - own, at - own + size) for at, own, size in zip(begin, start, shape, strict=True))
        tensor[inside].copy_(region(name, begin, shape))


def fill_flat(
    own: torch.Tensor,
    name: str,
    first: int,
    *,
    origin: Sequence[int],
    shape: Sequence[int],
    region: Callable[[str, Sequence[int], Sequence[int]], torch.Tensor],
) -> None:
    """Sets ``own``, (elements,), to consecutive elements of the flattened part of the tensor ``name``, one chunk at a
    time. The part begins at ``origin`` and has this ``shape``; the elements begin at the index ``first`` in it.

    Only the rows that contain them are read.
    """
    if not own.numel():
        return
    row, end = math.prod(shape[1:]), first + own.numel()
    above, below = first // row, -(-end // row)
    at = above * row  # start of a chunk in the flattened part
    for begin, size in chunks([origin[0] + above, *origin[1:]], [below - above, *shape[1:]]):
        low, high = max(first, at), min(end, at + math.prod(size))
        if low < high:
            own[low - first : high - first].copy_(region(name, begin, size).flatten()[low - at : high - at])
        at += math.prod(size)


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
        index = {"metadata": {"total_size": self._size}, "weight_map": where}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def write_tensors(folder: Path, tensors: NamedTensors, *, file_size: int) -> None:
    """Writes full tensors into a folder, from the first rank; collective. A full disk is an error on every rank."""
    failed = None
    try:
        if dist.get_rank() == 0:
            with TensorWriter(folder, file_size=file_size) as writer:
                for name, tensor in tensors:
                    writer.add(name, tensor)
                    del tensor  # before the next one is gathered
    except Exception as error:
        failed = error
    drain(tensors)
    agree(f"writing tensors into {folder}", failed)


def drain(tensors: Iterator[object]) -> None:
    """Gathers and drops the remaining tensors.

    Ranks that write nothing, and a first rank that cannot write, thus still join the collectives.
    """
    deque(tensors, maxlen=0)


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder, which replaces ``folder`` when the ``with`` block ends without an error.

    If the process ends before that, an older ``folder`` stays as it was. The replacement takes two renames; between
    them the older folder is called ``.NAME.replaced``. If the process ends there, the next call restores the older
    folder.
    """
    draft = folder.with_name(f".{folder.name}.unfinished")
    replaced = folder.with_name(f".{folder.name}.replaced")
    if replaced.exists() and not folder.exists():  # a process ended between the two renames
        replaced.rename(folder)
    for left in (draft, replaced):
        shutil.rmtree(left, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(replaced)
    draft.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)
