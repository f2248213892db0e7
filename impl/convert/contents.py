"""What a checkpoint holds, whatever its format: what ``parity inspect`` prints and ``parity convert`` reads."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Held:
    """A tensor of a checkpoint, not loaded.

    kind: one of impl.checkpoints.training_state.WRITTEN, or ``other`` for what has no place in a training state.
    name: of the parameter. ``place``: what ``Checkpoint.read`` finds it by.
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
    """A checkpoint that has been opened.

    facts: what else is known, by name: steps that are done, the layout, versions. progress: as in a training state.
    read: a tensor of it, into the memory of this process; None where it lies in pieces that only a library puts
    together.
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
