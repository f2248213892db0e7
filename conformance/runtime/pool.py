"""Runs tasks in live worker groups, and keeps a group whose task is done for the next one.

This is the interface for the rest of the suite. Without slots, worker groups run on this host, and tasks in the
caller's thread. With slots (GPUs, lanes, or slots of several hosts: conformance.runtime.leased_slots), a task of any
thread waits for the lease of a block of slots, runs in the live worker group on that block, or in a new one, and
releases the lease. Each block has its own lane and thread, so a CUDA error that outlives its task harms no other
worker group.
"""

import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from conformance.core.timeline import WAIT, timeline
from conformance.runtime.forkserver_client import Forkservers
from conformance.runtime.slots import Block, Lane, NoLease, Outcome, SlotPool, failed
from conformance.runtime.watchdog import SLOW
from conformance.runtime.worker_groups import WorkerGroupConfig

MOST_GROUPS = 3  # live worker groups on one block of slots; many blocks have some
MOST_GROUPS_HERE = 8  # without slots; an idle rank keeps 40 to 60 MB


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
            with self._making:
                warm.add(lease.block)
                threaded = self._lane(slots, lease.block)
        except BaseException:
            slots.give_back(lease)
            raise
        if slots.holds_gpus:
            self._end_groups_on(lease.block)
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
            others = [one for of, one in self._lanes.items() if of != block and not set(of).isdisjoint(block)]
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
