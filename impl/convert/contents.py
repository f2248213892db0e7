"""Describes the content of a checkpoint of any format, for ``parity inspect`` and ``parity convert``."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Held:
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
    tensors: tuple[Held, ...]
    progress: dict[str, float] = field(default_factory=dict)
    read: Callable[[Held], torch.Tensor] | None = None

    def of_kind(self, kind: str) -> tuple[Held, ...]:
        return tuple(held for held in self.tensors if held.kind == kind)

    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(held.kind for held in self.tensors))
