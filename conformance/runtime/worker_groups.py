"""Controls worker groups, and the processes that start them; declares the slots that they lease.

However the controller ends, these processes notice (their sockets close, and the kernel signals them) and end their
ranks.
"""

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from conformance.core.io import no_link
from conformance.core.process import effort, process_state, processor_seconds, signal_process
from conformance.runtime.failure import StartError, exit_words, tail
from conformance.runtime.messages import MOST_FDS, Device, Heartbeats, Message, Wire, readable, wire_pair

if TYPE_CHECKING:
    import socket

    from conformance.runtime.preload_server import Forked

_ANSWER_LIMIT_S = 30.0  # a forkserver only forks, signals and reaps
_TICK_S = 0.02  # another thread may have received the answer
MOST_RANKS = MOST_FDS - 2  # of a worker group: one packet carries the descriptors of all its ranks, and two more
RANK_BYTES = 40 * 2**20  # private memory of a forked rank with a tiny model; every rank needs at least this

_group_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class WorkerGroupConfig:
    """Configures a worker group.

    size: number of ranks. device: ``cpu``, or ``cuda``, where each rank has a GPU, or a share of one.
    preload: modules to import before the first task, such as the adapter's. They are imported once for all worker
        groups on one block of slots with the same ``preload``.
    gpu_backend: the backend of the process group with ``cuda``, as in torch.distributed.init_process_group.
    python: the executable that ranks run in; empty: that of this process.
    gpu_memory: required bytes. A worker group on leased slots (conformance.runtime.pool) gets enough GPUs of one
        host for them, whatever its size; all GPUs of that host if they do not suffice, or if their memory is
        unknown. Not compared: a live worker group serves tasks that need less or more memory of the same GPUs.
    rank_memory: bytes that each rank needs of its GPU; where leased GPUs are divided into shares, a rank gets as many
        shares of one GPU as hold them, or all of its shares. Not compared.
    memory_limit_bytes: limit of the address space of a rank, beyond what is mapped when the rank starts (CPU only).
        Address space is more than memory: each thread reserves some tens of MiB of it.

    Raises ValueError for a size below 1, and for a memory limit with ``cuda``.
    """

    size: int
    device: Device
    preload: tuple[str, ...]
    gpu_backend: str = "nccl"
    python: str = ""
    gpu_memory: int | None = field(default=None, compare=False)
    rank_memory: int = field(default=0, compare=False)
    memory_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a worker group of {self.size} ranks; it needs at least one")
        if self.device == "cuda" and self.memory_limit_bytes is not None:
            raise ValueError(
                "memory_limit_bytes limits address space, which CUDA reserves freely; leave it out for cuda"
            )


def too_small(size: int, reason: str) -> StartError:
    """Makes the StartError for a host that lacks the resources for a worker group of ``size`` ranks."""
    return StartError(
        f"this host cannot start {size} ranks: {reason}; use a smaller layout, or a host that allows more processes, "
        f"open files and memory"
    )


@dataclass(frozen=True, kw_only=True)
class WorkerGroup:
    """Controls a group of live ranks.

    pids, wires: by rank. computes_when_busy: whether a rank that uses the processor computes; on a GPU it may wait.
    statuses: exit statuses of the ranks that have ended; -N means killed by signal N. lost: descriptions of other ways
        in which ranks were lost.
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
        """Returns whether all ranks are alive. Asks the kernel, because the forkserver reports deaths with a delay."""
        self.handle.receive()
        is_there = self.handle.is_alive and not self.lost and not self.statuses
        return is_there and all(self.state(rank) not in ("", "Z") for rank in range(self.size))

    def state(self, rank: int) -> str:
        """Returns the kernel's letter for the state of a rank (conformance.core.process.process_state)."""
        return process_state(self.pids[rank])

    def processor_seconds(self) -> float:
        """Returns the processor time of all ranks together."""
        return sum(map(processor_seconds, self.pids))

    def effort(self) -> float:
        """Returns what all ranks together have computed and read (conformance.core.process.effort)."""
        return sum(map(effort, self.pids))

    def signal(self, rank: int, number: int) -> None:
        signal_process(self.pids[rank], number)

    def bury(self) -> list[int]:
        """Ends and reaps all processes of the worker group. Returns the pids of those that could not be ended."""
        left = self.handle.bury(self)
        for wire in self.wires:
            wire.close()
        self.beats.close()
        return left


