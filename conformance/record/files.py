"""Files: reads and writes the files of an output folder; no other module opens them. Without torch.

An output folder may come from another machine, so its contents are not trusted: reading a pipe or a device might never
end, and a symbolic link may lead anywhere. So only regular files are read, no links, and no files larger than the suite
would write. A file gets its name only when it is completely written, and is never written through a link (claim 9).
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
    """A path of the output folder is not a file that the suite would have written. The message says what to do."""


class Unwritable(Exception):
    """A file of the output folder cannot be written. The message names the file and the reason."""


def file_size(path: Path) -> int:
    """Size in bytes of a regular file. Raises Unreadable for anything else, and FileNotFoundError if it is missing."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no {path}") from None
    except (OSError, ValueError) as error:  # a name that is too long, or has a character that is not allowed
        raise Unreadable(f"{path} cannot be read: {error}") from None
    for kind, is_kind in _NO_FILES.items():
        if is_kind(status.st_mode):
            raise Unreadable(f"{path} is {kind} and not a file; put the file itself there, or run the cell again")
    return status.st_size


def is_link(path: Path) -> bool:
    """Whether ``path`` is a symbolic link; False if ``path`` is not a valid name."""
    with contextlib.suppress(OSError, ValueError):
        return path.is_symlink()
    return False


def read_file(path: Path, *, limit: int) -> bytes:
    """The bytes of a regular file of at most ``limit`` bytes. Raises Unreadable and FileNotFoundError."""
    if (size := file_size(path)) > limit:
        raise Unreadable(f"{path} has {size} bytes, more than the {limit} that the suite would write; run again")
    try:
        return path.read_bytes()
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from None


def read_end(path: Path, *, limit: int) -> bytes:
    """The last ``limit`` bytes of a regular file. Raises Unreadable and FileNotFoundError."""
    size = file_size(path)
    try:
        with path.open("rb") as file:
            file.seek(max(0, size - limit))
            return file.read(limit)
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from None


def encoded(text: str) -> bytes:
    """The text as UTF-8. Characters that UTF-8 cannot represent (in names of folders, for example) become escapes."""
    return text.encode("utf-8", errors="backslashreplace")


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all. If ``path`` is a link or a pipe, it is replaced, not written through.

    Raises Unwritable.
    """
    data = encoded(content) if isinstance(content, str) else content
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.unlink(missing_ok=True)
        with unfinished.open("xb") as file:  # fails if a link was created at this path in the meantime
            file.write(data)
        unfinished.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)  # the disk may be full
        raise Unwritable(f"{path} cannot be written: {error.strerror}") from error
