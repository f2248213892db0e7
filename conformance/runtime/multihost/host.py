"""Starts the ranks of one host and speaks for them.

``python -m conformance.runtime.multihost.host CONTROL_FD ADDRESS SLOTS`` is a child of the process that an engine
started on this host. It has the forkservers and the worker groups that a controller has here, and passes messages on
between ranks and the relay of the controller. When its connection ends, for whatever reason, it ends its ranks. It
leases GPUs while it lives.

Before ranks are started, both sides find out whether they fit together:

host     hello: its name, and the versions of all that has to be the same
relay    welcome: device, ranks per GPU, working directory, a file to look for     or refused, with the reason
host     offer: what is in that file, slots, free memory and disk                  or refused, with the reason
relay    accepted                                                                  or refused, with the reason
"""

import contextlib
import hashlib
import os
import platform
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fcntl import ioctl
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import conformance
from conformance.core.errors import UsageError
from conformance.core.host import host_resources_of
from conformance.core.packages import package_version
from conformance.core.process import process_state, signal_process
from conformance.runtime import WorkerGroupConfig
from conformance.runtime.failure import StartError
from conformance.runtime.forkserver_client import ForkserverHandle, Forkservers, Part
from conformance.runtime.gpu_inventory import gpus_of_host, more_shares, shares_of, slots_of, visible_to
from conformance.runtime.gpu_leases import Ticket, lease_folder
from conformance.runtime.messages import LIVE_S, LOST_S, Closed, Garbage, Message, Wire, readable, take, wire_pair
from conformance.runtime.preload_server import environment
from conformance.runtime.worker_groups import Lease, Slot, WorkerGroup

EXIT_REFUSED, EXIT_CLOSED = 2, 3
PACKAGES = ("torch", "transformers", "ring-flash-attn", "deepspeed", "megatron-core")
_PULSE_S = 0.25  # between reports of the ranks that run a task
_SIOCGIFADDR = 0x8915


class Refused(Exception):
    """Raised if this host and its controller do not fit together. The message is for the user."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a run wants of the ranks of its hosts: their device, and how many may share a GPU."""

    device: str
    ranks_per_gpu: int


def versions() -> dict[str, str]:
    """Return the versions that have to be the same on all hosts, with a digest of this project's sources."""
    package = Path(conformance.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)} {file.stat().st_size}\n".encode() + file.read_bytes())
    return {
        "backend-parity": f"{conformance.__version__} (sources {digest.hexdigest()[:12]})",
        "python": platform.python_version(),
        **{name: package_version(name) for name in PACKAGES},
    }


