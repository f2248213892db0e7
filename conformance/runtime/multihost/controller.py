"""The controller's handles of the hosts of a run, and of the worker groups on them.

Cells lease a slot of a host for each rank, so that cells run side by side. A host holds its GPUs while it lives, so its
slots are leased within the run alone: the locks are in a folder of the controller. Blocks are those of all slots, in
the order in which the engine named the hosts.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from conformance.core.process import most_start_s
from conformance.runtime import WorkerGroupConfig
from conformance.runtime.failure import StartError
from conformance.runtime.leased_slots import LeasedSlots
from conformance.runtime.messages import Message, Wire, wire_pair
from conformance.runtime.multihost.host import Wanted
from conformance.runtime.multihost.relay import JoinedHost, Relay
from conformance.runtime.worker_groups import MOST_RANKS, Block, Handle, NoLease, WorkerGroup, too_small

_ANSWER_MARGIN_S = 60.0  # hosts import before they start ranks, and say themselves when an import hangs
_STOP_LIMIT_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts that an engine has started: a wire to each of them, and how many ranks share a GPU of theirs."""

    wires: tuple[Wire, ...]
    ranks_per_gpu: int = 1


_started: tuple[Wire, ...] = ()


@contextlib.contextmanager
def started_by_engine(wires: Sequence[Wire]) -> Iterator[None]:
    """Make these hosts start the ranks of the run that this process begins."""
    global _started
    _started = tuple(wires)
    try:
        yield
    finally:
        _started = ()


def hosts_of_engine(*, ranks_per_gpu: int) -> Hosts | None:
    """Return the hosts that an engine has started for this process; None if ranks run on this host alone."""
    return Hosts(wires=_started, ranks_per_gpu=ranks_per_gpu) if _started else None


