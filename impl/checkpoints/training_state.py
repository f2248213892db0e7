"""Data position: which documents a training has consumed, so that it goes on with the next one on any number of ranks.

Every epoch has an order of its own, which follows from the seed. The position is a number of documents, counted over
all ranks: it knows neither ranks nor micro-batches. It is written into the manifest of a checkpoint (claim 5).

Training state in one form for all backends: what one of them wrote in any layout, another reads in any other.

A folder per model: ``training_state.json``, and by kind a folder of safetensors under Hugging Face names: ``weight``
(the masters), ``exp_avg``, ``exp_avg_sq`` or ``momentum_buffer``, and ``step``, the number of updates that the
optimizer counts, for each parameter. docs/checkpoints.md describes it. Serves claim 5.
"""

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from conformance.backends.protocol import NamedTensors, TensorKind
from conformance.core.errors import STRICT, UsageError, shown
from conformance.core.io import read_json
from conformance.spec.observables import STATE_KINDS
from impl.interface.distributed import on_first
from impl.interface.protocol import WrittenKind
from impl.interface.sharded_safetensors import FILE_SIZE, SliceReader, write_tensors


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataPosition:
    """documents: how many the data set has. consumed: how many have been trained on, over all epochs."""

    seed: NonNegativeInt
    documents: PositiveInt
    consumed: NonNegativeInt = 0

    def take(self, count: int) -> tuple[list[int], "DataPosition"]:
        """The numbers of the next documents, and the position after them, in the next epochs if need be."""
        taken: list[int] = []
        while len(taken) < count:
            epoch, at = divmod(self.consumed + len(taken), self.documents)
            taken += _order(self.seed, self.documents, epoch)[at : at + count - len(taken)]
        return taken, replace(self, consumed=self.consumed + count)

    def check_same_data(self, before: "DataPosition") -> None:
        """Raises UsageError where ``before``, of a checkpoint, is a position in other data or another order."""
        if (before.seed, before.documents) != (self.seed, self.documents):
            raise UsageError(
                f"the checkpoint stands in {before.documents} documents shuffled by seed {before.seed}, and this "
                f"training has {self.documents} by seed {self.seed}; give the same data and seed"
            )


@lru_cache(maxsize=2)  # whoever fills rows takes one document at a time
def _order(seed: int, documents: int, epoch: int) -> tuple[int, ...]:
    order = list(range(documents))
    random.Random(f"{seed} {epoch}").shuffle(order)  # apart from the process's own generator
    return tuple(order)


FORMAT, VERSION, FILE = "backend-parity training state", 1, "training_state.json"
WRITTEN: tuple[WrittenKind, ...] = ("weight", "exp_avg", "exp_avg_sq", "momentum_buffer", "step")
assert set(WRITTEN) == {"weight", *STATE_KINDS} - {"progress"}


class HasTrainingState(Protocol):
    """The part of impl.interface.protocol.Trainable that is needed here."""

    def named_tensors(self, kind: TensorKind) -> NamedTensors: ...

    def write_state(self, kind: WrittenKind, read: SliceReader) -> None: ...

    def set_progress(self, progress: Mapping[str, float]) -> None: ...


def export_state(folder: Path, model: HasTrainingState, *, file_size: int = FILE_SIZE) -> None:
    """Write a model's training state into ``folder``; collective. Rank 0 holds one file of tensors at a time."""
    kinds = []
    for kind in WRITTEN:
        tensors = model.named_tensors(kind)
        first = [*itertools.islice(tensors, 1)]  # the same on every rank
        if first:
            kinds.append(kind)
            write_tensors(folder / kind, _beginning_with(first, tensors), file_size=file_size)
    progress = {name: float(value) for name, value in model.named_tensors("progress")}
    on_first(f"writing {folder / FILE}", lambda: write_told(folder, kinds=kinds, progress=progress))


def _beginning_with(first: list[tuple[str, torch.Tensor]], others: NamedTensors) -> NamedTensors:
    """The tensor of the list, which is not held after that, and the others."""
    yield first.pop()
    yield from others


def import_state(folder: Path, model: HasTrainingState) -> None:
    """Set a model's training state to what ``export_state`` wrote; each rank reads the slices that it holds.

    Raises UsageError for a folder that is no training state of this version.
    """
    told = read_contents(folder)
    if "schedule" not in told["progress"]:  # of a checkpoint of somebody else, converted
        raise UsageError(
            f"{folder / FILE} does not say how many updates the learning-rate schedule has counted; add it to "
            f'progress, as "schedule": 100.0'
        )
    for kind in told["kinds"]:
        load_kind(model, kind, folder / kind)
    load_progress(model, told["progress"])
    dist.barrier()


def load_kind(model: HasTrainingState, kind: WrittenKind, folder: Path) -> None:
    """Set one kind of a model's training state from the safetensors files of a folder."""
    with SliceReader(sorted(folder.glob("*.safetensors"))) as read, torch.no_grad():
        model.write_state(kind, read)


def load_progress(model: HasTrainingState, progress: Mapping[str, float]) -> None:
    model.set_progress(progress)


def write_told(folder: Path, *, kinds: Sequence[WrittenKind], progress: Mapping[str, float]) -> None:
    """Write ``training_state.json``, when all else is there; in one process."""
    told = {"format": FORMAT, "version": VERSION, "kinds": list(kinds), "progress": dict(progress)}
    (folder / FILE).write_text(json.dumps(told, indent=1), encoding="utf-8")


def read_contents(folder: Path) -> dict[str, Any]:
    """The values of ``training_state.json``. Raises UsageError where it is not there or not as it is written here."""
    file = folder / FILE
    if not file.is_file():
        raise UsageError(f"{folder} holds no {FILE}; give the folder of one model that export_state has written")
    told = read_json(file)
    if (told.get("format"), told.get("version")) != (FORMAT, VERSION):
        raise UsageError(
            f"{file} is of format {told.get('format')!r}, version {told.get('version')!r}; this version "
            f"of the suite reads {FORMAT!r}, version {VERSION}"
        )
    kinds, progress = told.get("kinds"), told.get("progress")
    if not isinstance(kinds, list) or "weight" not in kinds or not set(map(str, kinds)) <= set(WRITTEN):
        raise UsageError(
            f"{file} names {shown(kinds)} as kinds of tensors; there are {', '.join(WRITTEN)}, and weight always"
        )
    if not isinstance(progress, dict) or not all(type(value) in (int, float) for value in progress.values()):
        raise UsageError(f"{file} holds {shown(progress)} where numbers by name are due, such as schedule")
    return told
