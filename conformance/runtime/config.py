"""Declares which worker group a task wants, and the error of one that cannot be started."""

from dataclasses import dataclass, field
from typing import Literal

Device = Literal["cpu", "cuda"]
START_LIMIT_S = 120.0  # for importing torch and a backend on a loaded machine


class StartError(Exception):
    """A forkserver or a worker group could not be started. The message is for the user."""


@dataclass(frozen=True, kw_only=True)
class WorkerGroupConfig:
    """Configures a worker group.

    size: number of ranks. device: ``cpu``, or ``cuda``, where each rank has a GPU, or a share of one.
    preload: modules to import before the first task, such as the adapter's. They are imported once for all worker
        groups on one block of slots with the same ``preload``.
    python: the executable that ranks run in; empty: that of this process.
    room: required bytes of GPU memory. A worker group on leased slots (conformance.runtime.pool) gets enough GPUs of
        one host for them, whatever its size; all GPUs of that host if they do not suffice, or if their memory is
        unknown. Not compared: a live worker group serves tasks that need less or more memory of the same GPUs.
    memory_limit_bytes: limit of the address space of a rank, beyond what is mapped when the rank starts (CPU only).
        Address space is more than memory: each thread reserves some tens of MiB of it.

    Raises ValueError for a size below 1, and for a memory limit with ``cuda``.
    """

    size: int
    device: Device
    preload: tuple[str, ...]
    python: str = ""
    room: int | None = field(default=None, compare=False)
    memory_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a worker group of {self.size} ranks; it needs at least one")
        if self.device == "cuda" and self.memory_limit_bytes is not None:
            raise ValueError(
                "memory_limit_bytes limits address space, which CUDA reserves freely; leave it out for cuda"
            )
