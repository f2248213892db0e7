"""Writes and reads the training state in one format that all backends share, in any layout.

There is one folder per model, with ``training_state.json`` and a folder of safetensors for each kind of tensors, under
Hugging Face names: ``weight`` (the masters), ``exp_avg``, ``exp_avg_sq`` or ``momentum_buffer``, and ``step``, the
number of updates that the optimizer counts for each parameter (docs/explanations/checkpoints.md).

``DataPosition`` counts the documents that a training has consumed, over all ranks. So a training resumes with the next
document on any number of ranks. The seed determines the order of each epoch. The manifest of a checkpoint contains the
position.

``GeneratorStates`` holds the random generators of one rank, in a JSON file, so a resumed training has the same
dropout as an uninterrupted one. They fit only the same ranks with the same work, so they are restored only for the same
layout and number of ranks.

``Checkpoint`` describes the content of a checkpoint of any format, for ``parity inspect`` and ``parity convert``.
"""

import base64
import dataclasses
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy
import torch
import torch.distributed as dist
from pydantic import BeforeValidator, NonNegativeInt, PlainSerializer, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from conformance.backends.protocol import NamedTensors, TensorKind
from conformance.core.errors import STRICT, UsageError, explain, one_line, shown
from conformance.core.io import check_file, read_json
from conformance.spec.observables import STATE_KINDS
from impl.interface.distributed import on_all_ranks, on_first
from impl.interface.sharded_safetensors import FILE_SIZE, SliceReader, write_tensors
from impl.interface.trainable import WrittenKind


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataPosition:
    """Counts consumed documents. documents: size of the data set. consumed: documents trained on, over all epochs."""

    seed: NonNegativeInt
    documents: PositiveInt
    consumed: NonNegativeInt = 0

    def take(self, count: int) -> tuple[list[int], "DataPosition"]:
        """Returns the numbers of the next documents, across epochs if necessary, and the position after them."""
        taken: list[int] = []
        while len(taken) < count:
            epoch, at = divmod(self.consumed + len(taken), self.documents)
            taken += epoch_order(self.seed, self.documents, epoch)[at : at + count - len(taken)]
        return taken, replace(self, consumed=self.consumed + count)

    def check_same_data(self, before: "DataPosition") -> None:
        """Raises UsageError if a checkpoint's position ``before`` is in different data or in a different order."""
        if (before.seed, before.documents) != (self.seed, self.documents):
            raise UsageError(
                f"the checkpoint has a position in {before.documents} documents shuffled by seed {before.seed}, but "
                f"this training has {self.documents} by seed {self.seed}; give the same data and seed"
            )


@lru_cache(maxsize=2)  # rows are filled one document at a time
def epoch_order(seed: int, documents: int, epoch: int) -> tuple[int, ...]:
    order = list(range(documents))
    random.Random(f"{seed} {epoch}").shuffle(order)  # leaves the process's own generator alone
    return tuple(order)


FORMAT, VERSION, FILE = "backend-parity training state", 1, "training_state.json"
WRITTEN: tuple[WrittenKind, ...] = ("weight", "exp_avg", "exp_avg_sq", "momentum_buffer", "step")
assert set(WRITTEN) == {"weight", *STATE_KINDS} - {"progress"}


class HasTrainingState(Protocol):
    """Lists the part of impl.interface.trainable.Trainable that a training state needs."""

    def named_tensors(self, kind: TensorKind) -> NamedTensors: ...

    def write_state(self, kind: WrittenKind, read: SliceReader) -> None: ...

    def set_progress(self, progress: Mapping[str, float]) -> None: ...


def export_state(folder: Path, model: HasTrainingState, *, file_size: int = FILE_SIZE) -> None:
    """Writes a model's training state into ``folder``; collective. Rank 0 holds one file of tensors at a time."""
    kinds = []
    for kind in WRITTEN:
        tensors = model.named_tensors(kind)
        first = [*itertools.islice(tensors, 1)]  # the same on every rank
        if first:
            kinds.append(kind)
            write_tensors(folder / kind, _prepended(first, tensors), file_size=file_size)
    progress = {name: float(value) for name, value in model.named_tensors("progress")}
    on_first(f"writing {folder / FILE}", lambda: write_contents(folder, kinds=kinds, progress=progress))


