"""Fleet: the controller's handle of its relay: which agents have come, and worlds whose ranks they start (claim 8)."""

import contextlib
import logging
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from conformance.hosts.stream import SECRET, address_of, secret_of_environment
from conformance.validation import UsageError
from conformance.world.heartbeat import Heartbeats
from conformance.world.launch import MOST_RANKS, StartError, World, ZygoteHandle, next_world_number, too_small
from conformance.world.nursery import environment
from conformance.world.wire import Message, wire_pair

_ANSWER_LIMIT_S = 180.0  # agents import before they start ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """How many agents a run waits for, and where they find it (HOST:PORT)."""

    count: int
    listen: str


@dataclass(frozen=True, kw_only=True)
class _FarWorld(World):
    """A world of several hosts. What the kernel tells of ranks here, agents tell of theirs, a moment later."""

    fleet: "Fleet"
    states: dict[int, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # of a processor, by agent

    def state(self, rank: int) -> str:
        return self.states.get(rank, "R")

    def processor_seconds(self) -> float:
        return sum(self.seconds.values())

    def signal(self, rank: int, number: int) -> None:
        self.fleet.signal(self, rank, number)


class Fleet(ZygoteHandle):
    """A running relay. As of a zygote, the thread that creates it has to stay alive."""

    def __init__(self, hosts: Hosts, *, device: str, folder: Path) -> None:
        """Raises UsageError if the secret is missing, or nothing can listen at the address."""
        host, port = address_of(hosts.listen)
        secret = secret_of_environment().decode()
        folder.mkdir(parents=True, exist_ok=True)
        self._hosts, self._log, self._worlds = hosts, folder / f"relay-{os.getpid()}.log", {}
        self._agents: list[tuple[str, int]] = []
        self._told: list[str] = []
        self._had_all = False
        self.is_alive, self._is_ready = True, True
        self._control, theirs = wire_pair()
        with theirs, self._log.open("ab") as output:
            arguments = [str(theirs.fileno()), str(os.getpid()), host, str(port), device, str(folder.resolve())]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "conformance.hosts.relay", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**environment(), SECRET: secret},
            )
        try:
            ready = self._answer("ready", world=None, limit_s=_ANSWER_LIMIT_S)
        except StartError as error:
            raise UsageError(f"--listen {hosts.listen}: {error}") from None
        if ready["error"]:
            self.close()
            raise UsageError(f"--listen {hosts.listen}: {ready['error']}")
        self.address = f"{host}:{ready['port']}"

    def wait(self, *, limit_s: float) -> None:
        """Wait until all agents have come; after the limit, ``problem`` tells who has not."""
        deadline = time.monotonic() + limit_s
        logger.info("waiting for %d agents: parity agent %s", self._hosts.count, self.address)
        while len(self._agents) < self._hosts.count and time.monotonic() < deadline and self.is_alive:
            self._next_message(limit_s=min(1.0, deadline - time.monotonic()))
        self._had_all = len(self._agents) >= self._hosts.count

    @property
    def slots(self) -> int:
        """How many ranks the agents that are here start."""
        return sum(slots for _, slots in self._agents)

    def problem(self) -> str:
        """Why no world can be started, for the user; empty if nothing is in the way."""
        self.receive()
        if not self.is_alive:
            return "the process that agents connect to has ended"
        if len(self._agents) >= self._hosts.count:
            return ""
        here = ", ".join(name for name, _ in self._agents) or "none"
        told = f"; {'; '.join(self._told)}" if self._told else ""
        verb = "are left" if self._had_all else "have come"
        start = f"start parity agent {self.address} on the others"
        return f"{len(self._agents)} of {self._hosts.count} agents {verb} ({here}){told}; {start}"

    def start_far(
        self, *, size: int, device: str, preload: tuple[str, ...], python: str, memory_limit_bytes: int | None
    ) -> World:
        """Start the ranks of a world on the agents' hosts, the first ones on the first. Raises StartError."""
        if problem := self.problem():
            raise StartError(problem)
        if size > MOST_RANKS:
            raise too_small(size, f"one controller speaks with at most {MOST_RANKS}")
        number = next_world_number()
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            descriptors = [os.memfd_create("heartbeats")]
            theirs.callback(os.close, descriptors[0])
            beats = Heartbeats(descriptors[0], size=size)
            ours.callback(beats.close)
            wires = []
            for _ in range(size):
                wire, end = wire_pair()
                wires.append(wire)
                ours.callback(wire.close)
                descriptors.append(theirs.enter_context(end).fileno())
            spec = {"size": size, "preload": preload, "python": python, "memory_limit_bytes": memory_limit_bytes}
            self._control.send({"do": "start", "world": number, "spec": spec}, fds=descriptors)
            theirs.close()
            started = self._answer("started", world=number, limit_s=_ANSWER_LIMIT_S)
            if started["error"]:
                raise StartError(started["error"])
            ours.pop_all()
        world = _FarWorld(
            number=number,
            zygote=self,
            pids=started["pids"],
            wires=wires,
            beats=beats,
            computes_when_busy=device == "cpu",
            fleet=self,
        )
        self._worlds[number] = world
        return world

    def signal(self, world: World, rank: int, number: int) -> None:
        self._control.send({"do": "signal", "world": world.number, "rank": rank, "signal": int(number)})

    def _left_by_kernel(self, world: World) -> list[int]:
        return []  # the relay is gone, and each agent ends its ranks; nobody here can ask their kernels

    def _next_message(self, *, limit_s: float) -> Message | None:
        message = super()._next_message(limit_s=limit_s)
        if message is not None and message["type"] == "agents":
            self._agents = [(name, slots) for name, slots in message["agents"]]
            self._told += message["told"]
            for told in message["told"]:
                logger.warning("%s", told)
        world = self._worlds.get(message.get("world", -1)) if message else None
        if message is not None and isinstance(world, _FarWorld):
            if message["type"] == "lost":
                world.lost.append(message["why"])
            elif message["type"] == "pulse":
                world.states.update({int(rank): state for rank, state in message["states"].items()})
                world.seconds[message["agent"]] = message["seconds"]
        return message