class Handle:
    """Controls a process that starts worker groups. Threads may share the handle; one thread uses each worker group."""

    what: ClassVar[str]  # a description of the process, for messages
    made: ClassVar[type[WorkerGroup]] = WorkerGroup

    def __init__(self, control: Wire) -> None:
        self._control = control
        self._worker_groups: dict[int, WorkerGroup] = {}
        self._answers: dict[tuple[str, int], Message] = {}  # that no thread has taken yet, by type and worker group
        self._receiving = threading.RLock()
        self.is_alive = True

    def fileno(self) -> int:
        return self._control.fileno()

    def receive(self) -> None:
        """Processes all messages that have arrived; does not wait."""
        while self._receive_next(limit_s=0.0):
            pass

    def launch(
        self, start: Message, *, size: int, files: Sequence[str], computes_when_busy: bool, limit_s: float
    ) -> WorkerGroup:
        """Sends ``start`` with a file in memory for each name of ``files`` (the first for heartbeats) and a socket for
        each rank; returns the worker group when its ranks are running. Raises StartError."""
        number = next(_group_numbers)
        with contextlib.ExitStack() as child_ends, contextlib.ExitStack() as own_ends:
            try:
                descriptors = []
                for name in files:
                    descriptors.append(os.memfd_create(name))
                    child_ends.callback(os.close, descriptors[-1])
                beats = Heartbeats(descriptors[0], size=size)
                own_ends.callback(beats.close)
                wires = []
                for _ in range(size):
                    wire, child_end = wire_pair()
                    wires.append(wire)
                    own_ends.callback(wire.close)
                    descriptors.append(child_ends.enter_context(child_end).fileno())
                self._control.send({"do": "start", "worker_group": number, **start}, fds=descriptors)
            except OSError as error:
                raise too_small(size, str(error.strerror)) from error
            child_ends.close()
            started = self._answer("started", worker_group=number, limit_s=limit_s)
            if started["error"]:
                raise self._start_error(size, started["error"])
            own_ends.pop_all()  # the worker group keeps them
        worker_group = self._worker_groups[number] = self.made(
            number=number,
            handle=self,
            pids=started["pids"],
            wires=wires,
            beats=beats,
            computes_when_busy=computes_when_busy,
        )
        return worker_group

    def bury(self, worker_group: WorkerGroup) -> list[int]:
        """Ends a worker group's processes; returns the pids that are left. If the process of this handle is dead, the
        kernel ends them."""
        del self._worker_groups[worker_group.number]
        if self.is_alive:
            self._control.send({"do": "bury", "worker_group": worker_group.number})
            try:
                return list(self._answer("buried", worker_group=worker_group.number, limit_s=_ANSWER_LIMIT_S)["left"])
            except StartError:
                self.close()
        return self._left_by_others(worker_group)

    def close(self) -> int:
        """Ends the process with all its ranks; returns its exit status."""
        raise NotImplementedError

    def _start_error(self, size: int, error: str) -> StartError:
        """Makes the error for a worker group of ``size`` ranks that the process could not start."""
        return StartError(error)

    def _left_by_others(self, worker_group: WorkerGroup) -> list[int]:
        """Returns the pids of a worker group that outlive the process of this handle."""
        return []

    def _where_it_ended(self) -> str:
        """Returns where to look when the process has ended, as the end of a message."""
        return ""

    def _dispatch(self, message: Message) -> None:
        """Processes a message of any type."""
        if message["type"] in ("started", "buried"):
            self._answers[message["type"], message["worker_group"]] = message
        if message["type"] == "exited" and (worker_group := self._worker_groups.get(message["worker_group"])):
            worker_group.statuses[message["rank"]] = message["status"]

    def _answer(self, kind: str, *, worker_group: int, limit_s: float) -> Message:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            is_alive = self.is_alive  # before the look: the last message may be the answer
            if (answer := self._answers.pop((kind, worker_group), None)) is not None:
                return answer
            if not is_alive:
                break
            self._receive_next(limit_s=_TICK_S)
        died = not self.is_alive
        status = self.close()
        how = exit_words(status) if died else f"did not answer within {limit_s:.0f} s"
        raise StartError(f"{self.what} {how}{self._where_it_ended()}")

    def _receive_next(self, *, limit_s: float) -> bool:
        """Waits at most ``limit_s`` for the next message and processes it. Returns whether this thread did."""
        if not self.is_alive or not readable([self], limit_s=limit_s):
            return False
        with self._receiving:
            if not self.is_alive or not readable([self], limit_s=0.0):
                return False  # another thread was faster
            message, _ = self._control.receive()
            if message is None:
                self.is_alive = False
                return False
            self._dispatch(message)
        return True


