"""Agent: the process of a host that starts ranks there and speaks for them: `parity agent HOST:PORT` (claim 8).

It has the zygotes and worlds that a controller has on one host, and passes messages on between ranks and the relay of
the controller. When the connection ends, however it ends, its ranks end with it. Its GPUs are leased while it lives.
"""

import argparse
import contextlib
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from fcntl import ioctl
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from conformance.core.errors import UsageError
from conformance.core.process import process_state, signal_process
from conformance.runtime import WorldConfig
from conformance.runtime.config import StartError
from conformance.runtime.forkserver_client import Part, ZygoteHandle, Zygotes
from conformance.runtime.gpu_inventory import gpus_of_host, more_shares, seats_of, shares_of, visible_to
from conformance.runtime.gpu_leases import Ticket, lease_folder
from conformance.runtime.messages import Garbage, Message
from conformance.runtime.multihost.handshake import (
    ALIVE_S,
    LOST_S,
    Closed,
    Refused,
    Stream,
    Wanted,
    address_of,
    greet_relay,
    secret_of_environment,
)
from conformance.runtime.slots import Lease, Seat
from conformance.runtime.worker_groups import World, readable

COME_S = 300.0  # how long an agent tries to reach its controller
_PULSE_S = 0.25  # of worlds that run a task: while one waits, its controller reads nothing
_RETRY_S = 0.5
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A world that is started when its zygote has imported: other worlds go on meanwhile."""

    number: int
    zygote: ZygoteHandle
    config: WorldConfig
    variables: dict[str, str]
    seats: tuple[Seat, ...]
    part: Part


@dataclass(kw_only=True, eq=False)
class _Mine:
    """The part of a world that is on this host. open: ranks that have not closed their sockets. at_work: those that
    run a task, or clean up after it."""

    number: int
    world: World
    open: set[int]
    at_work: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)  # ranks whose ends were told
    is_lost: bool = False


class Agent:
    def __init__(self, stream: Stream, *, device: str, gpus: tuple[str, ...], logs: Path) -> None:
        self._stream, self._device, self._gpus = stream, device, gpus
        self._zygotes = Zygotes(logs)
        self._asked: dict[int, _Asked] = {}
        self._mine: dict[int, _Mine] = {}
        self._interface = interface_of(stream.own_address)
        self._heard = time.monotonic()

    def serve(self) -> None:
        """Serve until the controller says that the run has ended. Raises Closed if it is gone before."""
        threading.Thread(target=self._live, daemon=True).start()
        try:
            pulsed = 0.0
            is_running = self._obey_all()  # what came together with the greeting
            while is_running:
                wires = {w.fileno(): (m, rank) for m in self._mine.values() for rank, w in self._open_of(m)}
                poll = select.poll()
                for fd in (self._stream.fileno(), *wires, *(zygote.fileno() for zygote in self._zygotes)):
                    poll.register(fd, select.POLLIN)
                ready = [fd for fd, _ in poll.poll(_PULSE_S * 1000)]
                for fd in ready:
                    if fd in wires:
                        self._hear(*wires[fd])
                self._start_those_that_can()
                self._report_ends()
                if time.monotonic() - pulsed > _PULSE_S:
                    pulsed = time.monotonic()
                    for mine in self._mine.values():
                        if mine.at_work:
                            self._pulse(mine)
                if self._stream.fileno() in ready:
                    is_running = self._obey_all()
                if time.monotonic() - self._heard > LOST_S:
                    raise Closed(f"it said nothing for {LOST_S:g} s")
        finally:
            for mine in self._mine.values():
                mine.world.bury()
            self._zygotes.close()

    def _live(self) -> None:
        """In a thread: ending a world may take longer than the relay waits for a word."""
        with contextlib.suppress(Closed):
            while True:
                time.sleep(ALIVE_S)
                self._stream.send({"type": "live"})

    def _open_of(self, mine: _Mine) -> Iterator[tuple[int, Any]]:
        return ((rank, mine.world.wires[rank]) for rank in sorted(mine.open))

    def _obey_all(self) -> bool:
        for message in self._stream.arrived():
            if message["do"] == "end":
                return False
            self._obey(message)
            # Not before, because it may wait for longer than a controller that says nothing is waited for.
            self._heard = time.monotonic()
        return True

    def _obey(self, message: Message) -> None:
        if message["do"] == "start":
            return self._ask(message)
        mine = self._mine.get(message.get("world", -1))
        if message["do"] == "bury":
            self._asked.pop(message["world"], None)
            left = mine.world.bury() if mine else []
            self._mine.pop(message["world"], None)
            self._stream.send({"type": "buried", "world": message["world"], "left": left})
        elif mine is not None and message["do"] == "tell":
            rank, told = message["rank"], message["message"]
            if told.get("do") == "task":
                mine.world.beats.write(rank, "start", count=0)
                mine.at_work.add(rank)
            mine.world.wires[rank].send(told)
        elif mine is not None and message["do"] == "signal":
            signal_process(mine.world.pids[message["rank"]], message["signal"])
        return None

    def _ask(self, message: Message) -> None:
        spec, part, number = message["spec"], message["part"], message["world"]
        store = part["store"] or [self._stream.own_address, free_port(self._stream.own_address)]
        config = WorldConfig(
            size=part["size"],
            device="cpu" if self._device == "cpu" else "cuda",
            preload=tuple(spec["preload"]),
            python=spec["python"],
            memory_limit_bytes=spec["memory_limit_bytes"],
        )
        gpus = tuple(self._gpus[slot] for slot in part["slots"]) if self._gpus else ()
        try:
            zygote = self._zygotes.of(config)
        except (OSError, StartError) as error:
            return self._say_started(number, error=str(error))
        self._asked[number] = _Asked(
            number=number,
            zygote=zygote,
            config=config,
            variables=self._network() | visible_to(gpus),
            seats=seats_of(gpus),
            part=Part(first=part["first"], of=spec["size"], store=(str(store[0]), int(store[1]))),
        )
        return None

    def _start_those_that_can(self) -> None:
        for asked in [asked for asked in self._asked.values() if asked.zygote.is_ready()]:
            del self._asked[asked.number]
            try:
                world = asked.zygote.start_world(
                    asked.config, variables=asked.variables, seats=asked.seats, part=asked.part
                )
            except (StartError, OSError) as error:
                self._say_started(asked.number, error=str(error))
            else:
                self._mine[asked.number] = _Mine(number=asked.number, world=world, open=set(range(world.size)))
                self._say_started(asked.number, pids=world.pids, store=asked.part.store)

    def _say_started(
        self, number: int, *, pids: list[int] | None = None, store: object = None, error: str = ""
    ) -> None:
        started = {"type": "started", "world": number, "pids": pids or [], "store": store, "error": error}
        self._stream.send(started)

    def _network(self) -> dict[str, str]:
        """The interface that ranks of this host use; NCCL's only where the user has not named one."""
        names = {"GLOO_SOCKET_IFNAME": self._interface}
        return names | ({} if "NCCL_SOCKET_IFNAME" in os.environ else {"NCCL_SOCKET_IFNAME": self._interface})

    def _hear(self, mine: _Mine, rank: int) -> None:
        """Pass on all that a rank has said, because the last word may explain its death."""
        wire = mine.world.wires[rank]
        while rank in mine.open and readable([wire], limit_s=0.0):
            try:
                message, _ = wire.receive()
            except Garbage as garbage:
                message = {"type": "garbage", "what": str(garbage)}
            if message is None or message.get("type") == "garbage":
                mine.open.discard(rank)
            if message is None or message.get("type") in ("garbage", "clean"):
                mine.at_work.discard(rank)
            self._pulse(mine)  # or a failure would be told with the phase of a quarter of a second ago
            self._stream.send({"type": "said", "world": mine.number, "rank": rank, "message": message})

    def _report_ends(self) -> None:
        for mine in self._mine.values():
            mine.world.handle.receive()
            for rank, status in mine.world.statuses.items():
                if rank not in mine.told:
                    mine.told.add(rank)
                    self._hear(mine, rank)
                    self._pulse(mine)
                    self._stream.send({"type": "exited", "world": mine.number, "rank": rank, "status": status})
            if not mine.world.handle.is_alive and not mine.is_lost:
                mine.is_lost = True
                why = "the process that ranks are forked from has ended, and its ranks with it"
                self._stream.send({"type": "lost", "world": mine.number, "why": why})

    def _pulse(self, mine: _Mine) -> None:
        world, now = mine.world, time.monotonic()
        beats = [world.beats.read(rank) for rank in range(world.size)]
        self._stream.send(
            {
                "type": "pulse",
                "world": mine.number,
                "beats": [[beat.phase, beat.count, now - beat.time, beat.marks] for beat in beats],
                "states": [process_state(pid) for pid in world.pids],
                "seconds": world.processor_seconds(),
            }
        )


