"""Fleet: the controller's handles of its relay: which agents have come, and worlds whose ranks they start (claim 8).

Slots: what worlds of several hosts lease: one of an agent for each rank, so that cells run side by side (claim 8).

An agent holds its GPUs while it lives, so its slots are leased within the run alone: the locks are in a folder of the
controller. Blocks are those of all slots in the order in which agents came.
"""

import logging
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from conformance.core.errors import UsageError
from conformance.core.host_resources import Room
from conformance.matrix.options import Elsewhere, Ranks
from conformance.runtime import WorldConfig
from conformance.runtime.config import StartError
from conformance.runtime.gpu_slots import LeasedPlaces
from conformance.runtime.messages import Message, Wire, wire_pair
from conformance.runtime.multihost.handshake import SECRET, address_of, secret_of_environment
from conformance.runtime.preload_server import environment
from conformance.runtime.slots import Block, NoLease
from conformance.runtime.worker_groups import MOST_RANKS, Child, Handle, World, start_child, too_small

_ANSWER_LIMIT_S = 180.0  # agents import before they start ranks
_ENDED_LIMIT_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """How many agents a run waits for, where they find it (HOST:PORT), and how many ranks share a GPU of theirs."""

    count: int
    listen: str
    ranks_per_gpu: int = 1


def hosts_of(elsewhere: Elsewhere, ranks: Ranks) -> Hosts | None:
    """What the user's options say. Raises UsageError."""
    if bool(elsewhere.hosts) != bool(elsewhere.listen):
        raise UsageError(
            "--hosts and --listen belong together: how many agents there are, and where they find this run"
        )
    if not (elsewhere.hosts and elsewhere.listen):
        return None
    return Hosts(count=elsewhere.hosts, listen=elsewhere.listen, ranks_per_gpu=ranks.ranks_per_gpu)


@dataclass(frozen=True, kw_only=True)
class AgentHere:
    """An agent that has come: its name, its host's, how many ranks it starts, and what room there was when it came."""

    name: str
    host: str
    slots: int
    room: Room


