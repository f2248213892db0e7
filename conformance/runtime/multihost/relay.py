"""Relays messages between the controller and the hosts of a run, in a thread of the controller.

It passes messages on between the sockets of the controller (one for each of the threads that have worker groups) and
the wires of the hosts, writes the heartbeats of all ranks into the controller's memory, and knows which hosts have
joined, were refused and were lost. When the controller dies, the wires close, and the hosts end their ranks.
"""

import contextlib
import logging
import os
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conformance.core.host import HostResources
from conformance.runtime.messages import LIVE_S, LOST_S, Closed, Heartbeats, Message, Wire, take
from conformance.runtime.multihost.host import Wanted, versions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class JoinedHost:
    """A host that has joined the run.

    name: of its process. host: of the machine. slots: how many ranks it starts. resources: the free memory and disk
    when it joined.
    """

    name: str
    host: str
    slots: int
    resources: HostResources


@dataclass(kw_only=True, eq=False)
class _Connection:
    """The relay's end of a host. sign: the file that the host has to see, while it is asked."""

    wire: Wire
    name: str = "a host"
    sign: Path | None = None
    joined: JoinedHost | None = None
    heard: float = field(default_factory=time.monotonic)


@dataclass(kw_only=True, eq=False)
class _WorkerGroup:
    """control: of the handle that started it. parts: each host, its first rank and the number of its ranks. wires: the
    relay's ends of the controller's sockets."""

    number: int
    control: Wire
    beats: Heartbeats
    wires: list[Wire]
    parts: list[tuple[_Connection, int, int]]
    pids: dict[int, int] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    buried: int = 0

    def host_of(self, rank: int) -> tuple[_Connection, int]:
        return next((host, rank - first) for host, first, size in self.parts if first <= rank < first + size)


