"""Files: how the files of an output folder are opened, here and nowhere else; without torch.

An output folder may come from another machine, and what lies in it is not believed: a pipe waits for ever, a device
never ends, and a link leads anywhere. So only regular files that are no links are read, and none beyond a size that the
suite would write. What is written takes its name only when it is whole, and never goes through a link (claim 9).
"""

import contextlib
import stat
from collections.abc import Callable
from pathlib import Path

_NO_FILES: dict[str, Callable[[int], bool]] = {
    "a link": stat.S_ISLNK,
    "a folder": stat.S_ISDIR,
    "a named pipe": stat.S_ISFIFO,
    "a socket": stat.S_ISSOCK,
    "a device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
}


class Unreadable(Exception):
    """What lies there is no file that the suite would have written; the message names it and says what to do."""


class Unwritable(Exception):
    """A file of the output folder cannot be written; the message names it and says why."""


def file_size(path: Path) -> int:
    """Size in bytes of a regular file. Raises Unreadable for anything else, FileNotFoundError where nothing is."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no {path}") from None
    except (OSError, ValueError) as error:  # a name that is too long, or holds what no name can
        raise Unreadable(f"{path} cannot be read: {error}") from None
    for kind, is_kind in _NO_FILES.items():
        if is_kind(status.st_mode):
            raise Unreadable(f"{path} is {kind} and not a file; put the file itself there, or run the cell again")
    return status.st_size


def is_link(path: Path) -> bool:
    """Whether a link lies at ``path``; where no name can be, none does."""
    with contextlib.suppress(OSError, ValueError):
        return path.is_symlink()
    return False


def read_file(path: Path, *, limit: int) -> bytes:
    """A regular file of at most ``limit`` bytes. Raises as ``file_size``."""
    if (size := file_size(path)) > limit:
        raise Unreadable(f"{path} has {size} bytes, more than the {limit} that the suite would write; run again")
    try:
        return path.read_bytes()
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from None


def read_end(path: Path, *, limit: int) -> bytes:
    """The last ``limit`` bytes of a regular file. Raises as ``file_size``."""
    size = file_size(path)
    try:
        with path.open("rb") as file:
            file.seek(max(0, size - limit))
            return file.read(limit)
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from None


def encoded(text: str) -> bytes:
    """Text as it is written; in escapes what UTF-8 cannot say, such as the name of a folder in another encoding."""
    return text.encode("utf-8", errors="backslashreplace")


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all; a link or a pipe of its name is replaced, never written through.

    Raises Unwritable.
    """
    data = encoded(content) if isinstance(content, str) else content
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.unlink(missing_ok=True)
        with unfinished.open("xb") as file:  # fails where somebody has put a link in the meantime
            file.write(data)
        unfinished.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)  # where the disk is full, every byte counts
        raise Unwritable(f"{path} cannot be written: {error.strerror}") from error
