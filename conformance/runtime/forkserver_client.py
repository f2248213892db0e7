"""Zygotes: the controller's handles of zygote processes, which start ranks on this host (claim 8)."""

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from conformance.core.host_resources import available_memory
from conformance.core.process import process_state
from conformance.runtime.config import START_LIMIT_S, StartError, WorldConfig
from conformance.runtime.messages import Message, wire_pair
from conformance.runtime.preload_server import Forked, environment, fork_zygote
from conformance.runtime.slots import Seat
from conformance.runtime.worker_groups import Child, World, check_host, start_child, too_small

_ZYGOTE = "conformance.runtime.forkserver"
_STARTED_LIMIT_S = 30.0  # a zygote only forks
_GONE_LIMIT_S = 2.0
_NOTHING: Mapping[str, str] = MappingProxyType({})

_log_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Of a world with ranks on several hosts (conformance.runtime.multihost): the ranks here begin with ``first``,
    ``of`` so many; all meet at ``store``, an address at which the first one listens."""

    first: int
    of: int
    store: tuple[str, int]


class ZygoteHandle(Child):
    """A running zygote."""

    what = "the process that ranks are forked from"

    def __init__(self, *, preload: tuple[str, ...], log: Path, python: str = "") -> None:
        self._begun = time.monotonic()
        control, theirs = wire_pair()
        with theirs:
            if python:
                env, arguments = environment(is_other=True), ["forked", *preload]
                started = start_child(_ZYGOTE, arguments, control=theirs, log=log, env=env, python=python)
                super().__init__(control, started, log=log)
            else:
                with log.open("ab") as output:
                    forked: Forked = fork_zygote(preload, control=theirs, log=output)
                super().__init__(control, forked, log=log)
        self._ready: Message | None = None  # what it said when it had imported its modules

    def wait_until_ready(self) -> None:
        """Wait until the zygote has imported its modules. If an import fails, ends the zygote and raises StartError."""
        if self._ready is None:
            try:
                self._answer("ready", world=None, limit_s=START_LIMIT_S, since=self._begun)
            except BaseException:
                self.close()
                raise
        assert self._ready is not None
        if self._ready["error"]:
            self.close()
            raise StartError(self._ready["error"])

    def is_ready(self) -> bool:
        """Whether ``wait_until_ready`` would not wait: modules are imported, or cannot be."""
        self.receive()
        return self._ready is not None or not self.is_alive or time.monotonic() - self._begun > START_LIMIT_S

    def start_world(
        self,
        config: WorldConfig,
        *,
        variables: Mapping[str, str] = _NOTHING,
        seats: Sequence[Seat] = (),
        part: Part | None = None,
    ) -> World:
        """Start the ranks of a world. They initialise torch.distributed in their first task.

        variables: of their environment. seats: at least as many as ranks; none: each has a GPU of its own, in order.
        part: of a world with other ranks elsewhere, whose ``config.size`` are here.
        Raises StartError, also if the host has no room for so many ranks.
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
            "memory_limit_bytes": config.memory_limit_bytes,
        }
        return self.launch(
            {
                "spec": spec,
                "variables": dict(variables),
                "seats": [asdict(seat) for seat in seats or (Seat(gpu=rank) for rank in range(config.size))],
            },
            size=config.size,
            files=("heartbeats", "store"),
            computes_when_busy=config.device == "cpu",
            limit_s=_STARTED_LIMIT_S,
        )

    def close(self) -> int:
        if self._ready is None:  # it does not read its socket before its imports are done
            self._process.terminate()
        return super().close()

    def _heard(self, message: Message) -> None:
        super()._heard(message)
        if message["type"] == "ready":
            self._ready = message

    def _refusal(self, size: int, error: str) -> StartError:
        return too_small(size, error)

    def _left_by_others(self, world: World) -> list[int]:
        """If the zygote is dead, the kernel ends its ranks."""
        deadline = time.monotonic() + _GONE_LIMIT_S
        left = world.pids
        while left and time.monotonic() < deadline:
            left = [pid for pid in left if process_state(pid) not in ("", "Z")]
            time.sleep(0.01 if left else 0)
        return left


class Zygotes:
    """The zygotes of worlds at one place of this host: one for all that preload the same modules.

    folder: gets their logs. variables: of the environment of all ranks. seats: see ZygoteHandle.start_world. One
    thread uses it, but for ``terminate``.
    """

    def __init__(self, folder: Path, *, variables: Mapping[str, str] = _NOTHING, seats: Sequence[Seat] = ()) -> None:
        self._folder, self._variables, self._seats = folder, variables, seats
        self._zygotes: dict[tuple[str, tuple[str, ...]], ZygoteHandle] = {}
        self._is_over = False

    def __iter__(self) -> Iterator[ZygoteHandle]:
        return (zygote for zygote in self._zygotes.values() if zygote.is_alive)

    def prepare(self, config: WorldConfig) -> None:
        """Start to import the modules that a world of this config preloads, in the background, without waiting."""
        with contextlib.suppress(OSError, StartError):  # the next world of this config will report the error
            self.of(config)

    def start(self, config: WorldConfig) -> World:
        """Start the ranks of a world. Raises StartError."""
        try:
            zygote = self.of(config)
        except OSError as error:
            raise too_small(config.size, str(error.strerror)) from error
        return zygote.start_world(config, variables=self._variables, seats=self._seats)

    def of(self, config: WorldConfig) -> ZygoteHandle:
        """The live zygote that has imported exactly the modules of ``config.preload``, or a new one."""
        zygote = self._zygotes.get(key := (config.python, config.preload))
        if zygote is None or not zygote.is_alive:
            self._folder.mkdir(parents=True, exist_ok=True)
            log = self._folder / f"zygote-{os.getpid()}-{next(_log_numbers)}.log"  # others may share the folder
            zygote = ZygoteHandle(preload=config.preload, log=log, python=config.python)
            self._zygotes[key] = zygote
            if self._is_over:  # while it was made
                zygote.terminate()
        return zygote

    def terminate(self) -> None:
        """Ask all zygotes to end, from another thread, and every later one."""
        self._is_over = True
        for zygote in list(self._zygotes.values()):
            zygote.terminate()

    def close(self) -> None:
        """End all zygotes and what they have started. Only the logs remain."""
        while self._zygotes:
            _, zygote = self._zygotes.popitem()
            zygote.close()


def _free_port() -> int:
    """A free port for MASTER_PORT, which frameworks may read; the world itself does not use it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
