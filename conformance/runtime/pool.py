"""Runs tasks in live worker groups, and keeps a group whose task is done for the next one.

This is the interface for the rest of the suite. Without slots, worker groups run on this host, and tasks in the
caller's thread. With slots (GPUs, lanes, or slots of several hosts: conformance.runtime.leased_slots), a task of any
thread waits for the lease of a block of slots, runs in the live worker group on that block, or in a new one, and
releases the lease. Each block has its own lane and thread, so a CUDA error that outlives its task harms no other
worker group. Every task has an outcome, whatever happens to its ranks, and no task harms the next.

The logger of this module gets the reason for each retired worker group, because it explains a slow run. `parity run`
shows unplanned ones, and with ``--verbose`` all.
"""

import contextlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from conformance.core.timeline import WAIT, timeline
from conformance.runtime.failure import FailureKind, StartError
from conformance.runtime.forkserver_client import Forkservers
from conformance.runtime.watchdog import SLOW, TaskFailed, run_task
from conformance.runtime.worker_groups import Block, NoLease, SlotPool, Starter, WorkerGroup, WorkerGroupConfig

logger = logging.getLogger(__name__)

MOST_GROUPS = 3  # live worker groups on one block of slots; many blocks have some
MOST_GROUPS_HERE = 8  # without slots; an idle rank keeps 40 to 60 MB
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


@dataclass(frozen=True, kw_only=True)
class _Threaded:
    """Holds the lane of a block of slots, and the thread that runs it."""

    lane: Lane
    thread: ThreadPoolExecutor