def run(options: argparse.Namespace) -> int:
    """`parity agent`: 0 when the run has ended, 2 if the two do not fit together, 3 if the controller is gone."""
    secret, where = secret_of_environment(), address_of(options.controller)
    stream, lease = _connected(where), list[Lease]()

    def slots(wanted: Wanted) -> int:
        if wanted.device == "cpu":
            return int(options.slots or os.cpu_count() or 1)
        lease.append(_leased(options.slots, wanted.ranks_per_gpu))
        return len(lease[0].block)

    try:
        wanted = greet_relay(stream, secret=secret, slots=slots)
        print(f"parity agent: works for {options.controller}", file=sys.stderr, flush=True)
        with TemporaryDirectory(prefix="parity-agent-") as logs:
            Agent(stream, device=wanted.device, gpus=lease[0].block if lease else (), logs=Path(logs)).serve()
    except Refused as refused:
        raise UsageError(f"agent: {refused}") from None
    except Closed as closed:
        print(f"parity agent: the controller at {options.controller} is gone: {closed}", file=sys.stderr)
        return 3
    return 0


def _connected(where: tuple[str, int]) -> Stream:
    """The connection to a controller, which may start later than the agent. Raises UsageError."""
    deadline = time.monotonic() + COME_S
    while True:
        try:
            return Stream(socket.create_connection(where, timeout=10))
        except OSError as error:
            if time.monotonic() > deadline:
                why = f"{error.strerror or error} for {COME_S:g} s"
                raise UsageError(f"agent: no controller at {where[0]}:{where[1]} ({why})") from None
        time.sleep(_RETRY_S)


def _leased(slots: int | None, ranks_per_gpu: int) -> Lease:
    """A lease of all GPUs that are visible here, or of ``slots`` of them, or of their shares. Raises Refused if another
    run has them."""
    gpus = gpus_of_host()
    places = shares_of(gpus, ranks_per_gpu)
    if (slots or 1) > len(places):
        each = f" for {ranks_per_gpu} ranks each" if ranks_per_gpu > 1 else ""
        more = f"; {more_shares(slots, len(gpus))} (parity run)" if slots and gpus else ""
        raise Refused(f"it has {len(gpus)} GPUs{each}, and was told to offer {slots or 1} (--slots){more}")
    ticket = Ticket(places, slots or len(places), folder=lease_folder())
    if (lease := ticket.serve()) is None:
        ticket.withdraw()
        raise Refused("another run has leased its GPUs")
    return lease


def free_port(address: str) -> int:
    """A port that is free now, for the store at which ranks meet."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def interface_of(address: str) -> str:
    """The name of the network interface with this IPv4 address; ``lo`` if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return "lo"
