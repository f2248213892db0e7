"""Launch: the controller's handles of worlds, and of the processes that start them.

Serves claim 8: however the controller ends, these processes notice (their sockets close, and the kernel signals them)
and end their ranks.
"""

import contextlib
import itertools
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from conformance.core.process import process_state, processor_seconds, signal_process
from conformance.runtime.config import StartError
from conformance.runtime.failure import exit_words, tail
from conformance.runtime.heartbeat import Heartbeats
from conformance.runtime.messages import MOST_FDS, Message, Wire, wire_pair

if TYPE_CHECKING:
    import socket

    from conformance.runtime.preload_server import Forked

_ANSWER_LIMIT_S = 30.0  # a zygote only forks, signals and reaps
MOST_RANKS = MOST_FDS - 2  # of a world: the descriptors of all its ranks travel in one packet, with two more
RANK_BYTES = 40 * 2**20  # private memory of a forked rank with a tiny model; every rank needs at least this

_world_numbers = itertools.count(1)


class Pollable(Protocol):
    """An object with a file descriptor that can be polled."""

    def fileno(self) -> int: ...


def too_small(size: int, reason: str) -> StartError:
    """The StartError for a host that has no room for a world of ``size`` ranks."""
    return StartError(
        f"this host cannot start {size} ranks: {reason}; use a smaller layout, or a host that allows more processes, "
        f"open files and memory"
    )


@dataclass(frozen=True, kw_only=True)
class World:
    """A group of live ranks.

    pids, wires: by rank. computes_when_busy: whether a rank that uses the processor computes; on a GPU it may wait.
    statuses: exit statuses of the ranks that have ended; -N means killed by signal N. lost: what else became of them.
    """

    number: int
    handle: "Handle"
    pids: list[int]
    wires: list[Wire]
    beats: Heartbeats
    computes_when_busy: bool
    statuses: dict[int, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.pids)

    def is_whole(self) -> bool:
        """Whether all ranks are alive. Asks the kernel, because the zygote reports deaths with a delay."""
        self.handle.receive()
        is_there = self.handle.is_alive and not self.lost and not self.statuses
        return is_there and all(self.state(rank) not in ("", "Z") for rank in range(self.size))

    def state(self, rank: int) -> str:
        """The kernel's letter for the process of a rank (conformance.core.process.process_state)."""
        return process_state(self.pids[rank])

    def processor_seconds(self) -> float:
        """What all ranks have used."""
        return sum(map(processor_seconds, self.pids))

    def signal(self, rank: int, number: int) -> None:
        signal_process(self.pids[rank], number)

    def bury(self) -> list[int]:
        """End and reap all processes of the world. Returns the pids of those that could not be ended."""
        left = self.handle.bury(self)
        for wire in self.wires:
            wire.close()
        self.beats.close()
        return left


