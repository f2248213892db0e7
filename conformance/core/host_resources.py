"""Measures the free memory and disk of this machine.

It imports nothing slow, because the pytest plugin uses it before its workers start.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from conformance.core.paths import cache_folder


@dataclass(frozen=True, kw_only=True)
class HostResources:
    """Holds free bytes. cache: for the oracle's cache; None if it is on the file system of the output."""

    memory: float
    disk: float
    cache: float | None


def host_resources_of(out: Path) -> HostResources:
    """Measures this machine now; ``out`` need not exist yet."""
    folder, cache = free_of(out), free_of(cache_folder())
    own_disk = folder.stat().st_dev != cache.stat().st_dev
    return HostResources(
        memory=available_memory(),
        disk=shutil.disk_usage(folder).free,
        cache=shutil.disk_usage(cache).free if own_disk else None,
    )


def free_of(path: Path) -> Path:
    """Returns the nearest existing folder at or above ``path``, whose file system will hold it."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.is_dir())


def available_memory() -> int:
    """Returns the bytes of memory available without swapping, by the kernel's estimate (MemAvailable)."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