def start_host(*, address: str, slots: int | None) -> tuple[Wire, "subprocess.Popen[bytes]"]:
    """Start the host process of this machine, which ends when the returned wire is closed.

    address: this machine's IPv4 address that the other hosts can reach. slots: how many ranks it offers; None: one for
    each visible GPU, or for each processor.
    """
    wire, host_wire = wire_pair()
    with host_wire:
        arguments = [str(host_wire.fileno()), address, str(slots or 0)]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, *arguments],
            pass_fds=[host_wire.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environment(),
        )
    return wire, process


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A worker group that starts when its forkserver has imported; other worker groups go on meanwhile."""

    number: int
    forkserver: ForkserverHandle
    config: WorkerGroupConfig
    variables: dict[str, str]
    slots: tuple[Slot, ...]
    part: Part


@dataclass(kw_only=True, eq=False)
class _LocalGroup:
    """The ranks of a worker group that are on this host.

    open: the ranks that have not closed their sockets. at_work: those that run a task, or clean up after it. reported:
    those whose end was reported.
    """

    number: int
    worker_group: WorkerGroup
    open: set[int]
    at_work: set[int] = field(default_factory=set)
    reported: set[int] = field(default_factory=set)
    is_lost: bool = False


class Host:
    def __init__(self, wire: Wire, *, address: str, device: str, gpus: tuple[str, ...], logs: Path) -> None:
        self._wire, self._address, self._device, self._gpus = wire, address, device, gpus
        self._forkservers = Forkservers(logs)
        self._asked: dict[int, _Asked] = {}
        self._local_groups: dict[int, _LocalGroup] = {}
        self._interface = interface_of(address)
        self._heard = time.monotonic()

    def serve(self) -> None:
        """Serve until the controller ends the run. Raises Closed if it is gone before."""
        threading.Thread(target=self._live, daemon=True).start()
        try:
            pulsed = 0.0
            is_running = True
            while is_running:
                wires = {
                    w.fileno(): (group, rank)
                    for group in self._local_groups.values()
                    for rank, w in self._open_of(group)
                }
                poll = select.poll()
                for fd in (self._wire.fileno(), *wires, *(forkserver.fileno() for forkserver in self._forkservers)):
                    poll.register(fd, select.POLLIN)
                ready = [fd for fd, _ in poll.poll(_PULSE_S * 1000)]
                for fd in ready:
                    if fd in wires:
                        self._hear(*wires[fd])
                self._start_those_that_can()
                self._report_ends()
                if time.monotonic() - pulsed > _PULSE_S:
                    pulsed = time.monotonic()
                    for local_group in self._local_groups.values():
                        if local_group.at_work:
                            self._pulse(local_group)
                if self._wire.fileno() in ready:
                    is_running = self._obey_all()
                if time.monotonic() - self._heard > LOST_S:
                    raise Closed(f"it sent nothing for {LOST_S:g} s")
        finally:
            for local_group in self._local_groups.values():
                local_group.worker_group.bury()
            self._forkservers.close()

    def _send(self, message: Message) -> None:
        if not self._wire.send(message, limit_s=LOST_S):
            raise Closed("it takes no messages")

    def _live(self) -> None:
        """Send a sign of life, in a thread: ending a worker group may take longer than the relay waits."""
        with contextlib.suppress(Closed):
            while True:
                time.sleep(LIVE_S)
                self._send({"type": "live"})

    def _open_of(self, local_group: _LocalGroup) -> Iterator[tuple[int, Any]]:
        return ((rank, local_group.worker_group.wires[rank]) for rank in sorted(local_group.open))

    def _obey_all(self) -> bool:
        for message in take(self._wire, limit_s=0.0):
            if message.get("type") == "closed":
                raise Closed(message["why"])
            if message["do"] == "end":
                return False
            self._obey(message)
            # Not before: obeying may take longer than LOST_S.
            self._heard = time.monotonic()
        return True

    def _obey(self, message: Message) -> None:
        if message["do"] == "start":
            return self._ask(message)
        local_group = self._local_groups.get(message.get("worker_group", -1))
        if message["do"] == "bury":
            self._asked.pop(message["worker_group"], None)
            left = local_group.worker_group.bury() if local_group else []
            self._local_groups.pop(message["worker_group"], None)
            self._send({"type": "buried", "worker_group": message["worker_group"], "left": left})
        elif local_group is not None and message["do"] == "tell":
            rank, content = message["rank"], message["message"]
            if content.get("do") == "task":
                local_group.worker_group.beats.write(rank, "start", count=0)
                local_group.at_work.add(rank)
            local_group.worker_group.wires[rank].send(content)
        elif local_group is not None and message["do"] == "signal":
            signal_process(local_group.worker_group.pids[message["rank"]], message["signal"])
        return None

    def _ask(self, message: Message) -> None:
        spec, part, number = message["spec"], message["part"], message["worker_group"]
        store = part["store"] or [self._address, free_port(self._address)]
        config = WorkerGroupConfig(
            size=part["size"],
            device="cpu" if self._device == "cpu" else "cuda",
            preload=tuple(spec["preload"]),
            gpu_backend=spec["gpu_backend"],
            python=spec["python"],
            memory_limit_bytes=spec["memory_limit_bytes"],
        )
        gpus = tuple(self._gpus[slot] for slot in part["slots"]) if self._gpus else ()
        try:
            forkserver = self._forkservers.of(config)
        except (OSError, StartError) as error:
            return self._say_started(number, error=str(error))
        self._asked[number] = _Asked(
            number=number,
            forkserver=forkserver,
            config=config,
            variables=self._network() | visible_to(gpus),
            slots=slots_of(gpus),
            part=Part(first=part["first"], of=spec["size"], store=(str(store[0]), int(store[1]))),
        )
        return None

    def _start_those_that_can(self) -> None:
        for asked in [asked for asked in self._asked.values() if asked.forkserver.is_ready()]:
            del self._asked[asked.number]
            try:
                worker_group = asked.forkserver.start_worker_group(
                    asked.config, variables=asked.variables, slots=asked.slots, part=asked.part
                )
            except (StartError, OSError) as error:
                self._say_started(asked.number, error=str(error))
            else:
                self._local_groups[asked.number] = _LocalGroup(
                    number=asked.number, worker_group=worker_group, open=set(range(worker_group.size))
                )
                self._say_started(asked.number, pids=worker_group.pids, store=asked.part.store)

    def _say_started(
        self, number: int, *, pids: list[int] | None = None, store: object = None, error: str = ""
    ) -> None:
        started = {"type": "started", "worker_group": number, "pids": pids or [], "store": store, "error": error}
        self._send(started)

    def _network(self) -> dict[str, str]:
        """Return the variables that name the network interface of ranks; NCCL's only if they have none (forkserver)."""
        return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), self._interface)

    def _hear(self, local_group: _LocalGroup, rank: int) -> None:
        """Pass on all messages of a rank, because the last one may explain its death."""
        wire = local_group.worker_group.wires[rank]
        while rank in local_group.open and readable([wire], limit_s=0.0):
            try:
                message, _ = wire.receive()
            except Garbage as garbage:
                message = {"type": "garbage", "what": str(garbage)}
            if message is None or message.get("type") == "garbage":
                local_group.open.discard(rank)
            if message is None or message.get("type") in ("garbage", "clean"):
                local_group.at_work.discard(rank)
            self._pulse(local_group)  # or a failure would be reported with an old phase
            self._send({"type": "reply", "worker_group": local_group.number, "rank": rank, "message": message})

    def _report_ends(self) -> None:
        for local_group in self._local_groups.values():
            local_group.worker_group.handle.receive()
            for rank, status in local_group.worker_group.statuses.items():
                if rank not in local_group.reported:
                    local_group.reported.add(rank)
                    self._hear(local_group, rank)
                    self._pulse(local_group)
                    self._send({"type": "exited", "worker_group": local_group.number, "rank": rank, "status": status})
            if not local_group.worker_group.handle.is_alive and not local_group.is_lost:
                local_group.is_lost = True
                why = "the process that ranks are forked from has ended, and its ranks with it"
                self._send({"type": "lost", "worker_group": local_group.number, "why": why})

    def _pulse(self, local_group: _LocalGroup) -> None:
        worker_group, now = local_group.worker_group, time.monotonic()
        beats = [worker_group.beats.read(rank) for rank in range(worker_group.size)]
        self._send(
            {
                "type": "pulse",
                "worker_group": local_group.number,
                "beats": [[beat.phase, beat.count, now - beat.time, beat.marks] for beat in beats],
                "states": [process_state(pid) for pid in worker_group.pids],
                "seconds": worker_group.processor_seconds(),
            }
        )


