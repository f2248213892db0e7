"""Stream: JSON messages over a TCP connection whose two sides have shown that they know the same secret (claim 8).

Each side sends a random challenge and answers the other's with an HMAC of both, so the secret itself never travels and
an answer is of no use twice. What follows is neither encrypted nor signed: agents belong on a network that is trusted.
"""

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Iterator

from conformance.validation import UsageError
from conformance.world.wire import Message

SECRET = "PARITY_SECRET"  # the environment variable
LOST_S = 60.0  # without a word from the other side, which says something every ALIVE_S
ALIVE_S = 2.0
_LEAST_SECRET = 16  # characters
_LENGTH = struct.Struct("!I")
_LONGEST = 1 << 28
_LONGEST_HELLO = 1 << 16  # before the other side is known
_LIMIT_S = 30.0


class Closed(Exception):
    """The other side is gone, or what it sent is no message."""


def secret_of_environment() -> bytes:
    """The secret, which is removed from the environment, so that ranks do not have it. Raises UsageError."""
    secret = os.environ.pop(SECRET, "")
    if len(secret) < _LEAST_SECRET:
        make = f'{SECRET}=$(python -c "import secrets; print(secrets.token_hex())")'
        raise UsageError(
            f"{SECRET} has to hold {_LEAST_SECRET} characters or more, the same on all hosts; make one with {make}"
        )
    return secret.encode()


class Stream:
    """One end of a connection. One thread receives; several may send."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._buffer, self._sending = end, b"", threading.Lock()
        self._longest = _LONGEST_HELLO
        end.settimeout(_LIMIT_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def own_address(self) -> str:
        return str(self._socket.getsockname()[0])

    def send(self, message: Message) -> None:
        """Raises Closed."""
        data = json.dumps(message).encode()
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise Closed(str(error)) from None

    def arrived(self) -> Iterator[Message]:
        """The messages that are there, when the descriptor can be read; waits for none. Raises Closed."""
        with contextlib.suppress(BlockingIOError):
            try:
                data = self._socket.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                raise
            except OSError as error:
                raise Closed(str(error)) from None
            if not data:
                raise Closed("it closed the connection")
            self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._longest:
                raise Closed(f"a message of {length} bytes")
            if len(self._buffer) < _LENGTH.size + length:
                return
            data, self._buffer = self._buffer[_LENGTH.size :][:length], self._buffer[_LENGTH.size + length :]
            yield _parsed(data)

    def next(self, *, limit_s: float = _LIMIT_S) -> Message:
        """Wait for one message, before any others are sent. Raises Closed."""
        while True:
            if not _is_readable(self._socket, limit_s):
                raise Closed(f"it said nothing for {limit_s:g} s")
            for message in self.arrived():
                return message

    def trust(self) -> None:
        """From now on the other side is known, and may send long messages."""
        self._longest = _LONGEST

    def close(self) -> None:
        self._socket.close()


def challenge() -> str:
    return secrets.token_hex(32)


def answer(secret: bytes, who: str, theirs: str, ours: str) -> str:
    """The answer of ``who`` (agent or controller) to the challenge ``theirs``."""
    return hmac.digest(secret, f"{who} {theirs} {ours}".encode(), "sha256").hex()


def is_answer(given: object, secret: bytes, who: str, theirs: str, ours: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode(), answer(secret, who, theirs, ours).encode())


def address_of(text: str) -> tuple[str, int]:
    """``HOST:PORT``. Raises UsageError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{text!r} is no address; give HOST:PORT, such as 10.0.0.1:29500")
    return host.strip("[]"), int(port)


def _is_readable(end: socket.socket, limit_s: float) -> bool:
    poll = select.poll()
    poll.register(end.fileno(), select.POLLIN)
    return bool(poll.poll(limit_s * 1000))


def _parsed(data: bytes) -> Message:
    try:
        message = json.loads(data)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise Closed(f"it sent {data[:80]!r}, which is no message")
    return message