class Child(Handle):
    """Controls a child process. The thread that creates the handle has to stay alive, because the kernel ends the child
    with this thread. Several threads may close it. ``log`` belongs to the child alone; it is deleted if it is empty."""

    def __init__(self, control: Wire, process: "Forked | subprocess.Popen[bytes]", *, log: Path) -> None:
        super().__init__(control)
        self._process, self._log = process, log

    def terminate(self) -> None:
        """Asks the process to end with all its ranks. Any thread may call it; the owner's thread notices the death."""
        self._process.terminate()

    def close(self) -> int:
        self.is_alive = False
        self._control.hang_up()
        with self._receiving:
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
    """Starts ``python -m module FD PARENT ARGUMENTS...``; FD is the inherited end of the child's control socket, and
    PARENT the id of this process."""
    with open(log, "ab", opener=no_link) as output:
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
    """Checks that ``memory`` bytes of free memory suffice for ``size`` ranks. Raises StartError."""
    if size > MOST_RANKS:
        raise too_small(size, f"one host starts at most {MOST_RANKS}")
    if size * RANK_BYTES > memory:
        needs = f"each needs more than {RANK_BYTES // 2**20} MiB of memory, and {memory // 2**20} MiB are free"
        raise too_small(size, f"{needs}, enough for {max(1, memory // RANK_BYTES)}")


class Starter(Protocol):
    """Starts the worker groups of a lane (conformance.runtime.forkserver_client.Forkservers, or several hosts)."""

    def start(self, config: WorkerGroupConfig) -> WorkerGroup:
        """Starts a worker group. Raises StartError."""

    def prepare(self, config: WorkerGroupConfig) -> None:
        """Prepares the start of a worker group of this config in the background. Raises nothing."""

    def terminate(self) -> None:
        """Ends all current and later worker groups, from another thread."""

    def close(self) -> object:
        """Ends all started processes."""


Block = tuple[str, ...]  # names of slots, such as the UUIDs of GPUs


class NoLease(Exception):
    """Says that a task got no slots. The message is for the user."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Assigns a GPU to a rank. gpu: its index among the visible GPUs. host: the host name that NCCL gets; empty: the
    real one."""

    gpu: int
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Gives this process the slots of ``block`` until it, and all other holders of the descriptors, close them."""

    block: Block
    fds: tuple[int, ...]

    def release(self) -> None:
        for fd in self.fds:
            os.close(fd)


class SlotPool(Protocol):
    """Leases slots, one for each rank of a worker group. Threads share it."""

    def lease(
        self,
        who: str,
        config: WorkerGroupConfig,
        *,
        prefer: Collection[Block],
        limit_s: float,
        is_over: Callable[[], bool],
        everything: bool = False,
    ) -> Lease:
        """Waits for the slots of a worker group. ``prefer``: blocks that are tried before others. ``everything``: all
        slots of a host. Raises NoLease."""

    def give_back(self, lease: Lease) -> None: ...

    def blocks_ahead(self, config: WorkerGroupConfig) -> Collection[Block]:
        """Returns the blocks that a worker group may lease, if they are known before and it helps to prepare them."""

    def starter(self, block: Block) -> Starter:
        """Returns the object that starts worker groups on these slots."""

    @property
    def holds_gpus(self) -> bool:
        """Whether a slot has memory of its own, so that of all worker groups on it one may be alive."""

    @property
    def service(self) -> int:
        """The number of what all ranks on these slots use, the daemon of MPS; another one has another number."""

    def has_failed(self, service: int) -> bool:
        """Returns whether this service has failed, so that a task failed for that; if so, starts another one."""

    def close(self) -> None:
        """Ends what the starters share, after all of them are closed."""
