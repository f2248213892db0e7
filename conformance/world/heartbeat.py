"""Heartbeat: which phase each rank is in and since when, readable while the rank hangs (claim 8: a hang has a name).

One slot per rank in memory shared by a world: writing costs a microsecond and needs no cooperation of the reader.
"""

import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

_SLOT = 256
_HEAD = struct.Struct(
    "QdH"
)  # beats of this task, time of the last (CLOCK_MONOTONIC, the same in all processes), length
_LONGEST = _SLOT - _HEAD.size


@dataclass(frozen=True)
class Beat:
    """A rank's last heartbeat. ``count`` orders ranks: all count the phases of one task alike."""

    phase: str
    count: int
    time: float


class Heartbeats:
    """The slots of one world, over a file descriptor from ``memfd_create``."""

    def __init__(self, fd: int, *, size: int) -> None:
        if os.fstat(fd).st_size == 0:
            os.ftruncate(fd, size * _SLOT)
        self._memory = mmap.mmap(fd, size * _SLOT)
        self._size = size

    def write(self, rank: int, phase: str, *, count: int) -> None:
        text = phase.encode()[:_LONGEST]
        slot = _HEAD.pack(count, time.monotonic(), len(text)) + text
        self._memory[rank * _SLOT : rank * _SLOT + len(slot)] = slot

    def read(self, rank: int) -> Beat:
        slot = self._memory[rank * _SLOT : (rank + 1) * _SLOT]
        count, at, length = _HEAD.unpack_from(slot)
        return Beat(slot[_HEAD.size : _HEAD.size + length].decode(errors="replace"), count, at)

    def reset(self, phase: str) -> None:
        """Forget the last task; done by the controller, so that no stale phase can be read as the new task's."""
        for rank in range(self._size):
            self.write(rank, phase, count=0)

    def close(self) -> None:
        self._memory.close()


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """What a task is told about its rank. ``device`` is "cpu" or "cuda:N"; ``beat`` is the function below."""

    rank: int
    world_size: int
    device: str
    beat: Callable[[str], None]


_this_rank: tuple[Heartbeats, int] | None = None


def attach(beats: Heartbeats, rank: int) -> None:
    """Make ``beat`` write this process's slot."""
    global _this_rank
    _this_rank = beats, rank


def beat(phase: str) -> None:
    """Say what this rank does next, in a few words such as "step 1"; outside a world it does nothing."""
    if _this_rank is not None:
        beats, rank = _this_rank
        beats.write(rank, phase, count=beats.read(rank).count + 1)
