"""Relay: the process of a controller that agents connect to. To its controller it is what a zygote is.

``python -m conformance.runtime.multihost.relay CONTROL_FD PARENT_PID HOST PORT DEVICE RANKS_PER_GPU FOLDER``. It
passes messages on between the controller's sockets (one that says who is there, and one for each of the threads that
have worlds) and the agents' connections, writes the heartbeats of all ranks into the controller's memory, and says
which agents came, were refused and were lost. It runs no task and imports no torch.

Serves claim 8: when the controller dies, it ends, and its agents end their ranks because their connections close.
"""

import contextlib
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from conformance.core.process import signal_at_death_of
from conformance.runtime.heartbeat import Heartbeats
from conformance.runtime.messages import Message, Wire
from conformance.runtime.multihost.handshake import (
    ALIVE_S,
    LOST_S,
    Closed,
    Offered,
    Refused,
    Stream,
    Wanted,
    greet_agent,
    secret_of_environment,
)


@dataclass(kw_only=True, eq=False)
class _Agent:
    offered: Offered
    stream: Stream
    heard: float = field(default_factory=time.monotonic)


@dataclass(kw_only=True, eq=False)
class _World:
    """control: of the handle that started it. parts: each agent and the rank that its first one is. wires: the relay's
    ends of the controller's sockets."""

    number: int
    control: Wire
    beats: Heartbeats
    wires: list[Wire]
    parts: list[tuple[_Agent, int, int]]  # agent, first rank, number of ranks
    pids: dict[int, int] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    buried: int = 0

    def agent_of(self, rank: int) -> tuple[_Agent, int]:
        return next((agent, rank - first) for agent, first, size in self.parts if first <= rank < first + size)