class Handle:
    """The controller's end of a process that starts worlds. One thread uses it, and all its worlds."""

    what: ClassVar[str]  # the process, in words
    made: ClassVar[type[World]] = World

    def __init__(self, control: Wire) -> None:
        self._control = control
        self._worlds: dict[int, World] = {}
        self.is_alive = True

    def fileno(self) -> int:
        return self._control.fileno()

    def receive(self) -> None:
        """Process all messages that have arrived; does not wait."""
        while self._next_message(limit_s=0.0) is not None:
            pass

    def launch(
        self, start: Message, *, size: int, files: Sequence[str], computes_when_busy: bool, limit_s: float
    ) -> World:
        """Send ``start``, with files in memory of these names, the first for heartbeats, and a socket for each rank;
        returns the world when its ranks are there. Raises StartError."""
        number = next(_world_numbers)
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            try:
                descriptors = []
                for name in files:
                    descriptors.append(os.memfd_create(name))
                    theirs.callback(os.close, descriptors[-1])
                beats = Heartbeats(descriptors[0], size=size)
                ours.callback(beats.close)
                wires = []
                for _ in range(size):
                    wire, their_end = wire_pair()
                    wires.append(wire)
                    ours.callback(wire.close)
                    descriptors.append(theirs.enter_context(their_end).fileno())
                self._control.send({"do": "start", "world": number, **start}, fds=descriptors)
            except OSError as error:
                raise too_small(size, str(error.strerror)) from error
            theirs.close()
            started = self._answer("started", world=number, limit_s=limit_s)
            if started["error"]:
                raise self._refusal(size, started["error"])
            ours.pop_all()  # the world keeps them
        world = self._worlds[number] = self.made(
            number=number,
            handle=self,
            pids=started["pids"],
            wires=wires,
            beats=beats,
            computes_when_busy=computes_when_busy,
        )
        return world

    def bury(self, world: World) -> list[int]:
        """End a world's processes; returns the pids that are left. If this process is dead, others end them."""
        del self._worlds[world.number]
        if self.is_alive:
            self._control.send({"do": "bury", "world": world.number})
            try:
                return list(self._answer("buried", world=world.number, limit_s=_ANSWER_LIMIT_S)["left"])
            except StartError:
                self.close()
        return self._left_by_others(world)

    def close(self) -> int:
        """End the process with all ranks that it has started; returns its exit status."""
        raise NotImplementedError

    def _refusal(self, size: int, error: str) -> StartError:
        """For a world of ``size`` ranks, which the process could not start."""
        return StartError(error)

    def _left_by_others(self, world: World) -> list[int]:
        """The pids of a world that are still there although nobody buried it."""
        return []

    def _where_it_ended(self) -> str:
        """Where to look when the process has ended, to follow on what is said of that."""
        return ""

    def _heard(self, message: Message) -> None:
        """Whatever has arrived."""
        if message["type"] == "exited" and (world := self._worlds.get(message["world"])):
            world.statuses[message["rank"]] = message["status"]

    def _answer(self, kind: str, *, world: int | None, limit_s: float, since: float | None = None) -> Message:
        deadline = (time.monotonic() if since is None else since) + limit_s
        while (message := self._next_message(limit_s=deadline - time.monotonic())) is not None:
            if message["type"] == kind and message.get("world") == world:
                return message
        died = not self.is_alive
        status = self.close()
        how = exit_words(status) if died else f"did not answer within {limit_s:.0f} s"
        raise StartError(f"{self.what} {how}{self._where_it_ended()}")

    def _next_message(self, *, limit_s: float) -> Message | None:
        """Wait at most ``limit_s`` for the next message; None if there is none or the process is dead."""
        if not self.is_alive or not readable([self], limit_s=limit_s):
            return None
        message, _ = self._control.receive()
        if message is None:
            self.is_alive = False
        else:
            self._heard(message)
        return message


class Child(Handle):
    """A handle of a child process. The thread that creates it has to stay alive: the kernel ends the process with this
    thread. ``log`` is used by this process only, and deleted at the end if it is empty."""

    def __init__(self, control: Wire, process: "Forked | subprocess.Popen[bytes]", *, log: Path) -> None:
        super().__init__(control)
        self._process, self._log = process, log

    def terminate(self) -> None:
        """Ask the process to end with all its ranks, from any thread; the thread that uses it sees it die."""
        self._process.terminate()

    def close(self) -> int:
        self.is_alive = False
        self._control.close()
        try:
            self._process.wait(timeout=_ANSWER_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._log.exists() and self._log.stat().st_size == 0:
            self._log.unlink()
        return int(self._process.returncode or 0)

    def _where_it_ended(self) -> str:
        return f"; end of {self._log.name}:\n{tail(self._log)}"


def start_child(
    module: str,
    arguments: Sequence[str],
    *,
    control: "socket.socket",
    log: Path,
    env: dict[str, str],
    python: str = "",
) -> "subprocess.Popen[bytes]":
    """Start ``python -m module FD PARENT ARGUMENTS...``; FD is the child's end of its control socket, which it
    inherits, and PARENT this process."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [python or sys.executable, "-P", "-m", module, str(control.fileno()), str(os.getpid()), *arguments],
            pass_fds=[control.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=env,
        )


def check_host(size: int, *, memory: int) -> None:
    """Raises StartError if a host with ``memory`` bytes of free memory has no room for ``size`` ranks."""
    if size > MOST_RANKS:
        raise too_small(size, f"one host starts at most {MOST_RANKS}")
    if size * RANK_BYTES > memory:
        needs = f"each needs more than {RANK_BYTES // 2**20} MiB of memory, and {memory // 2**20} MiB are free"
        raise too_small(size, f"{needs}, enough for {max(1, memory // RANK_BYTES)}")


def readable(sources: Iterable[Pollable], *, limit_s: float) -> list[int]:
    """Wait at most ``limit_s``; returns the descriptors of those ``sources`` that can be read or are closed."""
    poll = select.poll()
    for source in sources:
        poll.register(source.fileno(), select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0.0, limit_s) * 1000)]
