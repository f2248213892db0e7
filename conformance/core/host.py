"""Locates the cache and the fixtures on this host, and measures its free memory and disk.

The fixtures are next to ``conformance`` in a checkout, and inside it in an installed wheel.

This module imports nothing slow, because the pytest plugin uses it before its workers start.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from conformance.core.errors import UsageError, did_you_mean, one_line, shown

_PACKAGE = Path(__file__).resolve().parent.parent
CHECKOUT = _PACKAGE.parent  # for an installed wheel, the folder that holds the packages
FIXTURES = _PACKAGE / "_fixtures" if (_PACKAGE / "_fixtures").is_dir() else CHECKOUT / "fixtures"


def resolve(path: str) -> Path:
    """Returns the absolute path for a user's path, which is relative to the working directory or to the fixtures.

    Raises UsageError if neither exists.
    """
    try:
        for candidate in (Path(path).expanduser(), FIXTURES / path):
            if candidate.exists():
                return candidate.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself, an unknown user, a name that is too long
        raise UsageError(f"{shown(path)} cannot be used as a path: {one_line(error)}") from None
    known = [f"{folder}/{file.name}" for folder in ("models", "data") for file in (FIXTURES / folder).glob("*")]
    where = f"neither here ({Path.cwd()}) nor among the fixtures ({FIXTURES})"
    raise UsageError(f"there is no {shown(path)}, {where}; {did_you_mean(path, known)}".rstrip("; "))


def cache_folder() -> Path:
    """Returns the folder in which records are kept across runs."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "backend-parity"
    return Path(os.environ.get("PARITY_CACHE") or default)


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
