"""Leases slots to worker groups: GPUs of this host, shares of GPUs, its processors, or slots of several hosts."""

import itertools
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Collection
from functools import cached_property
from pathlib import Path

from conformance.runtime import WorkerGroupConfig
from conformance.runtime.forkserver_client import BlockStarter, Forkservers
from conformance.runtime.gpu_inventory import (
    VISIBLE,
    gpus_of,
    memory_of_gpus,
    more_shares,
    visible_to,
)
from conformance.runtime.gpu_leases import (
    NONE,
    Busy,
    Ticket,
    blocks,
    held_gpus,
    holders,
    lease_folder,
    leases_by_process,
)
from conformance.runtime.mps import Mps
from conformance.runtime.worker_groups import Block, Lease, NoLease, Starter

_TICK_S = 0.1  # between looks for leases that other processes released, and for lost slots
_REPORT_S = 30.0  # until the first report of a wait, and between later ones

logger = logging.getLogger(__name__)


class LeasedSlots:
    """Leases names. Threads share it.

    names: the names known so far. what: their kind in the plural, for messages. folder: of their locks.
    """

    def __init__(self, names: Block = (), *, what: str, folder: Path) -> None:
        self._what, self._folder = what, folder
        self._given_back = threading.Condition()
        self._taken_at: dict[Lease, float] = {}
        self.busy = Busy(names)
        self._run, self.holds_gpus = uuid.uuid4().hex, False

    def names(self) -> Block:
        """Returns all current slots. Raises NoLease with the reason if none can be leased."""
        raise NotImplementedError

    def names_of_a_host(self) -> Block:
        """Returns the slots of one host."""
        raise NotImplementedError

    def blocks_ahead(self, config: WorkerGroupConfig) -> list[Block]:
        """See conformance.runtime.worker_groups.SlotPool."""
        return []

    def starter(self, block: Block) -> Starter:
        """Returns the object that starts worker groups on these slots."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends what the starters share."""

    @property
    def service(self) -> int:
        """See conformance.runtime.worker_groups.SlotPool."""
        return 0

    def has_failed(self, service: int) -> bool:
        """See conformance.runtime.worker_groups.SlotPool."""
        return False

    def _ticket(self, names: Block, size: int) -> Ticket:
        return Ticket(names, size, folder=self._folder, run=self._run, holds=self.holds_gpus)

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
        """Waits for the slots of a worker group. ``prefer``: the blocks that are tried before others. ``everything``:
        all slots of a host. Raises NoLease.

        Logs the wait once if another process holds slots; that cells of one run wait for each other is normal.
        """
        began, is_reported = time.monotonic(), False
        report_at = began + _REPORT_S
        names, size = self._wanted(config, everything)  # outside the lock: it may query NVML
        with self._given_back:
            ticket = self._ticket(names, size)
            try:
                while not is_over():
                    if (wanted := self._wanted(config, everything)) != (names, size):  # a host was lost
                        old, (names, size) = ticket, wanted
                        ticket = self._ticket(names, size)
                        old.withdraw()
                    own = held_gpus(self._taken_at) if self.holds_gpus else NONE
                    if (lease := ticket.serve(prefer=prefer, own=own)) is not None:
                        self._taken_at[lease] = time.monotonic()
                        return lease
                    self._given_back.wait(_TICK_S)
                    now = time.monotonic()
                    if now > report_at and not is_reported:
                        report_at = now + _REPORT_S
                        # Also if no holder is visible, because it may be in another container.
                        if is_reported := leases_by_process(names, self._folder).keys() != {os.getpid()}:
                            logger.info("%s waits for %s", who, self._describe(names, size))
                    if now - began > limit_s:
                        raise NoLease(f"no lease within {limit_s:g} s of {self._describe(names, size)}")
                raise NoLease("the run was stopped")
            except BaseException:
                ticket.withdraw()
                raise

    def give_back(self, lease: Lease) -> None:
        with self._given_back:
            self.busy.add(lease.block, time.monotonic() - self._taken_at.pop(lease))
            lease.release()
            self._given_back.notify_all()

    def _wanted(self, config: WorkerGroupConfig, everything: bool = False) -> tuple[Block, int]:
        """Returns the slots to choose from, and the number of them that a worker group needs. Raises NoLease."""
        everything = everything or config.gpu_memory is not None
        names = self.names_of_a_host() if everything else self.names()
        if config.size > len(names) and everything:
            names = self.names()
        if config.size > len(names):
            raise NoLease(f"{config.size} ranks, and there are {len(names)} {self._what}{self._advice(config.size)}")
        return names, len(names) if everything else config.size

    def _advice(self, ranks: int) -> str:
        """Returns advice on how to get slots for ``ranks`` ranks, as the end of a message."""
        return ""

    def _describe(self, names: Block, size: int) -> str:
        """Describes the slots that a task waits for, and their holders."""
        taken = holders(names, self._folder) or "none that this process could see"
        return f"{size} of {len(names)} {self._what}; leased are {taken}"


ROOM = 0.94  # share of a GPU's memory that its shares divide


