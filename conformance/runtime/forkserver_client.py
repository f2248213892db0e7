"""Controls forkserver processes, which start ranks on this host."""

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from conformance.core.host import available_memory
from conformance.core.io import no_link
from conformance.core.process import StartPatience, effort, process_state
from conformance.core.timeline import timeline
from conformance.runtime.failure import StartError, exit_words
from conformance.runtime.gpu_inventory import network_of, slots_of, visible_to
from conformance.runtime.messages import Device, Message, wire_pair
from conformance.runtime.preload_server import Forked, environment, fork_forkserver
from conformance.runtime.worker_groups import (
    Block,
    Child,
    Slot,
    WorkerGroup,
    WorkerGroupConfig,
    check_host,
    start_child,
    too_small,
)

_FORKSERVER = "conformance.runtime.forkserver"
_STARTED_LIMIT_S = 30.0  # a forkserver only forks
_GONE_LIMIT_S = 2.0
_TICK_S = 0.25
_NOTHING: Mapping[str, str] = MappingProxyType({})

_log_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Describes the ranks of this host in a worker group on several hosts (conformance.runtime.multihost).

    first: the first rank on this host. of: number of ranks on all hosts. store: the address at which rank 0 listens.
    """

    first: int
    of: int
    store: tuple[str, int]


class ForkserverHandle(Child):
    """Controls a running forkserver."""

    what = "the process that ranks are forked from"

    def __init__(self, *, preload: tuple[str, ...], device: Device, log: Path, python: str = "") -> None:
        control, child_end = wire_pair()
        with child_end:
            if python:
                env, arguments = environment(device, is_other=True), ["forked", *preload]
                started = start_child(_FORKSERVER, arguments, control=child_end, log=log, env=env, python=python)
                super().__init__(control, started, log=log)
            else:
                with open(log, "ab", opener=no_link) as output:
                    forked: Forked = fork_forkserver(preload, device=device, control=child_end, log=output)
                super().__init__(control, forked, log=log)
        self._preload = preload
        self._patience = StartPatience(partial(effort, started.pid)) if python else forked.patience()
        self._ready: Message | None = None  # its message after the imports

    def wait_until_ready(self) -> None:
        """Waits until the imports are done. If an import fails, ends the forkserver and raises StartError."""
        try:
            while self._ready is None and self.is_alive:
                if not self._receive_next(limit_s=_TICK_S) and self.is_alive and (why := self._patience.why_over()):
                    raise StartError(f"{self.what} hangs in its imports ({', '.join(self._preload)}): {why}")
        except BaseException:
            self.close()
            raise
        if self._ready is None:
            raise StartError(f"{self.what} {exit_words(self.close())}{self._where_it_ended()}")
        if self._ready["error"]:
            self.close()
            raise StartError(self._ready["error"])

    def is_ready(self) -> bool:
        """Returns whether ``wait_until_ready`` would return or raise at once."""
        self.receive()
        return self._ready is not None or not self.is_alive or bool(self._patience.why_over())

    def start_worker_group(
        self,
        config: WorkerGroupConfig,
        *,
        variables: Mapping[str, str] = _NOTHING,
        slots: Sequence[Slot] = (),
        part: Part | None = None,
    ) -> WorkerGroup:
        """Starts the ranks of a worker group. They initialise torch.distributed in their first task.

        variables: additions to their environment. slots: at least one for each rank; empty: rank N gets GPU N.
        part: for a worker group with ranks on other hosts, of which ``config.size`` are here.
        Raises StartError, also if the host lacks the resources for the ranks.
        """
        check_host(config.size, memory=available_memory())
        self.wait_until_ready()
        spec = {
            "first": part.first if part else 0,
            "size": part.of if part else config.size,
            "local_size": config.size,
            "store": part.store if part else None,
            "device": config.device,
            "port": _free_port(),
            "preload": config.preload,
            "gpu_backend": config.gpu_backend,
            "memory_limit_bytes": config.memory_limit_bytes,
        }
        return self.launch(
            {
                "spec": spec,
                "variables": dict(variables),
                "slots": [asdict(slot) for slot in slots or (Slot(gpu=rank) for rank in range(config.size))],
            },
            size=config.size,
            files=("heartbeats", "store"),
            computes_when_busy=config.device == "cpu",
            limit_s=_STARTED_LIMIT_S,
        )

    def close(self) -> int:
        if self._ready is None:  # it does not read its socket during the imports
            self._process.terminate()
        return super().close()

    def _dispatch(self, message: Message) -> None:
        super()._dispatch(message)
        if message["type"] == "importing":
            self._patience = StartPatience(partial(effort, message["pid"]))
        elif message["type"] == "ready":
            self._ready = message
            if imports := message.get("imports"):
                timeline.add("groups", f"forkserver {' '.join(self._preload[:1])}", [("import", *imports)])

    def _start_error(self, size: int, error: str) -> StartError:
        return too_small(size, error)

    def _left_by_others(self, worker_group: WorkerGroup) -> list[int]:
        """Waits for the ranks, which the kernel ends after the death of the forkserver."""
        deadline = time.monotonic() + _GONE_LIMIT_S
        left = worker_group.pids
        while left and time.monotonic() < deadline:
            left = [pid for pid in left if process_state(pid) not in ("", "Z")]
            time.sleep(0.01 if left else 0)
        return left


class Forkservers:
    """Keeps the forkservers of this host: one for each device and set of preloaded modules. Threads share it.

    folder: gets their logs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._forkservers: dict[tuple[str, tuple[str, ...], Device], ForkserverHandle] = {}
        self._making = threading.Lock()
        self._is_over = False

    def __iter__(self) -> Iterator[ForkserverHandle]:
        return (forkserver for forkserver in self._forkservers.values() if forkserver.is_alive)

    def prepare(self, config: WorkerGroupConfig) -> None:
        """Starts to import the modules that a worker group of this config preloads, in the background."""
        with contextlib.suppress(OSError, StartError):  # the next worker group of this config will report the error
            self.of(config)

    def start(
        self, config: WorkerGroupConfig, *, variables: Mapping[str, str] = _NOTHING, slots: Sequence[Slot] = ()
    ) -> WorkerGroup:
        """Starts the ranks of a worker group; see ForkserverHandle.start_worker_group. Raises StartError."""
        try:
            forkserver = self.of(config)
        except OSError as error:
            raise too_small(config.size, str(error.strerror)) from error
        return forkserver.start_worker_group(config, variables=variables, slots=slots)

    def of(self, config: WorkerGroupConfig) -> ForkserverHandle:
        """Returns the live forkserver that has imported exactly the modules of ``config.preload``, or a new one."""
        with self._making:
            forkserver = self._forkservers.get(key := (config.python, config.preload, config.device))
            if forkserver is None or not forkserver.is_alive:
                self._folder.mkdir(parents=True, exist_ok=True)
                # Processes may share the folder.
                log = self._folder / f"forkserver-{os.getpid()}-{next(_log_numbers)}.log"
                forkserver = ForkserverHandle(
                    preload=config.preload, device=config.device, log=log, python=config.python
                )
                self._forkservers[key] = forkserver
                if self._is_over:  # since its creation began
                    forkserver.terminate()
            return forkserver

    def terminate(self) -> None:
        """Asks all current and later forkservers to end, from another thread."""
        self._is_over = True
        for forkserver in list(self._forkservers.values()):
            forkserver.terminate()

    def close(self) -> None:
        """Ends all forkservers and their ranks. Only the logs remain."""
        while self._forkservers:
            _, forkserver = self._forkservers.popitem()
            forkserver.close()


@dataclass(frozen=True, kw_only=True)
class BlockStarter:
    """Starts worker groups on one block of slots, from forkservers that all blocks share.

    block: the slots, of which the first ones are those of the ranks. more: returns further variables, when ranks start.
    """

    forkservers: Forkservers
    block: Block = ()
    more: Callable[[], Mapping[str, str]] = dict

    def prepare(self, config: WorkerGroupConfig) -> None:
        self.forkservers.prepare(config)

    def start(self, config: WorkerGroupConfig) -> WorkerGroup:
        ranks = self.block[: config.size]
        variables = {**visible_to(self.block), **network_of(ranks), **self.more()}
        return self.forkservers.start(config, variables=variables, slots=slots_of(ranks))

    def terminate(self) -> None:
        self.forkservers.terminate()

    def close(self) -> None:
        """Does nothing: other blocks may still use the forkservers."""


def _free_port() -> int:
    """Returns a free port for MASTER_PORT, which frameworks may read; the worker group itself does not use it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
