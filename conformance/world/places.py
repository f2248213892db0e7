"""Places: where worlds of a pool may be, if not simply here: one place for each rank, leased (claim 8)."""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from conformance.world.config import WorldConfig
from conformance.world.lane import Starter

Block = tuple[str, ...]  # names of places, such as the UUIDs of GPUs


class NoLease(Exception):
    """A task got no place. The message is for the user."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Of a rank. gpu: which of the GPUs that it sees is its own. host: the host that NCCL takes it to be on, if that is
    not simply this one."""

    gpu: int
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Places that are this process's until it closes the descriptors, and with it all that hold them, too."""

    block: Block
    fds: tuple[int, ...]

    def release(self) -> None:
        for fd in self.fds:
            os.close(fd)


class Places(Protocol):
    """Threads share it."""

    def lease(
        self,
        who: str,
        config: WorldConfig,
        *,
        prefer: Collection[Block],
        limit_s: float,
        is_over: Callable[[], bool],
    ) -> Lease:
        """Wait for the places of a world. ``prefer``: blocks that are taken before others. Raises NoLease."""

    def give_back(self, lease: Lease) -> None: ...

    def blocks_ahead(self, config: WorldConfig) -> Collection[Block]:
        """The blocks that a world may lease, if they are known before and it helps to prepare them."""

    def starter(self, block: Block) -> Starter:
        """Who starts worlds on these places."""