def _prepended(first: list[tuple[str, torch.Tensor]], rest: NamedTensors) -> NamedTensors:
    """Yields the tensor of the list, which is popped to free its memory, and then the rest."""
    yield first.pop()
    yield from rest


def import_state(folder: Path, model: HasTrainingState) -> None:
    """Sets a model's training state to the one that ``export_state`` wrote; each rank reads its own slices.

    Raises UsageError for a folder that is not a training state of this version.
    """
    contents = read_contents(folder)
    if "schedule" not in contents["progress"]:  # a converted checkpoint of another trainer
        raise UsageError(
            f"{folder / FILE} lacks the number of updates that the learning-rate schedule has counted; add it to "
            f'progress, as "schedule": 100.0'
        )
    rank, ranks = dist.get_rank(), dist.get_world_size()
    on_all_ranks(f"verifying {folder}", lambda: check_digests(folder, contents, rank=rank, ranks=ranks))
    for kind in contents["kinds"]:
        load_kind(model, kind, folder / kind)
    load_progress(model, contents["progress"])
    dist.barrier()


def load_kind(model: HasTrainingState, kind: WrittenKind, folder: Path) -> None:
    """Sets one kind of a model's training state from the safetensors files of a folder."""
    with SliceReader(sorted(folder.glob("*.safetensors"))) as read, torch.no_grad():
        model.write_state(kind, read)


def load_progress(model: HasTrainingState, progress: Mapping[str, float]) -> None:
    model.set_progress(progress)


def write_contents(
    folder: Path, *, kinds: Sequence[WrittenKind], progress: Mapping[str, float], has_manifest: bool = True
) -> None:
    """Writes ``training_state.json``; call it in one process, after all other files are written.

    has_manifest: the manifest of a checkpoint around the folder will have the digests; otherwise they are written here.
    """
    contents = {"format": FORMAT, "version": VERSION, "kinds": list(kinds), "progress": dict(progress)}
    if not has_manifest:
        contents["files"] = {name: f"{_size(folder / name)}{_digest(folder / name)}" for name in _tensor_files(folder)}
    (folder / FILE).write_text(json.dumps(contents, indent=1), encoding="utf-8")


def check_digests(folder: Path, contents: Mapping[str, Any], *, rank: int = 0, ranks: int = 1) -> None:
    """Raises UsageError if a file has changed since it was written; ``contents`` may have no digests.

    Each of ``ranks`` reads its own files.
    """
    files, names = contents.get("files"), _tensor_files(folder)
    if files is None:
        return
    if not isinstance(files, dict) or sorted(files) != names:
        raise UsageError(f"{folder / FILE} does not list the files of the folder; convert the checkpoint again")
    for name in names[rank::ranks]:
        check_file(file := folder / name)
        written, size = str(files[name]), _size(file)  # a sparse file may be endless, so the size comes first
        if not written.startswith(size) or written != f"{size}{_digest(file)}":
            raise UsageError(f"{file} is damaged: its bytes have changed; convert the checkpoint again")


def _tensor_files(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.glob("*/*.safetensors"))


