"""Pool: runs tasks in live worlds, and keeps worlds whose tasks ended well. The interface for the rest of the suite.

Serves claim 8: every task has an outcome, whatever happens to its ranks, and no task is harmed by the one before. The
reasons for which worlds are retired go to the logger ``conformance.world.pool``, because they say why a run is slow.
`parity run` shows those that nobody planned, and with ``--verbose`` them all.
"""

import contextlib
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from conformance.world.launch import StartError, World, ZygoteHandle, too_small
from conformance.world.reason import FailureKind
from conformance.world.watch import TaskFailed, run_task

if TYPE_CHECKING:
    from conformance.hosts.fleet import Fleet

Device = Literal["cpu", "cuda"]

_RanksAre = Literal["forked", "started"]

logger = logging.getLogger(__name__)
_zygote_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """The configuration of a world.

    size: number of ranks. device: ``cpu``, or ``cuda`` with one GPU per rank.
    preload: modules to import before the first task, such as the adapter's. On the CPU they are imported once for all
        worlds of a pool with the same ``preload``.
    python: the executable that ranks run in; empty: that of this process.
    gpus: the UUIDs of the GPUs that ranks see; empty: those that this process sees.
    wants_all: of a world of leased GPUs (conformance.gpus): all of them, whatever its size.
    memory_limit_bytes: limit of the address space of a rank, beyond what is mapped when the rank starts (CPU only).
        Address space is more than memory: each thread reserves some tens of MiB of it.

    Raises ValueError for a size below 1, and for a memory limit with ``cuda``.
    """

    size: int
    device: Device
    preload: tuple[str, ...]
    python: str = ""
    gpus: tuple[str, ...] = ()
    wants_all: bool = False
    memory_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a world of {self.size} ranks; it needs at least one")
        if self.device == "cuda" and self.memory_limit_bytes is not None:
            raise ValueError(
                "memory_limit_bytes limits address space, which CUDA reserves freely; leave it out for cuda"
            )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a task ended.

    results: if the task is done, the JSON value that each rank returned, by rank.
    reason, kind, rank: if it failed, the reason for the user, its kind, and the rank that caused it; ``rank`` is None
        if no single rank did.
    seconds: wall time, including the start of the world. used: whether the ranks had run another task before.
    """

    state: Literal["done", "failed"]
    reason: str
    kind: FailureKind
    rank: int | None
    seconds: float
    results: list[Any]
    used: bool = False


class Pool:
    """Keeps one live world per key (a backend) and config. Use it in a ``with`` statement, in the thread that made it.

    A world is retired after a task that fails or leaks; the next task with the same key and config gets a new world. If
    this process dies, its worlds die with it.
    """

    def __init__(self, *, work_dir: Path, fleet: "Fleet | None" = None) -> None:
        """``fleet``: of agents on several hosts, which start all ranks; the caller ends it."""
        self._work_dir, self._fleet = work_dir, fleet
        self._zygotes: dict[tuple[_RanksAre, str, tuple[str, ...]], ZygoteHandle] = {}
        self._worlds: dict[tuple[str, WorldConfig], World] = {}
        self._used: set[int] = set()  # numbers of worlds that have run a task
        self._running: World | None = None
        self._is_aborted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def prepare(self, config: WorldConfig) -> None:
        """Start to import the modules that a world of this config preloads, in the background; does not wait."""
        if self._fleet is None:
            with contextlib.suppress(OSError):  # the next task with this config will report the error
                self._zygote(config)

    def run(
        self,
        *,
        key: str,
        config: WorldConfig,
        task: str,
        kwargs: dict[str, Any],
        log_dir: Path,
        budget_s: float,
        fresh: bool = False,
        held: Sequence[int] = (),
    ) -> Outcome:
        """Call ``task`` ("package.module:function") as ``function(rank_context, **kwargs)`` on every rank.

        ``fresh``: run the task in new processes, for example the part of a cell that resumes from a checkpoint and must
        find everything there. The live world of this key and config is retired before. The new world is kept for the
        next task, as any other.

        ``held``: descriptors that ranks hold open while they run the task.

        ``log_dir`` gets rank-N.log and, if a rank was asked for its stacks, rank-N.stacks. A task that gets no further
        for ``budget_s`` seconds is ended (conformance.world.patience says what that is, and what limits any task).
        Raises ValueError for a malformed task, for ``kwargs`` that are not JSON values, and for more ranks than GPUs.
        """
        _check_call(config, task, kwargs, is_here=self._fleet is None)
        log_dir = log_dir.resolve()
        log_dir.mkdir(parents=True, exist_ok=True)
        began, used = time.monotonic(), False
        try:
            if fresh:
                self._retire(key, config, why="the next task wants a fresh one", level=logging.DEBUG)
            world = self._world(key, config)
            used = world.number in self._used
            self._used.add(world.number)
            self._running = world
            results, leaks = run_task(world, task=task, kwargs=kwargs, log_dir=log_dir, budget_s=budget_s, held=held)
        except StartError as error:
            return _failed(str(error), kind="raised", rank=None, began=began, used=False)
        except TaskFailed as failure:
            self._retire(key, config, why=str(failure.cause))
            return _failed(str(failure), kind=failure.cause.kind, rank=failure.cause.rank, began=began, used=used)
        except BaseException:
            self._retire(key, config, why="interrupted")
            raise
        finally:
            self._running = None
        if leaks:
            self._retire(key, config, why=f"it leaks: {leaks}")
        seconds = time.monotonic() - began
        return Outcome(state="done", reason="", kind="", rank=None, seconds=seconds, results=results, used=used)

    def phase(self) -> str:
        """What the rank does that is furthest behind; empty if no task runs. For another thread, to show it."""
        world = self._running
        if world is None:
            return ""
        with contextlib.suppress(ValueError):  # the world was ended meanwhile
            return min((world.beats.read(rank) for rank in range(world.size)), key=lambda beat: beat.count).phase
        return ""

    def abort(self) -> None:
        """End all processes of the pool, from another thread. The task that runs fails, and so does every later one."""
        self._is_aborted = True
        for zygote in list(self._zygotes.values()):
            zygote.terminate()

    def close(self) -> None:
        """End all processes of the pool. Only the logs remain."""
        while self._worlds:
            _, world = self._worlds.popitem()
            world.bury()
        while self._zygotes:
            _, zygote = self._zygotes.popitem()
            zygote.close()

    def _world(self, key: str, config: WorldConfig) -> World:
        """The live world of this key and config, or a new one. Raises StartError."""
        world = self._worlds.get((key, config))
        if world is not None and not world.is_whole():
            self._retire(key, config, why="a rank died while it was idle")
            world = None
        if world is None:
            world = self._worlds[key, config] = self._start(config)
        return world

    def _start(self, config: WorldConfig) -> World:
        if self._fleet is not None:
            return self._fleet.start_far(
                size=config.size,
                device=config.device,
                preload=config.preload,
                python=config.python,
                memory_limit_bytes=config.memory_limit_bytes,
            )
        try:
            zygote = self._zygote(config)
        except OSError as error:
            raise too_small(config.size, str(error.strerror)) from error
        return zygote.start_world(
            size=config.size,
            device=config.device,
            preload=config.preload,
            gpus=config.gpus,
            memory_limit_bytes=config.memory_limit_bytes,
        )

    def _zygote(self, config: WorldConfig) -> ZygoteHandle:
        """The live zygote that has imported exactly the modules of ``config.preload``, or a new one."""
        ranks: _RanksAre = "forked" if config.device == "cpu" else "started"
        preload = config.preload if ranks == "forked" else ()  # ranks that are started import for themselves
        zygote = self._zygotes.get(key := (ranks, config.python, preload))
        if zygote is None or not zygote.is_alive:
            self._work_dir.mkdir(parents=True, exist_ok=True)
            log = self._work_dir / f"zygote-{os.getpid()}-{next(_zygote_numbers)}.log"  # others may share the folder
            zygote = self._zygotes[key] = ZygoteHandle(ranks=ranks, preload=preload, log=log, python=config.python)
            if self._is_aborted:  # while it was made
                zygote.terminate()
        return zygote

    def _retire(self, key: str, config: WorldConfig, *, why: str, level: int = logging.INFO) -> None:
        world = self._worlds.pop((key, config), None)
        if world is not None:
            ranks = f"{config.size} rank{'s' * (config.size > 1)}"
            logger.log(level, "world %d (%s, %s) is retired: %s", world.number, key, ranks, why)
            if left := world.bury():
                logger.error("world %d: processes %s cannot be ended; they hang in the kernel", world.number, left)


def _failed(reason: str, *, kind: FailureKind, rank: int | None, began: float, used: bool) -> Outcome:
    seconds = time.monotonic() - began
    return Outcome(state="failed", reason=reason, kind=kind, rank=rank, seconds=seconds, results=[], used=used)


def _check_call(config: WorldConfig, task: str, kwargs: dict[str, Any], *, is_here: bool) -> None:
    """Raises ValueError, which says what to change, for a wrong call of ``Pool.run``."""
    if not re.fullmatch(r"[\w.]+:\w+", task):
        raise ValueError(f"task {task!r} is not of the form package.module:function")
    try:
        json.dumps(kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"kwargs of {task} have to be JSON values ({error}); pass large data as a file's path"
        ) from None
    if config.device == "cuda" and is_here:
        import torch

        if (visible := torch.cuda.device_count()) < config.size:
            raise ValueError(
                f"a cuda world of {config.size} ranks needs {config.size} GPUs, {visible} are visible; "
                f"widen CUDA_VISIBLE_DEVICES, choose a smaller layout, or run on the cpu"
            )