@dataclass(frozen=True, kw_only=True)
class RemoteWorkerGroup(WorkerGroup):
    """A worker group on several hosts, which report the states of its ranks, a moment later than a kernel would."""

    states: dict[int, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # of processors, by host

    def state(self, rank: int) -> str:
        return self.states.get(rank, "R")

    def processor_seconds(self) -> float:
        return sum(self.seconds.values())

    effort = processor_seconds

    def signal(self, rank: int, number: int) -> None:
        assert isinstance(self.handle, FarHandle)
        self.handle.signal(self, rank, number)


class Fleet:
    """The hosts of a run. Threads share it, and each starts worker groups by a FarHandle of its own."""

    def __init__(self, hosts: Hosts, *, device: str, folder: Path) -> None:
        """``folder``: of the run; all hosts have to see it."""
        folder.mkdir(parents=True, exist_ok=True)
        self._count = len(hosts.wires)
        self._had_all = False
        self._folder = TemporaryDirectory(prefix="parity-hosts-")
        self.own_folder = Path(self._folder.name)  # on a disk of this host
        wanted = Wanted(device=device, ranks_per_gpu=hosts.ranks_per_gpu)
        self._relay = Relay(hosts.wires, wanted=wanted, folder=folder)
        self._relay.start()

    def wait(self, *, limit_s: float) -> None:
        """Wait until all hosts have joined, or one cannot; after the limit, ``problem`` names the missing ones."""
        logger.info("waiting for %d hosts", self._count)
        with self._relay.changed:
            self._relay.changed.wait_for(lambda: self._relay.problems or self._is_complete(), timeout=limit_s)
        self._had_all = self._is_complete()

    def _is_complete(self) -> bool:
        return len(self.joined) >= self._count

    @property
    def joined(self) -> tuple[JoinedHost, ...]:
        return self._relay.joined

    @property
    def slots(self) -> int:
        """Count the ranks that the joined hosts start."""
        return sum(host.slots for host in self.joined)

    def problem(self) -> str:
        """Say why no worker group can be started, for the user; empty if nothing is in the way."""
        if not self._relay.is_alive():
            return "the connection to the hosts has ended"
        joined = self.joined
        if len(joined) >= self._count:
            return ""
        names = ", ".join(host.name for host in joined) or "none"
        verb = "are left" if self._had_all else "have joined"
        return "; ".join((f"{len(joined)} of {self._count} hosts {verb} ({names})", *self._relay.problems))

    def terminate(self) -> None:
        """End all ranks on all hosts, from any thread."""
        self._relay.stop()

    def close(self) -> None:
        self._relay.stop()
        self._relay.join(timeout=_STOP_LIMIT_S)
        self._folder.cleanup()

    def handle(self, parts: Sequence[tuple[str, Sequence[int]]]) -> "FarHandle":
        """Return a handle of worker groups whose ranks are started by these hosts, in these of their slots."""
        control, relay_wire = wire_pair()
        self._relay.speak(relay_wire)
        return FarHandle(control, self, parts)


class FarHandle(Handle):
    """Starts worker groups at fixed slots of hosts. One thread uses it, except for ``terminate``."""

    what = "the connection to the hosts"
    made = RemoteWorkerGroup

    def __init__(self, control: Wire, fleet: Fleet, parts: Sequence[tuple[str, Sequence[int]]]) -> None:
        super().__init__(control)
        self._fleet, self._parts = fleet, parts
        self._is_over = False

    def prepare(self, config: WorkerGroupConfig) -> None:
        """Do nothing: a host imports what its first worker group needs."""

    def start(self, config: WorkerGroupConfig) -> WorkerGroup:
        """Start the ranks of a worker group, the first ones on the first host. Raises StartError."""
        if problem := "the run was stopped" if self._is_over else self._fleet.problem():
            raise StartError(problem)
        if config.size > MOST_RANKS:
            raise too_small(config.size, f"one controller speaks with at most {MOST_RANKS}")
        spec = {
            "size": config.size,
            "preload": config.preload,
            "gpu_backend": config.gpu_backend,
            "python": config.python,
            "memory_limit_bytes": config.memory_limit_bytes,
        }
        return self.launch(
            {"spec": spec, "parts": self._parts},
            size=config.size,
            files=("heartbeats",),
            computes_when_busy=config.device == "cpu",
            limit_s=most_start_s() + _ANSWER_MARGIN_S,
        )

    def signal(self, worker_group: WorkerGroup, rank: int, number: int) -> None:
        self._control.send({"do": "signal", "worker_group": worker_group.number, "rank": rank, "signal": int(number)})

    def terminate(self) -> None:
        """End the ranks of all handles, which the fleet ends together."""
        self._is_over = True
        self._fleet.terminate()

    def close(self) -> int:
        """Close the connection; the hosts go on, and end what this handle has started."""
        self.is_alive = False
        self._control.close()
        return 0

    def _dispatch(self, message: Message) -> None:
        super()._dispatch(message)
        worker_group = self._worker_groups.get(message.get("worker_group", -1))
        if isinstance(worker_group, RemoteWorkerGroup):
            if message["type"] == "lost":
                worker_group.lost.append(message["why"])
            elif message["type"] == "pulse":
                worker_group.states.update({int(rank): state for rank, state in message["states"].items()})
                worker_group.seconds[message["host"]] = message["seconds"]


_SLOT = " slot "


class Slots(LeasedSlots):
    def __init__(self, fleet: Fleet) -> None:
        super().__init__(what="slots of hosts", folder=fleet.own_folder)
        self._fleet = fleet

    def names(self) -> Block:
        if problem := self._fleet.problem():
            raise NoLease(problem)
        return tuple(f"{host.name}{_SLOT}{slot}" for host in self._fleet.joined for slot in range(host.slots))

    def names_of_a_host(self) -> Block:
        """Return the slots of the first host."""
        names = self.names()
        return next(tuple(slots) for _, slots in groupby(names, _host_of))

    def starter(self, block: Block) -> FarHandle:
        parts = [(host, [int(name.rpartition(_SLOT)[2]) for name in slots]) for host, slots in groupby(block, _host_of)]
        return self._fleet.handle(parts)


def _host_of(name: str) -> str:
    return name.rpartition(_SLOT)[0]
