"""Heartbeat: the phase that each rank is in, and since when, which can be read while a rank hangs (claim 8).

Each rank has a slot in shared memory. Writing takes a microsecond and does not wait for a reader.
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
_MARKS = struct.Struct("Q")  # at the end of the slot
_LONGEST = _SLOT - _HEAD.size - _MARKS.size


@dataclass(frozen=True)
class Beat:
    """A rank's last heartbeat.

    phase: what the rank does. count: number of phases since the start of the task; all ranks of a task go through the
    same phases, so a rank with a lower count is behind. time: when the phase began, in seconds of CLOCK_MONOTONIC.
    marks: goes up while the rank gets on within a phase.
    """

    phase: str
    count: int
    time: float
    marks: int


class Heartbeats:
    """The slots of one world, in the shared memory behind a file descriptor from ``memfd_create``."""

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
        """Write what was read elsewhere, where CLOCK_MONOTONIC may be another: a phase that is ``age`` seconds old.

        What has not changed stays as it is, because a change shows that the rank gets on.
        """
        was = self.read(rank)
        if (was.phase, was.count, was.marks) == (phase, count, marks):
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
        """Set all ranks to ``phase`` with count 0. The controller does this before a task, so that it never reads a
        phase of the task before."""
        for rank in range(self._size):
            self.write(rank, phase, count=0)

    def close(self) -> None:
        self._memory.close()


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """What a task knows about its rank. ``device``: "cpu" or "cuda:N". ``beat``: the function of this module."""

    rank: int
    world_size: int
    device: str
    beat: Callable[[str], None]


_this_rank: tuple[Heartbeats, int] | None = None


def attach(beats: Heartbeats, rank: int) -> None:
    """Make ``beat`` write to the slot of ``rank``, which this process is."""
    global _this_rank
    _this_rank = beats, rank


def beat(phase: str) -> None:
    """Record what this rank does next, in a few words such as "step 1". Does nothing in a process outside a world."""
    if _this_rank is not None:
        beats, rank = _this_rank
        beats.write(rank, phase, count=beats.read(rank).count + 1)


def mark() -> None:
    """Show that this rank gets on within its phase: a module, a document, a tensor. Does nothing outside a world."""
    if _this_rank is not None:
        beats, rank = _this_rank
        beats.mark(rank)