@dataclass(frozen=True, kw_only=True)
class FarWorld(World):
    """A world of several hosts. What the kernel tells of ranks here, agents tell of theirs, a moment later."""

    states: dict[int, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # of a processor, by agent

    def state(self, rank: int) -> str:
        return self.states.get(rank, "R")

    def processor_seconds(self) -> float:
        return sum(self.seconds.values())

    def signal(self, rank: int, number: int) -> None:
        assert isinstance(self.handle, FarHandle)
        self.handle.signal(self, rank, number)


class Fleet(Child):
    """A running relay. Threads share it, and each starts worlds by a FarHandle of its own."""

    what = "the process that agents connect to"

    def __init__(self, hosts: Hosts, *, device: str, folder: Path) -> None:
        """Raises UsageError if the secret is missing, or nothing can listen at the address."""
        host, port = address_of(hosts.listen)
        secret = secret_of_environment().decode()
        folder.mkdir(parents=True, exist_ok=True)
        self._hosts = hosts
        self._agents: tuple[AgentHere, ...] = ()
        self._told: list[str] = []
        self._had_all = False
        self._talking = threading.RLock()
        self._folder = TemporaryDirectory(prefix="parity-fleet-")
        self.own_folder = Path(self._folder.name)  # on a disk of this host
        log = folder / f"relay-{os.getpid()}.log"
        control, theirs = wire_pair()
        with theirs:
            arguments = [host, str(port), device, str(hosts.ranks_per_gpu), str(folder.resolve())]
            env = {**environment(), SECRET: secret}
            process = start_child("conformance.runtime.multihost.relay", arguments, control=theirs, log=log, env=env)
        super().__init__(control, process, log=log)
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
    def agents(self) -> tuple[AgentHere, ...]:
        """Those that are here."""
        return self._agents

    @property
    def slots(self) -> int:
        """How many ranks the agents that are here start."""
        return sum(agent.slots for agent in self._agents)

    def problem(self) -> str:
        """Why no world can be started, for the user; empty if nothing is in the way."""
        with self._talking:
            self.receive()
        if not self.is_alive:
            return "the process that agents connect to has ended"
        agents = self._agents
        if len(agents) >= self._hosts.count:
            return ""
        here = ", ".join(agent.name for agent in agents) or "none"
        told = f"; {'; '.join(self._told)}" if self._told else ""
        verb = "are left" if self._had_all else "have come"
        start = f"start parity agent {self.address} on the others"
        return f"{len(agents)} of {self._hosts.count} agents {verb} ({here}){told}; {start}"

    def close(self) -> int:
        status = super().close()
        self._folder.cleanup()
        return status

    def handle(self, parts: Sequence[tuple[str, Sequence[int]]]) -> "FarHandle":
        """Of worlds of which each agent starts the ranks in these of its slots."""
        control, theirs = wire_pair()
        with theirs, self._talking:
            self._control.send({"do": "speak"}, fds=[theirs.fileno()])
        return FarHandle(control, self, parts)

    def ended(self) -> int:
        """The exit status of the relay, which is gone; 0 if it is not."""
        with self._talking:
            try:
                return self._process.wait(timeout=_ENDED_LIMIT_S)
            except subprocess.TimeoutExpired:
                return 0

    def _heard(self, message: Message) -> None:
        if message["type"] == "agents":
            self._agents = tuple(_agent(one) for one in message["agents"])
            self._told += message["told"]
            for told in message["told"]:
                logger.warning("%s", told)


def _agent(said: Mapping[str, object]) -> AgentHere:
    room = said["room"]
    assert isinstance(room, dict)
    return AgentHere(name=str(said["name"]), host=str(said["host"]), slots=int(str(said["slots"])), room=Room(**room))


class FarHandle(Handle):
    """Starts worlds at fixed slots of agents. One thread uses it, but for ``terminate``."""

    what = Fleet.what
    made = FarWorld

    def __init__(self, control: Wire, fleet: Fleet, parts: Sequence[tuple[str, Sequence[int]]]) -> None:
        super().__init__(control)
        self._fleet, self._parts = fleet, parts
        self._is_over = False

    def prepare(self, config: WorldConfig) -> None:
        """Nothing: agents import what their first worlds need."""

    def start(self, config: WorldConfig) -> World:
        """Start the ranks of a world, the first ones at the first agent. Raises StartError."""
        if problem := "the run was stopped" if self._is_over else self._fleet.problem():
            raise StartError(problem)
        if config.size > MOST_RANKS:
            raise too_small(config.size, f"one controller speaks with at most {MOST_RANKS}")
        spec = {
            "size": config.size,
            "preload": config.preload,
            "python": config.python,
            "memory_limit_bytes": config.memory_limit_bytes,
        }
        return self.launch(
            {"spec": spec, "parts": self._parts},
            size=config.size,
            files=("heartbeats",),
            computes_when_busy=config.device == "cpu",
            limit_s=_ANSWER_LIMIT_S,
        )

    def signal(self, world: World, rank: int, number: int) -> None:
        self._control.send({"do": "signal", "world": world.number, "rank": rank, "signal": int(number)})

    def terminate(self) -> None:
        """All of them end with the relay."""
        self._is_over = True
        self._fleet.terminate()

    def close(self) -> int:
        """The relay lives on, and so do agents; they end what this handle has started."""
        died, self.is_alive = not self.is_alive, False
        self._control.close()
        return self._fleet.ended() if died else 0

    def _heard(self, message: Message) -> None:
        super()._heard(message)
        world = self._worlds.get(message.get("world", -1))
        if isinstance(world, FarWorld):
            if message["type"] == "lost":
                world.lost.append(message["why"])
            elif message["type"] == "pulse":
                world.states.update({int(rank): state for rank, state in message["states"].items()})
                world.seconds[message["agent"]] = message["seconds"]


_SLOT = " slot "


class Slots(LeasedPlaces):
    def __init__(self, fleet: Fleet) -> None:
        super().__init__(what="slots of agents", folder=fleet.own_folder)
        self._fleet = fleet

    def names(self) -> Block:
        if problem := self._fleet.problem():
            raise NoLease(problem)
        return tuple(f"{agent.name}{_SLOT}{slot}" for agent in self._fleet.agents for slot in range(agent.slots))

    def names_of_a_host(self) -> Block:
        """The first agent's."""
        names = self.names()
        return next(tuple(slots) for _, slots in groupby(names, _agent_of))

    def starter(self, block: Block) -> FarHandle:
        parts = [
            (agent, [int(name.rpartition(_SLOT)[2]) for name in slots]) for agent, slots in groupby(block, _agent_of)
        ]
        return self._fleet.handle(parts)


def _agent_of(name: str) -> str:
    return name.rpartition(_SLOT)[0]
