"""Places: what worlds of a pool lease, one for each rank: GPUs of this host, shares of them, or what else has names
(claim 8)."""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from functools import cached_property
from pathlib import Path

from conformance.runtime import WorldConfig
from conformance.runtime.forkserver_client import Zygotes
from conformance.runtime.gpu_inventory import gpus_of, memory_of_gpus, more_shares, network_of, seats_of, visible_to
from conformance.runtime.gpu_leases import Busy, Ticket, blocks, held, holders, lease_folder
from conformance.runtime.slots import Block, Lease, NoLease, Starter

_TICK_S = 0.1  # for leases that other processes give back, and places that are gone
_TELL_S = 30.0

logger = logging.getLogger(__name__)


class LeasedPlaces:
    """Leases of names. Threads share it. ``names``: those that are known. ``what``: they are, in words. ``folder``: of
    their locks."""

    def __init__(self, names: Block = (), *, what: str, folder: Path) -> None:
        self._what, self._folder = what, folder
        self._given_back = threading.Condition()
        self._taken_at: dict[Lease, float] = {}
        self.busy = Busy(names)

    def names(self) -> Block:
        """All places that there are now. Raises NoLease if none can be leased, and says why."""
        raise NotImplementedError

    def names_of_a_host(self) -> Block:
        """Those of one host."""
        raise NotImplementedError

    def blocks_ahead(self, config: WorldConfig) -> list[Block]:
        """See conformance.runtime.slots."""
        return []

    def starter(self, block: Block) -> Starter:
        """Who starts worlds on these places."""
        raise NotImplementedError

    def lease(
        self,
        who: str,
        config: WorldConfig,
        *,
        prefer: Collection[Block],
        limit_s: float,
        is_over: Callable[[], bool],
    ) -> Lease:
        """Wait for the places of a world. ``prefer``: the blocks that are taken before others. Raises NoLease.

        A run that waits for another process says so once; cells of one run wait for each other all the time.
        """
        began, is_told = time.monotonic(), False
        look_at = began + _TELL_S
        names, size = self._wanted(config)  # before the others have to wait: it may ask NVML
        with self._given_back:
            ticket = Ticket(names, size, folder=self._folder)
            try:
                while not is_over():
                    if (wanted := self._wanted(config)) != (names, size):  # a host was lost
                        old, (names, size) = ticket, wanted
                        ticket = Ticket(names, size, folder=self._folder)
                        old.withdraw()
                    if (lease := ticket.serve(prefer=prefer)) is not None:
                        self._taken_at[lease] = time.monotonic()
                        return lease
                    self._given_back.wait(_TICK_S)
                    now = time.monotonic()
                    if now > look_at and not is_told:
                        look_at = now + _TELL_S
                        # Also where nobody is seen to have any, who is in another container then.
                        if is_told := held(names, self._folder).keys() != {os.getpid()}:
                            logger.info("%s waits for %s", who, self._told(names, size))
                    if now - began > limit_s:
                        raise NoLease(f"no lease within {limit_s:g} s of {self._told(names, size)}")
                raise NoLease("the run was stopped")
            except BaseException:
                ticket.withdraw()
                raise

    def give_back(self, lease: Lease) -> None:
        with self._given_back:
            self.busy.add(lease.block, time.monotonic() - self._taken_at.pop(lease))
            lease.release()
            self._given_back.notify_all()

    def _wanted(self, config: WorldConfig) -> tuple[Block, int]:
        """The places of which a world wants so many. Raises NoLease."""
        names = self.names() if config.room is None else self.names_of_a_host()
        if config.size > len(names):
            raise NoLease(f"{config.size} ranks, and there are {len(names)} {self._what}{self._more(config.size)}")
        if config.room is not None:
            return names, max(config.size, self._with_room(names, config.room))
        return names, config.size

    def _with_room(self, names: Block, room: int) -> int:
        """How many of these places have room for so many bytes together; all where it is not known."""
        return len(names)

    def _more(self, ranks: int) -> str:
        """How there would be places for so many ranks, to follow on that there are not."""
        return ""

    def _told(self, names: Block, size: int) -> str:
        """The places that somebody waits for, and who has them, in words."""
        taken = holders(names, self._folder) or "none that this process could see"
        return f"{size} of {len(names)} {self._what}; leased are {taken}"


class Gpus(LeasedPlaces):
    """GPUs of this host that may be leased, by UUID, or shares of them. ``work_dir``: for the logs of zygotes."""

    def __init__(self, gpus: Block, *, work_dir: Path) -> None:
        what = "GPUs" if gpus_of(gpus) == gpus else "shares of GPUs"
        super().__init__(gpus, what=what, folder=lease_folder())
        self._gpus, self._work_dir = gpus, work_dir

    def names(self) -> Block:
        return self._gpus

    def names_of_a_host(self) -> Block:
        return self._gpus

    def blocks_ahead(self, config: WorldConfig) -> list[Block]:
        return blocks(*self._wanted(config)) if config.size <= len(self._gpus) else []

    def starter(self, block: Block) -> Zygotes:
        return Zygotes(self._work_dir, variables=visible_to(block) | network_of(block), seats=seats_of(block))

    @cached_property
    def _bytes(self) -> dict[str, int]:
        """How much memory each GPU of this host has, where that is known; a share has none of its own."""
        return {gpu: whole for gpu, (_, whole) in memory_of_gpus().items()}

    def _with_room(self, names: Block, room: int) -> int:
        """A power of two if not all, as worlds of ranks have, so that no GPU is left between their blocks."""
        smallest = min(self._bytes.get(name, 0) for name in names)
        powers = (2**power for power in range(len(names)) if 2**power < len(names))
        return next((count for count in powers if count * smallest >= room), len(names))

    def _more(self, ranks: int) -> str:
        return f"; {more_shares(ranks, len(gpus_of(self._gpus)))}"
