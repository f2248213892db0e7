"""Sends JSON messages between the controller, its forkservers, hosts and ranks, and shows the phase of each rank.

Messages travel over socket pairs. Each message is one packet, and the kernel delivers packets as a whole: a message
that cannot be sent in time is not sent at all, and no message is read in part. A message that is too long for a
packet is written to an anonymous file in memory, and its descriptor is sent instead. Nothing has a name on disk, so a
killed process leaves nothing there.

The current phase of each rank, and its start, are in shared memory, which can be read while the rank hangs. Each rank
has an entry of fixed size. Writing takes a microsecond and does not wait for a reader.

A socket ends at the machine. Between the controller and the process of another host, a Carrier connects a Wire to the
channel of the engine that started the hosts: keys in torchrun's store, or calls of a Ray actor.
"""

import array
import contextlib
import fcntl
import json
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from conformance.core.timeline import own

Device = Literal["cpu", "cuda"]
Message = dict[str, Any]

# All packets that are not received yet have to fit into the socket's send buffer of some 200 KiB, and a process that
# imports receives nothing for many seconds.
_LONGEST_PACKET = 1 << 12
_LONGEST_MESSAGE = 1 << 28  # larger results have to be written to a file
_IN_FILE = b"in the last descriptor"  # sent instead of a message that is in a file
MOST_FDS = 250  # the kernel's limit per packet is 253
_SEND_LIMIT_S = 5.0


class Garbage(Exception):
    """Says that the other side sent data that is not a message."""


class Wire:
    """Sends and receives messages of any length, with file descriptors, at one end of a packet socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.settimeout(None)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, *, fds: Sequence[int] = (), limit_s: float = _SEND_LIMIT_S) -> bool:
        """Sends a message, and returns whether it was sent. It is dropped if the other process has died or does not
        read within ``limit_s`` seconds; the watchdog detects both. Threads may share this end."""
        deadline = time.monotonic() + limit_s
        data = json.dumps(message).encode()
        with contextlib.ExitStack() as stack:
            if len(data) > _LONGEST_PACKET:
                file = stack.enter_context(os.fdopen(os.memfd_create("message"), "wb"))
                file.write(data)
                file.flush()
                data, fds = _IN_FILE, [*fds, file.fileno()]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                while True:
                    try:
                        self._socket.sendmsg([data], rights, socket.MSG_DONTWAIT)
                        return True
                    except BlockingIOError:
                        if not self._can_send(limit_s=deadline - time.monotonic()):
                            break
        return False

    def receive(self) -> tuple[Message | None, list[int]]:
        """Waits for a message and its file descriptors; the message is None if the other end closed. Raises Garbage."""
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _LONGEST_PACKET, MOST_FDS)
        except ConnectionResetError:  # the other end closed with messages unread: reported once, before its last ones
            return self.receive()
        for fd in fds:
            os.set_inheritable(fd, False)
        if data == _IN_FILE and fds:
            with os.fdopen(fds.pop(), "rb") as file:
                if (length := os.fstat(file.fileno()).st_size) > _LONGEST_MESSAGE:
                    raise Garbage(f"a message of {length} bytes; write large results to a file")
                file.seek(0)
                data = file.read()
        return (_parse(data) if data else None), fds

    def hang_up(self) -> None:
        """Shows the other process the end, and keeps the descriptor, which other threads may be polling."""
        with contextlib.suppress(OSError):  # the other process has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _can_send(self, *, limit_s: float) -> bool:
        """Waits until a packet may fit, or the other process has died; False if neither happens in time."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        return bool(poll.poll(max(0.0, limit_s) * 1000))


def wire_pair() -> tuple[Wire, socket.socket]:
    """Returns a Wire, and the socket for the other process, which makes its own Wire from the inherited descriptor.

    Both descriptors are above 2. If the caller has closed its stdin, 0 is free, and the child's stdin would replace a
    socket with this number.
    """
    ends = []
    for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET):
        ends.append(socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)))
        end.close()
    return Wire(ends[0]), ends[1]


def _parse(data: bytes) -> Message:
    try:
        message = json.loads(data)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise Garbage(repr(data[:80]))
    return message


class Pollable(Protocol):
    """An object with a file descriptor that can be polled."""

    def fileno(self) -> int: ...


def readable(sources: Iterable[Pollable], *, limit_s: float) -> list[int]:
    """Waits at most ``limit_s``; returns the descriptors of those ``sources`` that can be read or are closed."""
    poll = select.poll()
    for source in sources:
        poll.register(source.fileno(), select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0.0, limit_s) * 1000)]


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
        own.switch(phase)
        beats, rank = _this_rank
        beats.write(rank, phase, count=beats.read(rank).count + 1)


def mark() -> None:
    """Records progress within a phase: a module, a document, a tensor. Does nothing outside a worker group."""
    if _this_rank is not None:
        beats, rank = _this_rank
        beats.mark(rank)


LIVE_S = 2.0  # each side sends a message at least this often
LOST_S = 60.0  # a side that has sent nothing for so long counts as lost
_TICK_S = 0.5  # after which the threads of a carrier look whether it was closed


class Closed(Exception):
    """Raised if the other side is gone. The message says why, for the user."""


class Channel(Protocol):
    """One end of an engine's connection between the controller and a host. One thread sends, another receives."""

    def send(self, messages: list[Message]) -> None:
        """Raises Closed."""

    def receive(self, *, limit_s: float) -> list[Message]:
        """Wait at most ``limit_s`` for messages; none if there are none. Raises Closed."""


def take(wire: Wire, *, limit_s: float) -> list[Message]:
    """Wait at most ``limit_s`` for a message, and return all that have arrived. Raises Closed."""
    messages: list[Message] = []
    while readable([wire], limit_s=0.0 if messages else limit_s):
        message, _ = wire.receive()
        if message is None:
            if messages:
                return messages
            raise Closed("it closed the connection")
        messages.append(message)
    return messages


def closing(why: str) -> Message:
    """Return the last message of a side that is gone, which a carrier or an engine sends in its slot."""
    return {"type": "closed", "why": why}


class Carrier:
    """Runs two threads between a wire and a channel. If one end closes, the other end gets a message that says why."""

    def __init__(self, wire: Wire, channel: Channel, *, why_closed: Callable[[], str]) -> None:
        """``why_closed`` is called when the wire was closed by the process at its other end."""
        self._wire, self._channel, self._why_closed = wire, channel, why_closed
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._send, self._receive)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads: one that waits in the library of an engine would not survive the end of the interpreter."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        self._wire.close()

    def _send(self) -> None:
        with suppress(Closed):
            while True:
                is_last = self._is_over.is_set()
                try:
                    messages = take(self._wire, limit_s=0.0 if is_last else _TICK_S)
                except Closed:
                    return self._channel.send([closing(self._why_closed())])
                if messages:
                    self._channel.send(messages)
                elif is_last:
                    return None

    def _receive(self) -> None:
        try:
            while not self._is_over.is_set():
                for message in self._channel.receive(limit_s=_TICK_S):
                    if not self._wire.send(message, limit_s=LOST_S):
                        return
        except Closed as closed:
            self._wire.send(closing(str(closed)))


def connect(channel: Channel) -> tuple[Wire, Carrier]:
    """Return a wire whose messages travel by ``channel``, for the relay, and the carrier to close at the end."""
    wire, other_end = wire_pair()
    return wire, Carrier(Wire(other_end), channel, why_closed=lambda: "the run has ended")
