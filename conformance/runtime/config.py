"""Declares which worker group a task wants, and the error of one that cannot be started."""

from dataclasses import dataclass, field
from typing import Literal

Device = Literal["cpu", "cuda"]
START_LIMIT_S = 120.0  # for importing torch and a backend on a loaded machine


class StartError(Exception):
    """A forkserver or a worker group could not be started. The message is for the user."""


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """The configuration of a world.

    size: number of ranks. device: ``cpu``, or ``cuda``, where each rank has a GPU, or a share of one.
    preload: modules to import before the first task, such as the adapter's. They are imported once for all worlds
        at one place with the same ``preload``.
    python: the executable that ranks run in; empty: that of this process.
    room: bytes of GPU memory. A world on leased places (conformance.runtime.pool) has as many GPUs of one host as have
        room for them together, whatever its size, and all of that host where they do not, or where nobody knows. It
        tells no worlds apart: one that is alive serves a task that needs less or more of the same GPUs.
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
            raise ValueError(f"a world of {self.size} ranks; it needs at least one")
        if self.device == "cuda" and self.memory_limit_bytes is not None:
            raise ValueError(
                "memory_limit_bytes limits address space, which CUDA reserves freely; leave it out for cuda"
            )
