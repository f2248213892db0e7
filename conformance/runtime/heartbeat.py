"""Keeps the current phase of each rank, and its start, in shared memory, which can be read while the rank hangs.

Each rank has an entry of fixed size. Writing takes a microsecond and does not wait for a reader.
"""

import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

_SLOT = 256  # bytes of a rank's entry
_HEAD = struct.Struct("QdH")  # number of beats, time of the last one (CLOCK_MONOTONIC), length of the phase
_MARKS = struct.Struct("Q")  # at the end of the entry
_LONGEST = _SLOT - _HEAD.size - _MARKS.size


@dataclass(frozen=True)
class Beat:
    """Describes a rank's last heartbeat.

    phase: the current work of the rank. count: number of phases since the start of the task; all ranks of a task go
    through the same phases, so a rank with a lower count is behind. time: start of the phase, in seconds of
    CLOCK_MONOTONIC. marks: increases while the rank makes progress within a phase.
    """

    phase: str
    count: int
    time: float
    marks: int


class Heartbeats:
    """Reads and writes the entries of one worker group, in shared memory from ``memfd_create``."""

    def __init__(self, fd: int, *, size: int) -> None:
        if os.fstat(fd).st_size == 0:
            os.ftruncate(fd, size * _SLOT)
        self._memory = mmap.mmap(fd, size * _SLOT)
        self._size = size

    def write(self, rank: int, phase: str, *, count: int) -> None:
        text = phase.encode()[:_LONGEST]
        slot = _HEAD.pack(count, time.monotonic(), len(text)) + text
        self._memory[rank * _SLOT : rank * _SLOT + len(slot)] = slot

    def put(self, rank: int, phase: str, count: int, age: float, marks: int) -> None:
        """Writes a heartbeat of another host, whose CLOCK_MONOTONIC differs: a phase that is ``age`` seconds old.

        An unchanged heartbeat is not written again, because a new time would count as progress.
        """
        before = self.read(rank)
        if (before.phase, before.count, before.marks) == (phase, count, marks):
            return
        text = phase.encode()[:_LONGEST]
        slot = _HEAD.pack(count, time.monotonic() - age, len(text)) + text
        self._memory[rank * _SLOT : rank * _SLOT + len(slot)] = slot
        _MARKS.pack_into(self._memory, (rank + 1) * _SLOT - _MARKS.size, marks)

    def mark(self, rank: int) -> None:
        at = (rank + 1) * _SLOT - _MARKS.size
        (marks,) = _MARKS.unpack_from(self._memory, at)
        _MARKS.pack_into(self._memory, at, marks + 1)

    def read(self, rank: int) -> Beat:
        slot = self._memory[rank * _SLOT : (rank + 1) * _SLOT]
        count, at, length = _HEAD.unpack_from(slot)
        (marks,) = _MARKS.unpack_from(slot, _SLOT - _MARKS.size)
        return Beat(slot[_HEAD.size : _HEAD.size + length].decode(errors="replace"), count, at, marks)

    def reset(self, phase: str) -> None:
        """Sets all ranks to ``phase`` with count 0. The controller does this before a task, so that it never reads a
        phase of the previous task."""
        for rank in range(self._size):
            self.write(rank, phase, count=0)

    def close(self) -> None:
        self._memory.close()


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Describes its rank to a task. ``device``: "cpu" or "cuda:N". ``beat``: the function of this module."""

    rank: int
    world_size: int
    device: str
    beat: Callable[[str], None]


_this_rank: tuple[Heartbeats, int] | None = None


def attach(beats: Heartbeats, rank: int) -> None:
    """Makes ``beat`` write to the entry of ``rank``, the rank of this process."""
    global _this_rank
    _this_rank = beats, rank


def beat(phase: str) -> None:
    """Records the next phase of this rank, such as "step 1". Does nothing outside a worker group."""
    if _this_rank is not None:
        beats, rank = _this_rank
        beats.write(rank, phase, count=beats.read(rank).count + 1)


def mark() -> None:
    """Records progress within a phase: a module, a document, a tensor. Does nothing outside a worker group."""
    if _this_rank is not None:
        beats, rank = _this_rank
        beats.mark(rank)
