"""Keeps the live worker groups of one block of slots, and runs tasks in them one after another.

Every task has an outcome, whatever happens to its ranks, and no task harms the next. The logger of this module gets the
reason for each retired worker group, because it explains a slow run. `parity run` shows unplanned ones, and with
``--verbose`` all.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from conformance.core.timeline import timeline
from conformance.runtime.failure import FailureKind, StartError
from conformance.runtime.watchdog import TaskFailed, run_task
from conformance.runtime.worker_groups import WorkerGroup, WorkerGroupConfig

logger = logging.getLogger(__name__)

KEPT_BYTES = 512 * 2**20  # memory that a rank may keep between tasks; some twenty ranks are alive in a run


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Describes how a task ended.

    results: if the task is done, the JSON value that each rank returned, by rank.
    reason, kind, rank: if it failed, the reason for the user, its kind, and the rank that caused it; ``rank`` is None
        if no single rank did.
    seconds: wall time, including the start of the worker group. used: whether the ranks had run another task before.
    """

    state: Literal["done", "failed"]
    reason: str
    kind: FailureKind
    rank: int | None
    seconds: float
    results: list[Any]
    used: bool = False


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


class Lane:
    """Keeps one live worker group per key (a backend) and config. Only ``phase`` and ``abort`` may be called from
    another thread: the kernel ends a worker group with the thread that started it.

    A worker group is retired after a task that fails or leaks; the next task with the same key and config gets a new
    one.
    """

    def __init__(self, starter: Starter, *, most: int | None = None) -> None:
        """most: the largest number of live worker groups; None: no limit."""
        self._starter, self._most = starter, most
        self.worker_groups: dict[tuple[str, WorkerGroupConfig], WorkerGroup] = {}
        self._used: set[int] = set()  # numbers of worker groups that have run a task
        self._running: WorkerGroup | None = None
        self._is_aborted = False

    def run(
        self,
        *,
        key: str,
        config: WorkerGroupConfig,
        task: str,
        kwargs: dict[str, Any],
        log_dir: Path,
        budget_s: float,
        fresh: bool,
        held: Sequence[int],
        keep: bool = True,
        about: str = "",
    ) -> Outcome:
        """See conformance.runtime.Pool.run. ``held``: descriptors that ranks keep open while they run the task."""
        log_dir = log_dir.resolve()
        log_dir.mkdir(parents=True, exist_ok=True)
        began, used = time.monotonic(), False
        try:
            if fresh:
                self._retire(key, config, why="the next task wants a fresh one", level=logging.DEBUG)
            with timeline.within("start a worker group"):
                worker_group = self._worker_group(key, config)
            used = worker_group.number in self._used
            self._used.add(worker_group.number)
            self._running = worker_group
            results, leaks, kept = run_task(
                worker_group,
                task=task,
                kwargs=kwargs,
                log_dir=log_dir,
                budget_s=budget_s,
                held=held,
                key=key,
                about=about,
            )
        except StartError as error:
            return failed(str(error), kind="raised", began=began)
        except TaskFailed as failure:
            self._retire(key, config, why=str(failure.cause), level=logging.INFO if keep else logging.DEBUG)
            if failure.cause.kind == "out of memory":  # the next attempt needs the memory of idle worker groups
                self.retire_all("another worker group here ran out of memory")
            return failed(str(failure), kind=failure.cause.kind, rank=failure.cause.rank, began=began, used=used)
        except BaseException:
            self._retire(key, config, why="interrupted", level=logging.DEBUG)
            raise
        finally:
            self._running = None
        if not keep:
            self._retire(key, config, why="the next task must not reach it", level=logging.DEBUG)
        elif leaks:
            self._retire(key, config, why=f"it leaks: {leaks}")
        elif kept > KEPT_BYTES:
            why = f"a rank keeps {kept // 2**20} MiB between tasks, in caches of libraries"
            self._retire(key, config, why=why, level=logging.DEBUG)
        seconds = time.monotonic() - began
        return Outcome(state="done", reason="", kind="", rank=None, seconds=seconds, results=results, used=used)

    def prepare(self, config: WorkerGroupConfig) -> None:
        """See conformance.runtime.Pool.prepare."""
        self._starter.prepare(config)

    def phase(self) -> str:
        """Returns the phase of the rank that is furthest behind; empty if no task runs. Any thread may call it."""
        worker_group = self._running
        if worker_group is None:
            return ""
        with contextlib.suppress(ValueError):  # the worker group was ended meanwhile
            return min(
                (worker_group.beats.read(rank) for rank in range(worker_group.size)), key=lambda beat: beat.count
            ).phase
        return ""

    def abort(self) -> None:
        """Ends all processes, from another thread. The running task and all later ones fail."""
        self._is_aborted = True
        self._starter.terminate()

    def retire_all(self, why: str) -> None:
        """Ends all worker groups; later tasks get new ones."""
        for key, config in list(self.worker_groups):
            self._retire(key, config, why=why, level=logging.DEBUG)

    def close(self) -> None:
        """Ends all processes. Only the logs remain."""
        while self.worker_groups:
            _, worker_group = self.worker_groups.popitem()
            worker_group.bury()
        self._starter.close()

    def _worker_group(self, key: str, config: WorkerGroupConfig) -> WorkerGroup:
        """Returns the live worker group of this key and config, or a new one. Raises StartError."""
        worker_group = self.worker_groups.get((key, config))
        if worker_group is not None and not worker_group.is_whole():
            self._retire(key, config, why="a rank died while it was idle")
            worker_group = None
        if worker_group is None:
            if self._most is not None and len(self.worker_groups) >= self._most:
                self._retire(*next(iter(self.worker_groups)), why="another one is needed", level=logging.DEBUG)
            worker_group = self._starter.start(config)
        self.worker_groups.pop((key, config), None)
        self.worker_groups[key, config] = worker_group  # the last one used is the last one
        return worker_group

    def _retire(self, key: str, config: WorkerGroupConfig, *, why: str, level: int = logging.INFO) -> None:
        worker_group = self.worker_groups.pop((key, config), None)
        if worker_group is not None:
            ranks = f"{config.size} rank{'s' * (config.size > 1)}"
            level = logging.DEBUG if self._is_aborted else level  # the user has stopped the run
            logger.log(level, "worker group %d (%s, %s) is retired: %s", worker_group.number, key, ranks, why)
            if left := worker_group.bury():
                logger.error(
                    "worker group %d: processes %s cannot be ended; they hang in the kernel", worker_group.number, left
                )


def failed(reason: str, *, kind: FailureKind, began: float, rank: int | None = None, used: bool = False) -> Outcome:
    """Makes the outcome of a failed task. ``began``: its start by time.monotonic."""
    seconds = time.monotonic() - began
    return Outcome(state="failed", reason=reason, kind=kind, rank=rank, seconds=seconds, results=[], used=used)


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
