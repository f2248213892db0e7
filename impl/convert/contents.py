"""Describes the content of a checkpoint of any format, for ``parity inspect`` and ``parity convert``."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Describes a tensor of a checkpoint without loading it.

    kind: one of impl.checkpoints.training_state.WRITTEN, or ``other`` for tensors that a training state cannot contain.
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


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Holds a checkpoint that has been opened.

    facts: further properties by name: finished steps, layout, versions. progress: as in a training state. read: reads a
    tensor into the memory of this process; None if only a library can assemble the tensors from pieces.
    """

    format: str
    facts: dict[str, Any]
    tensors: tuple[StoredTensor, ...]
    progress: dict[str, float] = field(default_factory=dict)
    read: Callable[[StoredTensor], torch.Tensor] | None = None

    def of_kind(self, kind: str) -> tuple[StoredTensor, ...]:
        return tuple(stored for stored in self.tensors if stored.kind == kind)

    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(stored.kind for stored in self.tensors))
