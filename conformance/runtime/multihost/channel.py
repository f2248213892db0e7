"""Carries messages between the controller and the process of a host, over what an engine has for it.

The host process (host.py) and the controller's relay (relay.py) each hold one end of a Wire, a socket inside of one
machine. A Carrier connects a Wire to the channel of an engine: keys in torchrun's store, or calls of a Ray actor. The
host of the controller itself needs no channel.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from conformance.runtime.messages import Message, Wire, wire_pair
from conformance.runtime.worker_groups import readable

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