def join(wire: Wire, *, slots: Callable[[Wanted], int]) -> Wanted:
    """Find out whether this host fits to its controller, and move to the controller's working directory.

    ``slots`` returns how many such ranks this host offers; it may raise Refused. Raises Refused and Closed.
    """
    name = f"{socket.gethostname()} (process {os.getpid()})"
    wire.send({"type": "hello", "name": name, "versions": versions()})
    welcome = _answer(wire)
    wanted = Wanted(device=str(welcome["device"]), ranks_per_gpu=int(welcome["ranks_per_gpu"]))
    try:
        os.chdir(welcome["cwd"])
        count = slots(wanted)
    except (OSError, Refused) as error:
        why = f"it has no folder {welcome['cwd']}" if isinstance(error, OSError) else str(error)
        wire.send({"type": "refused", "why": why})
        raise Refused(why) from None
    sign = Path(welcome["sign"])
    content = sign.read_text(encoding="utf-8") if sign.is_file() else ""
    resources = vars(host_resources_of(sign.parent))
    wire.send({"type": "offer", "sign": content, "slots": count, "host": socket.gethostname(), "resources": resources})
    _answer(wire)
    return wanted


def _answer(wire: Wire) -> Message:
    """Wait for the relay's answer, without limit: the controller may still be listing its cells."""
    while True:
        message, _ = wire.receive()
        if message is None:
            raise Closed("it closed the connection")
        if message.get("type") == "closed":
            raise Closed(message["why"])
        if message["do"] == "end":
            raise Closed("the run has ended")
        if message["do"] == "refused":
            raise Refused(str(message["why"]))
        if message["do"] != "live":
            return message


def main() -> int:
    """Return 0 when the run has ended, EXIT_REFUSED if host and controller do not fit, EXIT_CLOSED if it is gone."""
    control_fd, address, offered = sys.argv[1:]
    wire = Wire(socket.socket(fileno=int(control_fd)))
    os.set_inheritable(wire.fileno(), False)
    lease = list[Lease]()

    def slots(wanted: Wanted) -> int:
        if wanted.device == "cpu":
            return int(offered) or os.cpu_count() or 1
        lease.append(_leased(int(offered) or None, wanted.ranks_per_gpu))
        return len(lease[0].block)

    try:
        wanted = join(wire, slots=slots)
        with TemporaryDirectory(prefix="parity-host-") as logs:
            gpus = lease[0].block if lease else ()
            Host(wire, address=address, device=wanted.device, gpus=gpus, logs=Path(logs)).serve()
    except (Refused, UsageError) as refused:
        print(f"parity: this host does not take part: {refused}", file=sys.stderr)
        return EXIT_REFUSED
    except Closed as closed:
        print(f"parity: the controller is gone: {closed}", file=sys.stderr)
        return EXIT_CLOSED
    return 0


def _leased(slots: int | None, ranks_per_gpu: int) -> Lease:
    """Lease all GPUs that are visible here, or ``slots`` of them or of their shares. Raises Refused."""
    try:
        gpus = gpus_of_host()
    except UsageError as error:
        raise Refused(str(error)) from None
    shares = shares_of(gpus, ranks_per_gpu)
    if (slots or 1) > len(shares):
        each = f" for {ranks_per_gpu} ranks each" if ranks_per_gpu > 1 else ""
        more = f"; {more_shares(slots, len(gpus))} (parity run)" if slots and gpus else ""
        raise Refused(f"it has {len(gpus)} GPUs{each}, and was told to offer {slots or 1} slots{more}")
    ticket = Ticket(shares, slots or len(shares), folder=lease_folder())
    if (lease := ticket.serve()) is None:
        ticket.withdraw()
        raise Refused("another run has leased its GPUs")
    return lease


def free_port(address: str) -> int:
    """Return a port that is free now, for the store at which ranks meet."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def interface_of(address: str) -> str:
    """Return the name of the network interface with this IPv4 address; ``lo`` if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return "lo"


if __name__ == "__main__":
    sys.exit(main())
