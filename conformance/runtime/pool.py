"""Pool: runs tasks in live worlds, and keeps worlds whose tasks ended well. The interface for the rest of the suite.

Without places, worlds are of this host and tasks run in the caller's thread. With places (GPUs, or slots of several
hosts: conformance.runtime.gpu_slots), a task of any thread waits for a lease of as many as its world has
ranks, runs in the world that is alive on these, or in a new one, and gives the lease back. Each block of places has a
lane and a thread of its own; so a CUDA error that outlives its task harms that world and no other. Serves claim 8.
"""

import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from conformance.runtime.config import WorldConfig
from conformance.runtime.forkserver_client import Zygotes
from conformance.runtime.slots import Block, Lane, NoLease, Outcome, Places, failed
from conformance.runtime.watchdog import SLOW


@dataclass(frozen=True, kw_only=True)
class _Threaded:
    """The lane of a block of places, and the thread that runs it."""

    lane: Lane
    thread: ThreadPoolExecutor


class Pool:
    """Use it in a ``with`` statement, or close it; without places, in the thread that made it.

    If this process dies, its worlds die with it.
    """

    def __init__(self, *, work_dir: Path, places: Places | None = None) -> None:
        """``work_dir``: for logs of zygotes, of a pool without places."""
        self._places = places
        self._zygotes = Zygotes(work_dir)
        self._own = Lane(self._zygotes)
        self._lanes: dict[Block, _Threaded] = {}
        self._warm: dict[tuple[str, WorldConfig], set[Block]] = {}  # blocks on which a world has run
        self._making = threading.Lock()
        self._is_aborted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def prepare(self, config: WorldConfig) -> None:
        """Start to import the modules that a world of this config preloads, in the background; does not wait for
        them. With places: on each block that such a world may lease, so that none is leased while this is done."""
        if self._places is None:
            self._zygotes.prepare(config)
            return
        for block in self._places.blocks_ahead(config):
            with self._making:
                threaded = self._lane(self._places, block)
            threaded.thread.submit(threaded.lane.prepare, config)

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
    ) -> Outcome:
        """Call ``task`` ("package.module:function") as ``function(rank_context, **kwargs)`` on every rank.

        ``fresh``: run the task in new processes, for example the part of a cell that resumes from a checkpoint and must
        find everything there. The live world of this key and config is retired before. The new world is kept for the
        next task, as any other.

        ``log_dir`` gets rank-N.log and, if a rank was asked for its stacks, rank-N.stacks. A task that gets no further
        for ``budget_s`` seconds is ended (conformance.runtime.watchdog says what that is, and what limits any task);
        the budget begins when it has its places. Raises ValueError for a malformed task, for ``kwargs`` that are not
        JSON values, and for more ranks than GPUs.
        """
        _check_call(config, task, kwargs, is_here=self._places is None)

        def run_in(lane: Lane, held: tuple[int, ...] = ()) -> Outcome:
            return lane.run(
                key=key,
                config=config,
                task=task,
                kwargs=kwargs,
                log_dir=log_dir,
                budget_s=budget_s,
                fresh=fresh,
                held=held,
            )

        return (
            run_in(self._own) if self._places is None else self._run_leased(self._places, key, config, budget_s, run_in)
        )

    def _run_leased(
        self,
        places: Places,
        key: str,
        config: WorldConfig,
        budget_s: float,
        run_in: Callable[[Lane, tuple[int, ...]], Outcome],
    ) -> Outcome:
        began = time.monotonic()
        with self._making:
            warm = self._warm.setdefault((key, config), set())
        try:
            lease = places.lease(key, config, prefer=warm, limit_s=SLOW * budget_s, is_over=lambda: self._is_aborted)
        except NoLease as none:
            return failed(str(none), kind="exited", began=began)

        def run() -> Outcome:
            try:
                return run_in(threaded.lane, lease.fds)
            finally:
                places.give_back(lease)

        try:
            with self._making:
                warm.add(lease.block)
                threaded = self._lane(places, lease.block)
        except BaseException:
            places.give_back(lease)
            raise
        return threaded.thread.submit(run).result()

    def _lane(self, places: Places, block: Block) -> _Threaded:
        if (threaded := self._lanes.get(block)) is None:
            thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="-".join(block))
            threaded = self._lanes[block] = _Threaded(lane=Lane(places.starter(block)), thread=thread)
        if self._is_aborted:
            threaded.lane.abort()
        return threaded

    def phase(self) -> str:
        """What the rank does that is furthest behind; empty if no task runs; of several tasks, of any. For another
        thread, to show it."""
        lanes = [self._own, *(threaded.lane for threaded in list(self._lanes.values()))]
        return next(filter(None, (lane.phase() for lane in lanes)), "")

    def abort(self) -> None:
        """End all processes of the pool, from another thread. The tasks that run or wait fail, and so does every later
        one."""
        self._is_aborted = True
        for lane in (self._own, *(threaded.lane for threaded in list(self._lanes.values()))):
            lane.abort()

    def close(self) -> None:
        """End all processes of the pool, which no other thread uses any more. Only the logs remain."""
        self._own.close()
        lanes, self._lanes = list(self._lanes.values()), {}
        for threaded in lanes:
            threaded.thread.submit(threaded.lane.close)
        for threaded in lanes:
            threaded.thread.shutdown()


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
