"""Offer: what an agent says of its host, and why a controller refuses it (claim 9).

Ranks of one world have to be of the same code. So the sources of the suite are compared, not only its version, and the
versions of all packages that a summary names.

Stream: JSON messages over a TCP connection whose two sides have shown that they know the same secret (claim 8).

Each side sends a random challenge and answers the other's with an HMAC of both, so the secret itself never travels and
an answer is of no use twice. What follows is neither encrypted nor signed: agents belong on a network that is trusted.

Greeting: what a relay and an agent say before ranks are started: who they are, and whether they fit together.

relay   challenge
agent   challenge, answer, name, versions
relay   answer, device, ranks per GPU, working directory, a file to look for      or: refused, reason
agent   what is in that file, what slots and what room it offers   or: refused, reason
relay   accepted                                                   or: refused, reason
"""

import contextlib
import hashlib
import hmac
import json
import os
import platform
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import conformance
from conformance.core.errors import UsageError
from conformance.core.host_resources import Room, room_of
from conformance.core.packages import package_version
from conformance.runtime.messages import Message

PACKAGES = ("torch", "transformers", "ring-flash-attn", "deepspeed", "megatron-core")


def versions() -> dict[str, str]:
    """Of what has to be the same on all hosts."""
    package = Path(conformance.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)} {file.stat().st_size}\n".encode() + file.read_bytes())
    return {
        "backend-parity": f"{conformance.__version__} (sources {digest.hexdigest()[:12]})",
        "python": platform.python_version(),
        **{name: package_version(name) for name in PACKAGES},
    }


def own_name() -> str:
    """What users know an agent by."""
    return f"{socket.gethostname()} (process {os.getpid()})"


def told_apart(theirs: dict[str, str], ours: dict[str, str]) -> str:
    """Which versions an agent has that its controller has not, in words; empty if they are the same."""
    apart = [name for name in ours if theirs.get(name) != ours[name]]
    return ", ".join(f"{name} {theirs.get(name, 'unknown')} and not {ours[name]}" for name in apart)


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


class Refused(Exception):
    """The other side, or this one, will not work with the other. The message is for the user."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a run wants of its agents' ranks: their device, and how many may share a GPU."""

    device: str
    ranks_per_gpu: int


@dataclass(frozen=True, kw_only=True)
class Offered:
    """An agent that was accepted: its name, its host's, how many ranks it starts, and the room there: the fields of a
    conformance.core.host_resources.Room."""

    name: str
    host: str
    slots: int
    room: dict[str, float | None]


def greet_agent(stream: Stream, *, secret: bytes, wanted: Wanted, folder: Path) -> Offered:
    """The relay's side. ``folder``: one of the run's, which the agent has to see. Raises Refused and Closed."""
    ours = challenge()
    stream.send({"challenge": ours})
    hello = stream.next()
    name, theirs = str(hello.get("name", "an agent"))[:200], str(hello.get("challenge"))
    if not is_answer(hello.get("answer"), secret, "agent", ours, theirs):
        _refuse(stream, name, f"it does not know the secret; {SECRET} has to be the same on all hosts")
    stream.trust()
    if apart := told_apart(dict(hello.get("versions", {})), versions()):
        _refuse(stream, name, f"it has {apart}; install the same versions on all hosts")
    sign = folder / f"agents-{secrets.token_hex(8)}"
    sign.write_text(ours, encoding="utf-8")
    try:
        stream.send(
            {
                "answer": answer(secret, "controller", theirs, ours),
                "device": wanted.device,
                "ranks_per_gpu": wanted.ranks_per_gpu,
                "cwd": str(Path.cwd()),
                "sign": str(sign.resolve()),
            }
        )
        offer = stream.next()
    finally:
        sign.unlink()
    if "refused" in offer:
        raise Refused(f"agent {name} does not take part: {offer['refused']}")
    if offer.get("sign") != ours:
        _refuse(stream, name, f"it does not see {folder.resolve()}; --out has to be in a folder that all hosts share")
    stream.send({"accepted": name})
    room = vars(Room(**offer["room"]))
    return Offered(name=name, host=str(offer["host"])[:200], slots=max(1, int(offer["slots"])), room=room)


def _refuse(stream: Stream, name: str, why: str) -> None:
    stream.send({"refused": why})
    raise Refused(f"agent {name} was refused: {why}")


def greet_relay(stream: Stream, *, secret: bytes, slots: Callable[[Wanted], int]) -> Wanted:
    """The agent's side: moves to the controller's working directory; returns what it wants.

    ``slots``: how many such ranks this host may start; it may raise Refused. Raises Refused and Closed.
    """
    ours, theirs = challenge(), str(stream.next().get("challenge"))
    own = answer(secret, "agent", theirs, ours)
    stream.send({"challenge": ours, "answer": own, "name": own_name(), "versions": versions()})
    welcome = _told(stream)
    if not is_answer(welcome.get("answer"), secret, "controller", ours, theirs):
        raise Refused(f"what listens there does not know the secret ({SECRET})")
    stream.trust()
    wanted = Wanted(device=str(welcome["device"]), ranks_per_gpu=int(welcome["ranks_per_gpu"]))
    try:
        os.chdir(welcome["cwd"])
        there = slots(wanted)
    except (OSError, Refused) as error:
        why = f"it has no folder {welcome['cwd']}" if isinstance(error, OSError) else str(error)
        stream.send({"refused": why})
        raise Refused(why) from None
    sign = Path(welcome["sign"])
    seen = sign.read_text(encoding="utf-8") if sign.is_file() else ""
    stream.send({"sign": seen, "slots": there, "host": socket.gethostname(), "room": vars(room_of(sign.parent))})
    _told(stream)
    return wanted


def _told(stream: Stream) -> Message:
    message = stream.next()
    if "refused" in message:
        raise Refused(str(message["refused"]))
    return message