class Pool:
    """Runs tasks of the suite. Use it in a ``with`` statement; without slots, in the thread that created it.

    If this process dies, its worker groups die with it.
    """

    def __init__(self, *, work_dir: Path, slots: SlotPool | None = None) -> None:
        """``work_dir``: for logs of forkservers, if there are no slots."""
        self._slots = slots
        self._forkservers = Forkservers(work_dir)
        self._own = Lane(self._forkservers, most=MOST_GROUPS_HERE)
        self._lanes: dict[Block, _Threaded] = {}
        self._warm: dict[tuple[str, WorkerGroupConfig], set[Block]] = {}  # blocks with a worker group
        self._making = threading.Lock()
        self._is_aborted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_shared(self) -> bool:
        """Whether several tasks may run at once."""
        return self._slots is not None

    def prepare(self, config: WorkerGroupConfig) -> None:
        """Starts to import the modules that a worker group of this config preloads, in the background. With slots: on
        each block that such a group may lease, so that no block is leased during the imports."""
        if self._slots is None:
            self._forkservers.prepare(config)
            return
        for block in self._slots.blocks_ahead(config):
            with self._making:
                threaded = self._lane(self._slots, block)
            threaded.thread.submit(threaded.lane.prepare, config)

    def run(
        self,
        *,
        key: str,
        config: WorkerGroupConfig,
        task: str,
        kwargs: dict[str, Any],
        log_dir: Path,
        budget_s: float,
        fresh: bool = False,
        keep: bool = True,
        alone: bool = False,
        about: str = "",
    ) -> Outcome:
        """Calls ``task`` ("package.module:function") as ``function(rank_context, **kwargs)`` on every rank.

        ``fresh``: run the task in new processes, for example the phase of a cell that resumes from a checkpoint and
        must not find anything elsewhere. The live worker group of this key and config is retired, and the new one is
        kept for the next task. ``keep``: False for a task of which nothing may be left for a later one; its worker
        group ends with it.

        ``alone``: with slots, run while no other task does, after all idle worker groups have ended.

        ``log_dir`` gets rank-N.log and, if the task hangs or fails, rank-N.stacks. A task without progress for
        ``budget_s`` seconds is ended (conformance.runtime.watchdog defines progress and further limits); the budget
        begins with the lease. ``about``: names the task in the timeline. Raises ValueError for a malformed task, for
        ``kwargs`` that are not JSON values, and for more ranks than GPUs.
        """
        _check_call(config, task, kwargs, is_here=self._slots is None)

        def run_in(lane: Lane, held: tuple[int, ...] = ()) -> Outcome:
            return lane.run(
                key=key,
                config=config,
                task=task,
                kwargs=kwargs,
                log_dir=log_dir,
                budget_s=budget_s,
                fresh=fresh,
                keep=keep,
                held=held,
                about=about,
            )

        return (
            run_in(self._own)
            if self._slots is None
            else self._run_leased(self._slots, key, config, budget_s, run_in, alone=alone)
        )

    def _run_leased(
        self,
        slots: SlotPool,
        key: str,
        config: WorkerGroupConfig,
        budget_s: float,
        run_in: Callable[[Lane, tuple[int, ...]], Outcome],
        *,
        alone: bool,
    ) -> Outcome:
        began = time.monotonic()
        with self._making:
            warm = self._warm.setdefault((key, config), set())
        try:
            with timeline.within(f"{WAIT}lease"):
                lease = slots.lease(
                    key,
                    config,
                    prefer=warm,
                    limit_s=SLOW * budget_s,
                    is_over=lambda: self._is_aborted,
                    everything=alone,
                )
            if alone:
                self._end_idle_groups()
        except NoLease as none:
            return failed(str(none), kind="exited", began=began)

        def run() -> Outcome:
            try:
                timeline.switch("task", kind="groups", about=key)
                return run_in(threaded.lane, lease.fds)
            finally:
                timeline.switch("", kind="groups")
                slots.give_back(lease)

        try:
            if slots.holds_gpus:
                self._end_groups_on(lease.block)
            with self._making:
                warm.add(lease.block)
                threaded = self._lane(slots, lease.block)
        except BaseException:
            slots.give_back(lease)
            raise
        service = slots.service
        outcome = threaded.thread.submit(run).result()
        if outcome.state == "done" or self._is_aborted or not slots.has_failed(service):
            return outcome
        self._ending_idle_groups("MPS has failed")  # not waited for: other tasks may run
        return replace(outcome, kind="MPS")

    def _end_idle_groups(self) -> None:
        """Ends all worker groups of leased slots, none of which is at work."""
        wait(self._ending_idle_groups("another task runs alone"))

    def _ending_idle_groups(self, why: str) -> list[Future[None]]:
        """Ends the worker groups of all lanes, each before its next task."""
        with self._making:
            return [one.thread.submit(one.lane.retire_all, why) for one in self._lanes.values()]

    def _end_groups_on(self, block: Block) -> None:
        """Ends the worker groups of other blocks with slots of this one, which is leased, so that they are idle."""
        with self._making:
            with_slots = [of for of in self._lanes if not set(of).isdisjoint(block)]
            for warm in self._warm.values():
                warm.difference_update(with_slots)  # this block has one worker group, too
            others = [self._lanes[of] for of in with_slots if of != block]
        wait([one.thread.submit(one.lane.retire_all, "its slot has other ranks") for one in others])

    def _lane(self, slots: SlotPool, block: Block) -> _Threaded:
        if (threaded := self._lanes.get(block)) is None:
            thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="-".join(block))
            lane = Lane(slots.starter(block), most=1 if slots.holds_gpus else MOST_GROUPS)
            threaded = self._lanes[block] = _Threaded(lane=lane, thread=thread)
        if self._is_aborted:
            threaded.lane.abort()
        return threaded

    def phase(self) -> str:
        """Returns the phase of the rank that is furthest behind in any running task; empty if no task runs. Any thread
        may call it."""
        lanes = [self._own, *(threaded.lane for threaded in list(self._lanes.values()))]
        return next(filter(None, (lane.phase() for lane in lanes)), "")

    def abort(self) -> None:
        """Ends all processes of the pool, from another thread. All running, waiting and later tasks fail."""
        self._is_aborted = True
        for lane in (self._own, *(threaded.lane for threaded in list(self._lanes.values()))):
            lane.abort()

    def close(self) -> None:
        """Ends all processes of the pool, which no other thread may use any more. Only the logs remain."""
        self._own.close()
        lanes, self._lanes = list(self._lanes.values()), {}
        closing = [threaded.thread.submit(threaded.lane.close) for threaded in lanes]
        wait(closing)  # before any thread ends: the kernel ends a forkserver with the thread that started it
        if self._slots is not None:
            self._slots.close()
        for threaded in lanes:
            threaded.thread.shutdown()


def _check_call(config: WorkerGroupConfig, task: str, kwargs: dict[str, Any], *, is_here: bool) -> None:
    """Checks the arguments of ``Pool.run``. Raises ValueError with advice."""
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
                f"a cuda worker group of {config.size} ranks needs {config.size} GPUs, {visible} are visible; "
                f"widen CUDA_VISIBLE_DEVICES, choose a smaller layout, or run on the cpu"
            )