def _size(path: Path) -> str:
    return f"{path.stat().st_size} bytes, SHA-256 "


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_contents(folder: Path) -> dict[str, Any]:
    """Reads ``training_state.json``. Raises UsageError if the file is missing or has another format."""
    file = folder / FILE
    if not file.is_file():
        raise UsageError(f"{folder} has no {FILE}; give the folder of one model that export_state has written")
    contents = read_json(file)
    if (contents.get("format"), contents.get("version")) != (FORMAT, VERSION):
        raise UsageError(
            f"{file} has format {contents.get('format')!r}, version {contents.get('version')!r}; this version "
            f"of the suite reads {FORMAT!r}, version {VERSION}"
        )
    kinds, progress = contents.get("kinds"), contents.get("progress")
    if not isinstance(kinds, list) or "weight" not in kinds or not set(map(str, kinds)) <= set(WRITTEN):
        raise UsageError(
            f"{file} names {shown(kinds)} as kinds of tensors; use some of {', '.join(WRITTEN)}, and weight always"
        )
    if not isinstance(progress, dict) or not all(type(value) in (int, float) for value in progress.values()):
        raise UsageError(f"{file}: progress must map names such as schedule to numbers, got {shown(progress)}")
    return contents


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Describes a tensor of a checkpoint without loading it.

    kind: one of WRITTEN, or ``other`` for tensors that a training state cannot contain.
    name: of the parameter. ``place``: the location for ``Checkpoint.read``.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: Any = None

    @property
    def size(self) -> int:
        numbers = 1
        for length in self.shape:
            numbers *= length
        return numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Holds a checkpoint that has been opened.

    facts: further properties by name: finished steps, layout, versions. progress: as in a training state. read: reads a
    tensor into the memory of this process; None if only a library can assemble the tensors from pieces.
    """

    format: str
    facts: dict[str, Any]
    tensors: tuple[StoredTensor, ...]
    progress: dict[str, float] = dataclasses.field(default_factory=dict)
    read: Callable[[StoredTensor], torch.Tensor] | None = None

    def of_kind(self, kind: str) -> tuple[StoredTensor, ...]:
        return tuple(stored for stored in self.tensors if stored.kind == kind)

    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(stored.kind for stored in self.tensors))


GENERATORS = "generators"
Bytes = Annotated[  # a state is a tensor of bytes
    bytes,
    BeforeValidator(lambda value: base64.b64decode(value, validate=True) if isinstance(value, str) else value),
    PlainSerializer(lambda value: base64.b64encode(value).decode("ascii"), when_used="json"),
]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GeneratorStates:
    """Holds the states of one rank's generators.

    cuda: state of its GPU's generator, if it has one. library: states of the backend library's own generators, by name.
    """

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, tuple[int, ...], int, int, float]
    torch: Bytes
    cuda: Bytes | None
    library: dict[str, Bytes]


_STATES = TypeAdapter(GeneratorStates)


def read_generators(library: Mapping[str, torch.Tensor]) -> GeneratorStates:
    """Returns the current states of this process. ``library``: the result of Context.library_generators."""
    kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    return GeneratorStates(
        python=random.getstate(),
        numpy=(kind, tuple(numpy.asarray(keys).tolist()), int(position), int(has_gauss), float(gauss)),
        torch=_to_bytes(torch.get_rng_state()),
        cuda=_to_bytes(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
        library={name: _to_bytes(state) for name, state in library.items()},
    )


def set_generators(states: GeneratorStates) -> dict[str, torch.Tensor]:
    """Sets the generators of this process; returns the states for Context.set_library_generators.

    Raises UsageError for invalid states.
    """
    try:
        random.setstate(states.python)
        kind, keys, position, has_gauss, gauss = states.numpy
        numpy.random.set_state((kind, numpy.asarray(keys, dtype=numpy.uint32), position, has_gauss, gauss))
        torch.set_rng_state(_to_tensor(states.torch))
        if states.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(_to_tensor(states.cuda))
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise UsageError(f"the checkpoint has invalid states of random generators: {one_line(error)}") from None
    return {name: _to_tensor(state) for name, state in states.library.items()}


def save_generators(folder: Path, rank: int, states: GeneratorStates) -> None:
    """Writes the states of a rank into the folder of a checkpoint."""
    (folder / GENERATORS).mkdir(exist_ok=True)
    _generators_file(folder, rank).write_bytes(_STATES.dump_json(states))


def load_generators(folder: Path, rank: int) -> GeneratorStates:
    """Reads the states of a rank. Raises UsageError for a file that ``save_generators`` did not write."""
    file = _generators_file(folder, rank)
    try:
        values: dict[str, Any] = read_json(file)
        return _STATES.validate_python(values)
    except FileNotFoundError:
        raise UsageError(f"{file} is missing; give a checkpoint that was saved with these ranks") from None
    except ValidationError as error:
        raise explain(error, source=str(file), what="state of random generators") from None


def load_own_generators(folder: Path) -> GeneratorStates:
    """Reads the states of this rank; if a file is wrong, all ranks raise. Collective."""
    rank = dist.get_rank()
    return on_all_ranks(f"reading {folder / GENERATORS}", lambda: load_generators(folder, rank))[rank]


def _generators_file(folder: Path, rank: int) -> Path:
    return folder / GENERATORS / f"rank-{rank}.json"


def _to_bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _to_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
