"""Launch: the controller's handles of a zygote process and of the worlds that it starts.

Serves claim 8: however the controller ends, its zygotes notice (their sockets close, and the kernel signals them) and
end their ranks.
"""

import contextlib
import itertools
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol

from conformance.room.machine import available_memory
from conformance.world.heartbeat import Heartbeats
from conformance.world.nursery import Forked, environment, fork_zygote
from conformance.world.process import process_state, processor_seconds, signal_process
from conformance.world.reason import exit_words, tail
from conformance.world.wire import MOST_FDS, Message, Wire, wire_pair

START_LIMIT_S = 120.0  # for importing torch and a backend on a loaded machine
_ZYGOTE = "conformance.world.zygote"
_ANSWER_LIMIT_S = 30.0  # a zygote only forks, signals and reaps
_GONE_LIMIT_S = 2.0
MOST_RANKS = MOST_FDS - 2  # of a world: the descriptors of all its ranks travel in one packet, with two more
RANK_BYTES = 40 * 2**20  # private memory of a forked rank with a tiny model; every rank needs at least this

_world_numbers = itertools.count(1)


class Pollable(Protocol):
    """An object with a file descriptor that can be polled."""

    def fileno(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Part:
    """Of a world with ranks on several hosts (conformance.hosts): the ranks here begin with ``first``, ``of`` so many;
    all meet at ``store``, an address at which the first one listens."""

    first: int
    of: int
    store: tuple[str, int]


class StartError(Exception):
    """A zygote or a world could not be started. The message is for the user."""


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
    zygote: "ZygoteHandle"
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
        self.zygote.receive()
        is_there = self.zygote.is_alive and not self.lost
        return is_there and all(self.state(rank) not in ("", "Z") for rank in range(self.size))

    def state(self, rank: int) -> str:
        """The kernel's letter for the process of a rank (conformance.world.process.process_state)."""
        return process_state(self.pids[rank])

    def processor_seconds(self) -> float:
        """What all ranks have used."""
        return sum(map(processor_seconds, self.pids))

    def signal(self, rank: int, number: int) -> None:
        signal_process(self.pids[rank], number)

    def bury(self) -> list[int]:
        """End and reap all processes of the world. Returns the pids of those that could not be ended."""
        left = self.zygote.bury(self)
        for wire in self.wires:
            wire.close()
        self.beats.close()
        return left


class ZygoteHandle:
    """A running zygote. The thread that creates it has to stay alive: the kernel ends the zygote with this thread."""

    def __init__(
        self, *, ranks: Literal["forked", "started"], preload: tuple[str, ...], log: Path, python: str = ""
    ) -> None:
        self._log = log  # used by this zygote only; deleted at the end if it is empty
        self._worlds: dict[int, World] = {}
        self.is_alive = True
        self._control, theirs = wire_pair()
        self._process: Forked | subprocess.Popen[bytes]
        with theirs, log.open("ab") as output:
            if ranks == "forked" and not python:
                self._process = fork_zygote(preload, control=theirs, log=output)
            else:
                arguments = [str(theirs.fileno()), str(os.getpid()), ranks, *preload]
                self._process = subprocess.Popen(
                    [python or sys.executable, "-P", "-m", _ZYGOTE, *arguments],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env=environment(is_other=bool(python)),
                )
        self._is_ready = False

    def fileno(self) -> int:
        return self._control.fileno()

    def receive(self) -> None:
        """Process all messages that have arrived; does not wait."""
        while self._next_message(limit_s=0.0) is not None:
            pass

    def wait_until_ready(self) -> None:
        """Wait until the zygote has imported its modules. If an import fails, ends the zygote and raises StartError."""
        if self._is_ready:
            return
        try:
            ready = self._answer("ready", world=None, limit_s=START_LIMIT_S)
            if ready["error"]:
                raise StartError(ready["error"])
        except BaseException:
            self.close()
            raise
        self._is_ready = True

    def start_world(
        self,
        *,
        size: int,
        device: str,
        preload: tuple[str, ...],
        gpus: tuple[str, ...] = (),
        memory_limit_bytes: int | None = None,
        part: Part | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> World:
        """Start the ranks of a world. They initialise torch.distributed in their first task.

        gpus: the UUIDs of those that ranks see; empty: those that this process sees. part: of a world with other ranks
        elsewhere, whose ``size`` are here. variables: of their environment.

        Raises StartError, also if the host has no room for so many ranks.
        """
        check_host(size, memory=available_memory())
        self.wait_until_ready()
        number = next_world_number()
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            try:
                descriptors = []
                for name in ("heartbeats", "store"):
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
                spec = {
                    "first": part.first if part else 0,
                    "size": part.of if part else size,
                    "local_size": size,
                    "store": part.store if part else None,
                    "device": device,
                    "port": _free_port(),
                    "preload": preload,
                    "memory_limit_bytes": memory_limit_bytes,
                }
                seen = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
                start = {"do": "start", "world": number, "spec": spec, "variables": {**variables, **seen}}
                self._control.send(start, fds=descriptors)
            except OSError as error:
                raise too_small(size, str(error.strerror)) from error
            theirs.close()
            started = self._answer("started", world=number, limit_s=_ANSWER_LIMIT_S)
            if started["error"]:
                raise too_small(size, started["error"])
            ours.pop_all()  # the world keeps them
        world = World(
            number=number,
            zygote=self,
            pids=started["pids"],
            wires=wires,
            beats=beats,
            computes_when_busy=device == "cpu",
        )
        self._worlds[number] = world
        return world

    def bury(self, world: World) -> list[int]:
        """End a world's processes; returns the pids that are left. If the zygote is dead, the kernel ends them."""
        del self._worlds[world.number]
        if self.is_alive:
            self._control.send({"do": "bury", "world": world.number})
            try:
                return list(self._answer("buried", world=world.number, limit_s=_ANSWER_LIMIT_S)["left"])
            except StartError:
                self.close()
        return self._left_by_kernel(world)

    def _left_by_kernel(self, world: World) -> list[int]:
        deadline = time.monotonic() + _GONE_LIMIT_S
        left = world.pids
        while left and time.monotonic() < deadline:
            left = [pid for pid in left if process_state(pid) not in ("", "Z")]
            time.sleep(0.01 if left else 0)
        return left

    def terminate(self) -> None:
        """Ask the zygote to end with all its ranks, from any thread; the thread that uses it sees it die."""
        self._process.terminate()

    def close(self) -> int:
        """End the zygote with all its ranks; returns its exit status."""
        self.is_alive = False
        self._control.close()
        if not self._is_ready:  # it does not read its socket before its imports are done
            self._process.terminate()
        try:
            self._process.wait(timeout=_ANSWER_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._log.exists() and self._log.stat().st_size == 0:
            self._log.unlink()
        return int(self._process.returncode or 0)

    def _answer(self, kind: str, *, world: int | None, limit_s: float) -> Message:
        deadline = time.monotonic() + limit_s
        while (message := self._next_message(limit_s=deadline - time.monotonic())) is not None:
            if message["type"] == kind and message.get("world") == world:
                return message
        died = not self.is_alive
        status = self.close()
        what = exit_words(status) if died else f"did not answer within {limit_s:.0f} s"
        raise StartError(f"the process that ranks are forked from {what}; end of {self._log.name}:\n{tail(self._log)}")

    def _next_message(self, *, limit_s: float) -> Message | None:
        """Wait at most ``limit_s`` for the next message; None if there is none or the zygote is dead."""
        if not self.is_alive or not readable([self], limit_s=limit_s):
            return None
        message, _ = self._control.receive()
        if message is None:
            self.is_alive = False
        elif message["type"] == "exited" and (world := self._worlds.get(message["world"])):
            world.statuses[message["rank"]] = message["status"]
        return message


def next_world_number() -> int:
    return next(_world_numbers)


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


def _free_port() -> int:
    """A free port for MASTER_PORT, which frameworks may read; the world itself does not use it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
