"""Pool: worlds on leased GPUs, for any number of threads. The same interface as conformance.world.Pool.

A task waits for a lease of as many GPUs as its world has ranks, runs in the world that is alive on these, or in a new
one, and gives the lease back. Each block of GPUs has a pool and a thread of its own, because the kernel ends a world
with the thread that started it; so a CUDA error that outlives its task harms that world and no other. Serves claim 8.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conformance.gpus.busy import Busy
from conformance.gpus.lease import Block, Lease, Ticket, holders, lease_folder
from conformance.world import Outcome, Pool, WorldConfig
from conformance.world.patience import SLOW

_TICK_S = 0.1  # for leases that other processes give back
_TELL_S = 30.0

logger = logging.getLogger(__name__)


class NoLease(Exception):
    """A task got no GPUs. The message is for the user."""


@dataclass(frozen=True, kw_only=True)
class _Lane:
    """A block of GPUs: the pool of its worlds, and the thread that runs them."""

    pool: Pool
    thread: ThreadPoolExecutor


class LeasedPool:
    """Close it when no thread uses it any more. ``gpus``: those that may be leased, by UUID. ``busy``: counts."""

    def __init__(self, *, work_dir: Path, gpus: tuple[str, ...], busy: Busy) -> None:
        self._work_dir, self._gpus, self._busy = work_dir, gpus, busy
        self._lanes: dict[Block, _Lane] = {}
        self._warm: dict[tuple[str, WorldConfig], set[Block]] = {}  # blocks on which a world has run
        self._given_back = threading.Condition()
        self._is_aborted = False

    def prepare(self, config: WorldConfig) -> None:
        """Ranks on GPUs import for themselves, so there is nothing that could be done before a lease."""

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
        """As conformance.world.Pool.run, when the GPUs are free. The budget begins then."""
        try:
            lease = self._lease(key, config, limit_s=SLOW * budget_s)
        except NoLease as none:
            return Outcome(state="failed", reason=str(none), kind="exited", rank=None, seconds=0, results=[])

        def run_leased(pool: Pool) -> Outcome:
            began = time.monotonic()
            try:
                return pool.run(
                    key=key,
                    config=replace(config, gpus=lease.gpus),
                    task=task,
                    kwargs=kwargs,
                    log_dir=log_dir,
                    budget_s=budget_s,
                    fresh=fresh,
                    held=lease.fds,
                )
            finally:
                self._busy.add(lease.gpus, time.monotonic() - began)
                lease.release()
                with self._given_back:
                    self._given_back.notify_all()

        return self._in_lane(lease.gpus, run_leased)

    def phase(self) -> str:
        """What a rank does that runs a task; of several tasks, of any."""
        return next(filter(None, (lane.pool.phase() for lane in list(self._lanes.values()))), "")

    def abort(self) -> None:
        """End all processes of the pool. The tasks that run or wait fail, and so does every later one."""
        self._is_aborted = True
        for lane in list(self._lanes.values()):
            lane.pool.abort()

    def close(self) -> None:
        """End all processes of the pool. Only the logs remain."""
        for lane in self._lanes.values():
            lane.thread.submit(lane.pool.close)
        for lane in self._lanes.values():
            lane.thread.shutdown()

    def _lease(self, key: str, config: WorldConfig, *, limit_s: float) -> Lease:
        """Wait for the GPUs of a world. Raises NoLease."""
        began, is_told = time.monotonic(), False
        size = len(self._gpus) if config.wants_all else config.size
        with self._given_back:
            ticket = Ticket(self._gpus, size, folder=lease_folder())
            warm = self._warm.setdefault((key, config), set())
            try:
                while not self._is_aborted:
                    if (lease := ticket.serve(prefer=warm)) is not None:
                        warm.add(lease.gpus)
                        return lease
                    self._given_back.wait(_TICK_S)
                    waited = time.monotonic() - began
                    if waited > _TELL_S and not is_told:
                        logger.info("%s waits for %s", key, self._wanted(size))
                        is_told = True
                    if waited > limit_s:
                        raise NoLease(f"no lease within {limit_s:g} s of {self._wanted(size)}")
                raise NoLease("the run was stopped")
            except BaseException:
                ticket.withdraw()
                raise

    def _wanted(self, size: int) -> str:
        """The GPUs that somebody waits for, and who has them, in words."""
        taken = holders(self._gpus, lease_folder()) or "none that this process could see"
        return f"{size} of {len(self._gpus)} GPUs; leased are {taken}"

    def _in_lane(self, block: Block, run: Callable[[Pool], Outcome]) -> Outcome:
        with self._given_back:
            if (lane := self._lanes.get(block)) is None:
                thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="-".join(block))
                lane = self._lanes[block] = _Lane(pool=Pool(work_dir=self._work_dir), thread=thread)
            if self._is_aborted:
                lane.pool.abort()
        return lane.thread.submit(run, lane.pool).result()


AnyPool = Pool | LeasedPool
