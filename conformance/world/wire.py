"""Wire: JSON messages between the controller, its zygotes and their ranks, over socket pairs (claim 8: no lost news).

Two kinds: a *stream* to each rank, one message per line, of any size; and *packets* to a zygote, one message each,
which may carry file descriptors. Nothing has a name on disk, so nothing is left there when a process is killed.
"""

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]

_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 28  # a result larger than this belongs into a file
_MOST_FDS = 250  # the kernel's limit per packet is 253
_SEND_LIMIT_S = 5.0


class Garbage(Exception):
    """The other side sent something that is not a message."""


class Lines:
    """Messages over a stream socket, one JSON object per line."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send, or drop the message when the other side is gone or does not read: whoever watches it finds out why."""
        self._socket.settimeout(_SEND_LIMIT_S)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        self._socket.settimeout(None)

    def receive(self) -> tuple[list[Message], bool]:
        """Wait for bytes; return the messages that are complete now, and whether the stream is still open.

        Raises Garbage.
        """
        try:
            data = self._socket.recv(_CHUNK)
        except ConnectionResetError:
            data = b""
        searched = len(self._buffer)
        self._buffer += data
        if b"\n" not in data:
            if searched > _LONGEST_LINE:
                raise Garbage(f"a line of more than {_LONGEST_LINE} bytes")
            return [], bool(data)
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = rest
        return [_parse(bytes(line)) for line in lines], True

    def __iter__(self) -> Iterator[Message]:
        """Messages until the other side closes."""
        is_open = True
        while is_open:
            messages, is_open = self.receive()
            yield from messages

    def close(self) -> None:
        self._socket.close()


class Packets:
    """Messages over a sequenced-packet socket, with file descriptors."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, *, fds: list[int] | None = None) -> None:
        """Send, or drop the message when the other side is gone."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._socket, [json.dumps(message).encode()], fds or [])

    def receive(self) -> tuple[Message | None, list[int]]:
        """Wait for a message and its file descriptors; None when the other side has closed."""
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, 1 << 20, _MOST_FDS)
        except ConnectionResetError:
            return None, []
        for fd in fds:
            os.set_inheritable(fd, False)
        return (_parse(data) if data else None), fds

    def close(self) -> None:
        self._socket.close()


def stream_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a stream socket; for Lines."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a packet socket; for Packets.

    They avoid descriptors 0, 1 and 2, which a caller that closed its stdin leaves free: a child would find its own
    stdin there instead.
    """
    ends = []
    for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET):
        ends.append(socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)))
        end.close()
    return ends[0], ends[1]


def _parse(data: bytes) -> Message:
    try:
        message = json.loads(data)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise Garbage(repr(data[:80]))
    return message