def enough(needed: float, *, each: float, most: int) -> int:
    """Returns the smallest power of two of GPUs, or of shares, of ``each`` bytes that hold ``needed`` bytes; ``most``,
    which are all, if none does. Blocks of powers of two leave no gaps."""
    return next((count for count in (2**power for power in range(most.bit_length())) if count * each >= needed), most)


class Gpus(LeasedSlots):
    """Leases GPUs of this host by UUID, or shares of them.

    work_dir: for the logs of forkservers. shared: whether ranks of one worker group share a GPU. large: whether models
    are so large that shares divide the memory of GPUs, which no other run may use then.
    """

    def __init__(self, gpus: Block, *, work_dir: Path, shared: bool = True, large: bool = False) -> None:
        what = "GPUs" if gpus_of(gpus) == gpus else "shares of GPUs"
        super().__init__(gpus, what=what, folder=lease_folder())
        self._gpus, self._forkservers = gpus, Forkservers(work_dir)
        visible = visible_to(gpus) if VISIBLE in os.environ else {}
        self._mps = Mps(is_wanted=shared, visible=visible) if gpus_of(gpus) != gpus else None
        self.holds_gpus = large and gpus_of(gpus) != gpus

    def names(self) -> Block:
        return self._gpus

    def names_of_a_host(self) -> Block:
        return self._gpus

    def _wanted(self, config: WorkerGroupConfig, everything: bool = False) -> tuple[Block, int]:
        """Gives each rank as many shares of one GPU as hold ``rank_memory``, and an oracle shares of one GPU, or GPUs.

        The names are ordered so that each block is consecutive (conformance.runtime.gpu_leases.blocks). A group of one
        rank is offered the last shares first, so that it breaks no block of larger groups.
        """
        names, size = super()._wanted(config, everything)
        gpus, each = len(gpus_of(names)), 1
        shares = len(names) // gpus
        if not everything and (needed := config.gpu_memory or (shares > 1 and config.rank_memory)):
            memory = self._smallest * (ROOM if shares > 1 else 1)
            each = enough(needed, each=memory / shares, most=shares)
            spread = enough(needed, each=memory, most=gpus) if config.gpu_memory else 1
            size = max(config.size, spread)
        step = -1 if size == 1 and self._mps is not None else 1
        if each == 1:
            return names[::step], size
        found = blocks(names, size, each) or [names]
        return tuple(itertools.chain(*found[::step])), len(found[0])

    def blocks_ahead(self, config: WorkerGroupConfig) -> list[Block]:
        return blocks(*self._wanted(config))[:1] if config.size <= len(self._gpus) else []

    def starter(self, block: Block) -> BlockStarter:
        more = self._mps.variables if self._mps else dict
        return BlockStarter(forkservers=self._forkservers, block=block, more=more)

    def close(self) -> None:
        self._forkservers.close()
        if self._mps is not None:
            self._mps.close()

    @property
    def mps(self) -> str:
        """Returns whether ranks that share GPUs compute under MPS, for the summary; empty if none share one."""
        return self._mps.state if self._mps else ""

    @property
    def service(self) -> int:
        return self._mps.number if self._mps else 0

    def has_failed(self, service: int) -> bool:
        return self._mps is not None and self._mps.has_failed(service)

    @cached_property
    def _smallest(self) -> int:
        """Bytes of the GPU with the least memory; 0 if NVML does not report that of each."""
        memory = memory_of_gpus()
        return min(memory.get(gpu, (0, 0))[1] for gpu in gpus_of(self._gpus))

    def _advice(self, ranks: int) -> str:
        return f"; {more_shares(ranks, len(gpus_of(self._gpus)))}"


PROCESSORS_PER_LANE = 2  # a cell of two ranks, which wait for each other


def processors_of_host() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def lanes_of_host() -> int:
    """Returns the number of cells that this host's processors run at once.

    On two or three processors a second cell runs while the ranks of the first wait, start, or are judged.
    """
    processors = processors_of_host()
    return max(min(processors, 2), processors // PROCESSORS_PER_LANE)


def oracles_of_host() -> int:
    """Returns the number of oracle runs, and of judges in processes, that this host's processors run at once."""
    return max(1, processors_of_host() // PROCESSORS_PER_LANE)


class Lanes(LeasedSlots):
    """Leases lanes of this run, each of which runs the ranks of one cell on the processors of this host.

    work_dir: for the logs of forkservers, and for locks, because a lane is no resource that other runs lease.
    name: of a lane; lanes of one name are leased together.
    """

    def __init__(self, count: int, *, work_dir: Path, name: str = "lane") -> None:
        names = tuple(f"{name}-{number}" for number in range(count))
        super().__init__(names, what=f"{name}s", folder=work_dir / f"{name}s")
        self._names, self._forkservers = names, Forkservers(work_dir)

    def names(self) -> Block:
        return self._names

    def blocks_ahead(self, config: WorkerGroupConfig) -> list[Block]:
        return blocks(self._names, 1)[:1]

    def starter(self, block: Block) -> BlockStarter:
        return BlockStarter(forkservers=self._forkservers)

    def close(self) -> None:
        self._forkservers.close()

    def names_of_a_host(self) -> Block:
        return self._names

    def _wanted(self, config: WorkerGroupConfig, everything: bool = False) -> tuple[Block, int]:
        return self._names, len(self._names) if everything else 1