class Relay(threading.Thread):
    """Other threads read ``joined`` and ``problems``, wait for ``changed``, and call ``speak`` and ``stop``."""

    def __init__(self, wires: Sequence[Wire], *, wanted: Wanted, folder: Path) -> None:
        """``wires``: one of each host. ``folder``: of the run, which all hosts have to see."""
        super().__init__(daemon=True, name="relay")
        self.joined: tuple[JoinedHost, ...] = ()
        self.problems: tuple[str, ...] = ()  # why hosts were refused or lost
        self.changed = threading.Condition()
        self._hosts = [_Connection(wire=wire) for wire in wires]
        self._handles: list[Wire] = []  # of the controller's threads
        self._new: queue.SimpleQueue[Wire] = queue.SimpleQueue()
        self._wanted, self._folder = wanted, folder
        self._worker_groups: dict[int, _WorkerGroup] = {}
        self._starting: dict[int, Message] = {}  # worker groups whose first part has not started yet
        self._is_over = False
        self._wakeup = socket.socketpair()

    def speak(self, end: socket.socket) -> None:
        """Serve the handle at the other end of this socket."""
        self._new.put(Wire(end))
        self._wakeup[1].send(b".")

    def stop(self) -> None:
        """End the ranks on all hosts; the thread ends soon after."""
        self._is_over = True
        self._wakeup[1].send(b".")

    def run(self) -> None:
        try:
            self._serve()
        finally:
            for host in self._hosts:
                host.wire.send({"do": "end"})
            for worker_group in list(self._worker_groups.values()):
                self._forget(worker_group)
            for wire in (*self._handles, *(host.wire for host in self._hosts)):
                wire.close()

    def _serve(self) -> None:
        sent = 0.0
        while not self._is_over:
            controls = {control.fileno(): control for control in self._handles}
            hosts = {host.wire.fileno(): host for host in self._hosts}
            ranks = {
                w.fileno(): (worker_group, rank)
                for worker_group in self._worker_groups.values()
                for rank, w in enumerate(worker_group.wires)
            }
            poll = select.poll()
            for fd in (self._wakeup[0].fileno(), *controls, *hosts, *ranks):
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(LIVE_S * 1000):
                if fd in hosts:
                    self._hear(hosts[fd])
                elif fd in ranks:
                    self._pass_on(*ranks[fd])
                elif fd in controls:
                    self._obey(controls[fd])
                else:
                    self._wakeup[0].recv(4096)
                    while not self._new.empty():
                        self._handles.append(self._new.get())
            now = time.monotonic()
            for host in list(self._hosts):
                if host.joined is not None and now - host.heard > LOST_S:
                    self._lose(host, f"it sent nothing for {LOST_S:g} s")
                elif now - sent > LIVE_S:
                    self._tell(host, {"do": "live"})
            sent = now if now - sent > LIVE_S else sent

    # --- hosts that join ---

    def _greet(self, host: _Connection, message: Message) -> None:
        """Find out whether a host fits to this run (conformance.runtime.multihost.host)."""
        if message["type"] == "hello":
            name = str(message["name"])
            same = sum(other.name.startswith(name) for other in self._hosts)  # containers may share names
            host.name = f"{name} {same + 1}" if same else name
            if different := different_versions(message["versions"], versions()):
                return self._refuse(host, f"it has {different}; install the same versions on all hosts")
            host.sign = self._folder / f"host-{secrets.token_hex(8)}"
            host.sign.write_text(host.sign.name, encoding="utf-8")
            wanted = {"device": self._wanted.device, "ranks_per_gpu": self._wanted.ranks_per_gpu}
            paths = {"cwd": str(Path.cwd()), "sign": str(host.sign.resolve())}
            self._tell(host, {"do": "welcome", **wanted, **paths})
        elif message["type"] == "refused":
            self._remove(host, f"host {host.name} does not take part: {message['why']}")
        elif message["type"] == "offer":
            if host.sign is None or message["sign"] != host.sign.name:
                missing = f"it does not see {self._folder.resolve()}"
                return self._refuse(host, f"{missing}; --out has to be in a folder that all hosts share")
            slots, resources = max(1, int(message["slots"])), HostResources(**message["resources"])
            host.joined = JoinedHost(name=host.name, host=str(message["host"]), slots=slots, resources=resources)
            self._tell(host, {"do": "accepted"})
            host.sign.unlink()
            self._publish()
        return None

    def _refuse(self, host: _Connection, why: str) -> None:
        host.wire.send({"do": "refused", "why": why})
        self._remove(host, f"host {host.name} was refused: {why}")

    def _lose(self, host: _Connection, why: str) -> None:
        if host not in self._hosts:
            return
        reason = f"host {host.name} was lost: {why}"
        self._remove(host, reason)
        for worker_group in list(self._worker_groups.values()):
            if any(part[0] is host for part in worker_group.parts):
                worker_group.control.send({"type": "lost", "worker_group": worker_group.number, "why": reason})
                self._is_buried(worker_group, host, [])
                if worker_group.number in self._starting:
                    self._say_started(worker_group, error=reason)

    def _remove(self, host: _Connection, problem: str) -> None:
        self._hosts.remove(host)
        host.wire.close()
        if host.sign is not None:
            host.sign.unlink(missing_ok=True)
        logger.warning("%s", problem)
        self._publish(problem)

    def _publish(self, *problems: str) -> None:
        with self.changed:
            self.joined = tuple(host.joined for host in self._hosts if host.joined is not None)
            self.problems += problems
            self.changed.notify_all()

    def _tell(self, host: _Connection, message: Message) -> None:
        if not host.wire.send(message):
            self._hear(host)  # its last messages may say why
            self._lose(host, "it takes no messages")

    # --- what the controller wants ---

    def _obey(self, control: Wire) -> None:
        """Do what a handle asks; if it is closed, end its worker groups."""
        message, fds = control.receive()
        if message is None:
            self._handles.remove(control)
            control.close()
            for left in [one for one in self._worker_groups.values() if one.control is control]:
                self._end_everywhere(left)
                self._forget(left)
        elif message["do"] == "start":
            self._start(control, message, fds)
        elif (worker_group := self._worker_groups.get(message["worker_group"])) is None:
            if message["do"] == "bury":
                control.send({"type": "buried", "worker_group": message["worker_group"], "left": []})
        elif message["do"] == "bury":
            worker_group.buried = len(worker_group.parts)
            for host, _, _ in list(worker_group.parts):
                if host in self._hosts:
                    self._tell(host, {"do": "bury", "worker_group": worker_group.number})
                else:
                    self._is_buried(worker_group, host, [])
        else:
            host, local = worker_group.host_of(message["rank"])
            if host in self._hosts:
                self._tell(host, {**message, "rank": local})

    def _start(self, control: Wire, message: Message, fds: list[int]) -> None:
        """Start the first part of a worker group; the other parts need the address at which its ranks meet."""
        beats_fd, *sockets = fds
        size, number = int(message["spec"]["size"]), int(message["worker_group"])
        here = {host.name: host for host in self._hosts if host.joined}
        parts, first, missing = [], 0, ""
        for name, slots in message["parts"]:
            count = min(len(slots), size - first)  # one rank may have several GPUs
            if name in here:
                parts.append((here[name], first, count))
            else:
                missing = f"host {name} was lost"
            first += count
        wires = [Wire(socket.socket(fileno=fd)) for fd in sockets]
        worker_group = _WorkerGroup(
            number=number, control=control, beats=Heartbeats(beats_fd, size=size), wires=wires, parts=parts
        )
        os.close(beats_fd)
        self._worker_groups[number], self._starting[number] = worker_group, message
        if missing:
            self._say_started(worker_group, error=missing)
        else:
            self._start_part(worker_group, message, 0, store=None)

    def _start_part(self, worker_group: _WorkerGroup, message: Message, part: int, *, store: object) -> None:
        host, first, size = worker_group.parts[part]
        of_part = {"first": first, "size": size, "slots": message["parts"][part][1], "store": store}
        self._tell(host, {"do": "start", "worker_group": worker_group.number, "spec": message["spec"], "part": of_part})

    def _say_started(self, worker_group: _WorkerGroup, *, error: str) -> None:
        self._starting.pop(worker_group.number, None)
        pids = [worker_group.pids.get(rank, 0) for rank in range(len(worker_group.wires))]
        worker_group.control.send(
            {"type": "started", "worker_group": worker_group.number, "pids": pids, "error": error}
        )
        if error:
            self._end_everywhere(worker_group)
            self._forget(worker_group)

    def _end_everywhere(self, worker_group: _WorkerGroup) -> None:
        for host, _, _ in worker_group.parts:
            if host in self._hosts:
                self._tell(host, {"do": "bury", "worker_group": worker_group.number})

    def _pass_on(self, worker_group: _WorkerGroup, rank: int) -> None:
        """Pass on a message of the controller to a rank."""
        if worker_group.number not in self._worker_groups:  # it was lost a moment ago
            return
        message, held = worker_group.wires[rank].receive()
        for fd in held:  # a lease of slots is the controller's alone
            os.close(fd)
        host, local = worker_group.host_of(rank)
        if message is None:  # the controller has closed it, and will bury the worker group
            worker_group.wires[rank].close()
            self._forget(worker_group)
        elif host in self._hosts:
            self._tell(host, {"do": "tell", "worker_group": worker_group.number, "rank": local, "message": message})

    def _is_buried(self, worker_group: _WorkerGroup, host: _Connection, left: list[int]) -> None:
        """Note that a host has ended its part of a worker group, or was lost."""
        worker_group.left += left
        if worker_group.buried:
            worker_group.buried -= 1
            if not worker_group.buried:
                worker_group.control.send(
                    {"type": "buried", "worker_group": worker_group.number, "left": worker_group.left}
                )
                self._forget(worker_group)

    def _forget(self, worker_group: _WorkerGroup) -> None:
        if self._worker_groups.pop(worker_group.number, None) is not None:
            for wire in worker_group.wires:
                with contextlib.suppress(OSError):
                    wire.close()
            worker_group.beats.close()

    # --- what hosts report ---

    def _hear(self, host: _Connection) -> None:
        try:
            for message in take(host.wire, limit_s=0.0):
                host.heard = time.monotonic()
                if message["type"] == "closed":
                    raise Closed(message["why"])
                if host.joined is None:
                    self._greet(host, message)
                    continue
                worker_group = self._worker_groups.get(message.get("worker_group", -1))
                part = next((part for part in worker_group.parts if part[0] is host), None) if worker_group else None
                if worker_group is not None and part is not None:
                    self._hear_of(worker_group, part, message)
        except (Closed, KeyError, TypeError, ValueError) as error:
            self._lose(host, str(error))

    def _hear_of(self, worker_group: _WorkerGroup, part: tuple[_Connection, int, int], message: Message) -> None:
        host, first, _ = part
        kind = message["type"]
        if kind == "pulse":
            for local, beat in enumerate(message["beats"]):
                worker_group.beats.put(first + local, *beat)
            states = {str(first + local): state for local, state in enumerate(message["states"])}
            pulse = {"host": host.name, "states": states, "seconds": message["seconds"]}
            worker_group.control.send({"type": "pulse", "worker_group": worker_group.number, **pulse})
        elif kind == "reply":
            self._reply(worker_group, first + message["rank"], message["message"])
        elif kind == "started":
            self._has_started(worker_group, part, message)
        elif kind == "exited":
            worker_group.control.send({**message, "rank": first + message["rank"]})
        elif kind == "buried":
            self._is_buried(worker_group, host, message["left"])
        elif kind == "lost":
            why = f"host {host.name}: {message['why']}"
            worker_group.control.send({"type": "lost", "worker_group": worker_group.number, "why": why})

    def _reply(self, worker_group: _WorkerGroup, rank: int, message: Message | None) -> None:
        if message is None:
            with contextlib.suppress(OSError):
                socket.socket(fileno=os.dup(worker_group.wires[rank].fileno())).shutdown(socket.SHUT_WR)
        else:
            worker_group.wires[rank].send(message)

    def _has_started(self, worker_group: _WorkerGroup, part: tuple[_Connection, int, int], message: Message) -> None:
        if (start := self._starting.get(worker_group.number)) is None:
            return
        if message["error"]:
            return self._say_started(worker_group, error=f"host {part[0].name}: {message['error']}")
        worker_group.pids.update({part[1] + local: pid for local, pid in enumerate(message["pids"])})
        if part[1] == 0:
            for other in range(1, len(worker_group.parts)):
                self._start_part(worker_group, start, other, store=message["store"])
        if len(worker_group.pids) == len(worker_group.wires):
            self._say_started(worker_group, error="")
        return None


def different_versions(of_host: dict[str, str], own: dict[str, str]) -> str:
    """Say which versions a host has that its controller has not; empty if they are the same."""
    names = [name for name in own if of_host.get(name) != own[name]]
    return ", ".join(f"{name} {of_host.get(name, 'unknown')} and not {own[name]}" for name in names)