class Relay:
    def __init__(self, control: Wire, listener: socket.socket, *, secret: bytes, wanted: Wanted, folder: Path) -> None:
        self._control, self._listener = control, listener
        self._handles: list[Wire] = []  # of the controller's threads, each with worlds of its own
        self._secret, self._wanted, self._folder = secret, wanted, folder
        self._agents: list[_Agent] = []
        self._worlds: dict[int, _World] = {}
        self._starting: dict[int, Message] = {}  # worlds whose first part has not started yet
        self._came: queue.SimpleQueue[tuple[Stream, Offered] | str] = queue.SimpleQueue()
        self._wakeup = socket.socketpair()

    def serve(self) -> None:
        """Serve until the controller closes its socket or dies; agents are told, and end their ranks."""
        threading.Thread(target=self._accept, daemon=True).start()
        said = 0.0
        while True:
            controls = {control.fileno(): control for control in (self._control, *self._handles)}
            streams = {agent.stream.fileno(): agent for agent in self._agents}
            ranks = {w.fileno(): (world, rank) for world in self._worlds.values() for rank, w in enumerate(world.wires)}
            poll = select.poll()
            for fd in (self._wakeup[0].fileno(), *controls, *streams, *ranks):
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(ALIVE_S * 1000):
                if fd in streams:
                    self._hear(streams[fd])
                elif fd in ranks:
                    self._pass_on(*ranks[fd])
                elif fd not in controls:
                    self._welcome()
                elif controls[fd] is not self._control:
                    self._obey(controls[fd])
                elif not self._listen_to_controller():
                    for agent in self._agents:
                        with contextlib.suppress(Closed):
                            agent.stream.send({"do": "end"})
                    return
            now = time.monotonic()
            for agent in list(self._agents):
                if now - agent.heard > LOST_S:
                    self._lose(agent, f"it said nothing for {LOST_S:g} s")
                elif now - said > ALIVE_S:
                    self._tell(agent, {"do": "live"})
            said = now if now - said > ALIVE_S else said

    # --- agents that come ---

    def _accept(self) -> None:
        while True:
            end, address = self._listener.accept()
            threading.Thread(target=self._greet, args=(Stream(end), address[0]), daemon=True).start()

    def _greet(self, stream: Stream, address: str) -> None:
        """In a thread of its own, because whoever connects may say nothing."""
        try:
            offered = greet_agent(stream, secret=self._secret, wanted=self._wanted, folder=self._folder)
            self._came.put((stream, offered))
        except Refused as refused:
            self._came.put(f"{refused} (from {address})")
        except (Closed, KeyError, TypeError, ValueError) as error:
            self._came.put(f"what connected from {address} was no agent: {error}")
        self._wakeup[1].send(b".")

    def _welcome(self) -> None:
        self._wakeup[0].recv(4096)
        refused = []
        while not self._came.empty():
            came = self._came.get()
            if isinstance(came, str):
                refused.append(came)
            else:
                stream, offered = came
                if alike := sum(agent.offered.name.startswith(offered.name) for agent in self._agents):  # containers
                    offered = replace(offered, name=f"{offered.name} {alike + 1}")
                self._agents.append(_Agent(stream=stream, offered=offered))
                self._hear(self._agents[-1])  # what came together with its greeting
        self._say_who_is_there(refused)

    def _say_who_is_there(self, told: list[str]) -> None:
        there = [vars(agent.offered) for agent in self._agents]
        self._control.send({"type": "agents", "agents": there, "told": told})

    def _lose(self, agent: _Agent, why: str) -> None:
        if agent not in self._agents:
            return
        self._agents.remove(agent)
        agent.stream.close()
        said = f"agent {agent.offered.name} was lost: {why}"
        for world in list(self._worlds.values()):
            if any(part[0] is agent for part in world.parts):
                world.control.send({"type": "lost", "world": world.number, "why": said})
                self._is_buried(world, agent, [])
                if world.number in self._starting:
                    self._say_started(world, error=said)
        self._say_who_is_there([said])

    def _tell(self, agent: _Agent, message: Message) -> None:
        try:
            agent.stream.send(message)
        except Closed as closed:
            self._lose(agent, str(closed))

    # --- what the controller wants ---

    def _listen_to_controller(self) -> bool:
        """A further handle of the controller's; False if the controller is gone."""
        message, fds = self._control.receive()
        self._handles += [Wire(socket.socket(fileno=fd)) for fd in fds]
        return message is not None

    def _obey(self, control: Wire) -> None:
        """Do what a handle says; if it is closed, end its worlds."""
        message, fds = control.receive()
        if message is None:
            self._handles.remove(control)
            control.close()
            for left in [one for one in self._worlds.values() if one.control is control]:
                self._end_everywhere(left)
                self._forget(left)
        elif message["do"] == "start":
            self._start(control, message, fds)
        elif (world := self._worlds.get(message["world"])) is None:
            if message["do"] == "bury":
                control.send({"type": "buried", "world": message["world"], "left": []})
        elif message["do"] == "bury":
            world.buried = len(world.parts)
            for agent, _, _ in list(world.parts):
                if agent in self._agents:
                    self._tell(agent, {"do": "bury", "world": world.number})
                else:
                    self._is_buried(world, agent, [])
        else:
            agent, local = world.agent_of(message["rank"])
            if agent in self._agents:
                self._tell(agent, {**message, "rank": local})

    def _start(self, control: Wire, message: Message, fds: list[int]) -> None:
        """Start the first part of a world; the others need to know where it meets."""
        beats_fd, *sockets = fds
        size, number = int(message["spec"]["size"]), int(message["world"])
        here = {agent.offered.name: agent for agent in self._agents}
        parts, first, missing = [], 0, ""
        for name, slots in message["parts"]:
            count = min(len(slots), size - first)  # one rank may have several GPUs
            if name in here:
                parts.append((here[name], first, count))
            else:
                missing = f"agent {name} was lost"
            first += count
        wires = [Wire(socket.socket(fileno=fd)) for fd in sockets]
        world = _World(number=number, control=control, beats=Heartbeats(beats_fd, size=size), wires=wires, parts=parts)
        os.close(beats_fd)
        self._worlds[number], self._starting[number] = world, message
        if missing:
            self._say_started(world, error=missing)
        else:
            self._start_part(world, message, 0, store=None)

    def _start_part(self, world: _World, message: Message, part: int, *, store: object) -> None:
        agent, first, size = world.parts[part]
        of_part = {"first": first, "size": size, "slots": message["parts"][part][1], "store": store}
        self._tell(agent, {"do": "start", "world": world.number, "spec": message["spec"], "part": of_part})

    def _say_started(self, world: _World, *, error: str) -> None:
        self._starting.pop(world.number, None)
        pids = [world.pids.get(rank, 0) for rank in range(len(world.wires))]
        world.control.send({"type": "started", "world": world.number, "pids": pids, "error": error})
        if error:
            self._end_everywhere(world)
            self._forget(world)

    def _end_everywhere(self, world: _World) -> None:
        for agent, _, _ in world.parts:
            if agent in self._agents:
                self._tell(agent, {"do": "bury", "world": world.number})

    def _pass_on(self, world: _World, rank: int) -> None:
        """A message of the controller to a rank."""
        if world.number not in self._worlds:  # it was lost a moment ago
            return
        message, held = world.wires[rank].receive()
        for fd in held:  # a lease of slots is the controller's alone
            os.close(fd)
        agent, local = world.agent_of(rank)
        if message is None:  # the controller has closed it, and will bury the world
            world.wires[rank].close()
            self._forget(world)
        elif agent in self._agents:
            self._tell(agent, {"do": "tell", "world": world.number, "rank": local, "message": message})

    def _is_buried(self, world: _World, agent: _Agent, left: list[int]) -> None:
        """An agent has ended its part of a world, or has itself ended."""
        world.left += left
        if world.buried:
            world.buried -= 1
            if not world.buried:
                world.control.send({"type": "buried", "world": world.number, "left": world.left})
                self._forget(world)

    def _forget(self, world: _World) -> None:
        if self._worlds.pop(world.number, None) is not None:
            for wire in world.wires:
                with contextlib.suppress(OSError):
                    wire.close()
            world.beats.close()

    # --- what agents say ---

    def _hear(self, agent: _Agent) -> None:
        try:
            for message in agent.stream.arrived():
                agent.heard = time.monotonic()
                world = self._worlds.get(message.get("world", -1))
                part = next((part for part in world.parts if part[0] is agent), None) if world else None
                if world is not None and part is not None:
                    self._hear_of(world, part, message)
        except (Closed, KeyError, TypeError, ValueError) as error:
            self._lose(agent, str(error))

    def _hear_of(self, world: _World, part: tuple[_Agent, int, int], message: Message) -> None:
        agent, first, _ = part
        kind = message["type"]
        if kind == "pulse":
            for local, beat in enumerate(message["beats"]):
                world.beats.put(first + local, *beat)
            states = {str(first + local): state for local, state in enumerate(message["states"])}
            pulse = {"agent": agent.offered.name, "states": states, "seconds": message["seconds"]}
            world.control.send({"type": "pulse", "world": world.number, **pulse})
        elif kind == "said":
            self._said(world, first + message["rank"], message["message"])
        elif kind == "started":
            self._has_started(world, part, message)
        elif kind == "exited":
            world.control.send({**message, "rank": first + message["rank"]})
        elif kind == "buried":
            self._is_buried(world, agent, message["left"])
        elif kind == "lost":
            why = f"agent {agent.offered.name}: {message['why']}"
            world.control.send({"type": "lost", "world": world.number, "why": why})

    def _said(self, world: _World, rank: int, message: Message | None) -> None:
        if message is None:
            with contextlib.suppress(OSError):
                socket.socket(fileno=os.dup(world.wires[rank].fileno())).shutdown(socket.SHUT_WR)
        else:
            world.wires[rank].send(message)

    def _has_started(self, world: _World, part: tuple[_Agent, int, int], message: Message) -> None:
        if (start := self._starting.get(world.number)) is None:
            return
        if message["error"]:
            return self._say_started(world, error=f"agent {part[0].offered.name}: {message['error']}")
        world.pids.update({part[1] + local: pid for local, pid in enumerate(message["pids"])})
        if part[1] == 0:
            for other in range(1, len(world.parts)):
                self._start_part(world, start, other, store=message["store"])
        if len(world.pids) == len(world.wires):
            self._say_started(world, error="")
        return None


def main() -> None:
    control_fd, parent, host, port, device, ranks_per_gpu, folder = sys.argv[1:]
    signal_at_death_of(int(parent), signal.SIGTERM)
    control = Wire(socket.socket(fileno=int(control_fd)))
    os.set_inheritable(control.fileno(), False)
    secret = secret_of_environment()
    try:
        listener = socket.create_server((host, int(port)), backlog=64)
    except OSError as error:
        control.send({"type": "ready", "error": f"nothing can listen at {host}:{port}: {error.strerror}", "port": 0})
        return
    control.send({"type": "ready", "error": "", "port": listener.getsockname()[1]})
    wanted = Wanted(device=device, ranks_per_gpu=int(ranks_per_gpu))
    Relay(control, listener, secret=secret, wanted=wanted, folder=Path(folder)).serve()


if __name__ == "__main__":
    main()
