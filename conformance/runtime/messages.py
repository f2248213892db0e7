"""Sends JSON messages between the controller, its forkservers and their ranks, over socket pairs.

Each message is one packet, and the kernel delivers packets as a whole: a message that cannot be sent in time is not
sent at all, and no message is read in part. A message that is too long for a packet is written to an anonymous file in
memory, and its descriptor is sent instead. Nothing has a name on disk, so a killed process leaves nothing there.
"""

import array
import contextlib
import fcntl
import json
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import Any

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
