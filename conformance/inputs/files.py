"""Files that several processes may make at the same time: one makes them, and nobody sees them half."""

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` between processes. The lock file is kept; a lock ends with its process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def complete_or_nothing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to ``path`` when the block ends without an exception."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    yield unfinished
    unfinished.rename(path)
