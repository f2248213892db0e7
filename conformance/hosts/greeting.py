"""Greeting: what a relay and an agent say before ranks are started: who they are, and whether they fit together.

relay   challenge
agent   challenge, answer, name, versions
relay   answer, device, ranks per GPU, working directory, a file to look for      or: refused, reason
agent   what is in that file, what slots and what room it offers   or: refused, reason
relay   accepted                                                   or: refused, reason
"""

import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conformance.hosts.offer import own_name, told_apart, versions
from conformance.hosts.stream import SECRET, Stream, answer, challenge, is_answer
from conformance.machine import Room, room_of
from conformance.world.wire import Message


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
    conformance.machine.Room."""

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
