"""Machine: the memory and the disk that this machine has now.

Imports nothing slow, because the pytest plugin looks before its workers start, in every run with workers.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from conformance.core.paths import cache_folder


@dataclass(frozen=True, kw_only=True)
class Room:
    """What there is, in bytes. cache: of the oracle's cache; None where it is on the file system of the output."""

    memory: float
    disk: float
    cache: float | None


def room_of(out: Path) -> Room:
    """Of this machine now; ``out`` need not exist yet."""
    folder, cache = free_of(out), free_of(cache_folder())
    apart = folder.stat().st_dev != cache.stat().st_dev
    return Room(
        memory=available_memory(),
        disk=shutil.disk_usage(folder).free,
        cache=shutil.disk_usage(cache).free if apart else None,
    )


def free_of(path: Path) -> Path:
    """The nearest folder above ``path`` that exists, whose file system will hold it."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.is_dir())


def available_memory() -> int:
    """Bytes of memory that are available without swapping, by the kernel's estimate (MemAvailable)."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
