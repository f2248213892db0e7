"""Reads users' files and reads and writes the files of an output folder. Works without torch.

A user's path may lead to a pipe, a device or a folder; a file may be binary or deeply nested. In all cases the result
is a value of the declared type or one UsageError that names the file.

An output folder may come from another machine, so its contents are not trusted: reading a pipe or a device might never
end, and a symbolic link may lead anywhere. So only regular files of a limited size are read, and no links. A file gets
its name only when it is completely written, and is never written through a link.
"""

import contextlib
import copy
import fcntl
import functools
import json
import os
import platform
import re
import shutil
import stat
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from conformance.core.errors import UsageError, one_line, shown, visible

MIB = 2**20


def check_file(path: Path) -> None:
    """Raises UsageError unless ``path`` is a readable regular file: reading a pipe or a device might never end.

    Raises FileNotFoundError if ``path`` does not exist.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise UsageError(f"{str(path)[:300]} cannot be read: {one_line(error)}") from None
    if stat.S_ISDIR(mode):
        raise UsageError(f"{path} is a folder; give a file")
    if not stat.S_ISREG(mode):
        raise UsageError(f"{path} is a pipe, a socket or a device; give a file")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{path} cannot be read: you lack the permission")


def read_text(path: Path, *, limit: int) -> str:
    """Reads a UTF-8 file of at most ``limit`` bytes. Raises UsageError; FileNotFoundError if it is missing."""
    check_file(path)
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise UsageError(f"{path} has more than {limit // MIB} MiB, more than any file of this kind needs")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}, line {line}: {not_utf8(error)}") from None


def not_utf8(error: UnicodeDecodeError) -> str:
    """Returns the message for bytes that are not UTF-8, with advice."""
    return f"not UTF-8 ({error.reason}, byte 0x{error.object[error.start]:02x}); save the file as UTF-8"


def read_toml(path: Path) -> dict[str, Any]:
    """Reads the tables of a TOML file. Raises UsageError, and FileNotFoundError if it is missing."""
    text = read_text(path, limit=MIB)
    try:
        return copy.deepcopy(_parsed_toml(text))
    except RecursionError:
        raise UsageError(f"{path} is not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # raised also for a number with thousands of digits
        raise UsageError(f"{path} is not valid TOML: {one_line(error)}") from None


@functools.lru_cache(maxsize=64)  # a profile reads a scenario's file once for each of its models and precisions
def _parsed_toml(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


def read_json(path: Path) -> dict[str, Any]:
    """Reads the object in a user's JSON file. Raises UsageError, and FileNotFoundError if it is missing."""
    values = parse_json(read_text(path, limit=64 * MIB), str(path))
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold a JSON object ({{...}}), got {shown(values)}")
    return values


def parse_json(text: str, source: str) -> Any:
    """Parses JSON. Raises UsageError, which names ``source``, for other text, and for a key that an object has twice:
    Python would take the last one in silence."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except _RepeatedKey:
        raise UsageError(f"{source.rstrip(',')}{_repeated_key(text)}; remove one of them") from None
    except RecursionError:
        raise UsageError(f"{source} cannot be read: its JSON is nested too deeply") from None
    except ValueError as error:  # raised also for a number with thousands of digits
        raise UsageError(f"{source} is not JSON: {one_line(error)}") from None


class _RepeatedKey(Exception):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise _RepeatedKey
    return values


def _repeated_key(text: str) -> str:
    """Says which key an object of JSON ``text`` has twice, and on which lines if there are several."""
    objects: list[dict[str, int]] = []  # those that are open, with the places of their keys
    end = 0
    while token := re.compile(r'["{}]').search(text, end):
        start, end = token.span()
        if token[0] == "{":
            objects.append({})
        elif token[0] == "}":
            objects.pop()
        else:
            key, end = json.JSONDecoder().raw_decode(text, start)
            if not text[end : end + 100].lstrip().startswith(":"):
                continue
            if key in objects[-1]:
                first, line = (text.count("\n", 0, place) + 1 for place in (objects[-1][key], start))
                lines = f", line {line}" if first == line else f", lines {first} and {line}"
                where = lines if "\n" in text.strip() else ""
                return f"{where}: an object has the key {shown(key)} twice"
            objects[-1][key] = start
    return ": an object has a key twice"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on ``path`` between processes. The lock ends with its process; the file stays.

    Raises UsageError for a link or a pipe at ``path``, which may lead to a file of the user, and if another process
    holds the lock too long, for example because it was stopped.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock_file(path) as file:
        lock(file.fileno(), path, limit_s=_WAIT_S)
        yield


def lock(descriptor: int, path: Path, *, limit_s: float) -> None:
    """Locks what ``descriptor`` is open on. Raises UsageError, with ``path``, if another process holds it so long."""
    if not _is_locked(descriptor, limit_s=limit_s):
        raise UsageError(f"{path} is held by {_holder(descriptor)} for {limit_s:g} s; end it, and run again")


def _is_locked(descriptor: int, *, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        else:
            return True


def _holder(descriptor: int) -> str:
    """Names the process that holds a lock, as far as the kernel says."""
    inode = os.fstat(descriptor).st_ino
    locks = (line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines())
    return next((f"process {lock[4]}" for lock in locks if lock[5].endswith(f":{inode}")), "another process")


def _lock_file(path: Path) -> BinaryIO:
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UsageError(f"{path} is not a file, but the suite keeps a lock there; remove it")
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "rb+")
    except OSError as error:
        raise Unwritable(f"{path} cannot be written: {error.strerror}") from None


_WAIT_S = 3600.0  # for another run that computes the same; an oracle of 8 billion parameters takes minutes
LOCK, _LOCK_S = "lock", 3.0  # seconds in which the ranks of a process that was killed end, and with them its lock


@contextlib.contextmanager
def owned(folder: Path, *, owner: str) -> Iterator[None]:
    """Holds an output folder for one process; its file ``lock`` has the name of the owner meanwhile.

    The lock ends with its process, so the file of a process that was killed holds nobody up. Raises UsageError, with
    the owner, while another process holds the folder.
    """
    path = folder / LOCK
    if not folder.is_dir():  # whoever reads it says so
        yield
        return
    while True:
        with _lock_file(path) as file:
            if not _is_locked(file.fileno(), limit_s=_LOCK_S):
                holder = visible(file.read(300).decode(errors="replace")) or _holder(file.fileno())
                raise UsageError(f"{folder} is in use by {holder}; wait for its end, end it, or give another folder")
            if not _is_at(path, file.fileno()):  # its owner has removed it meanwhile: another process may hold the next
                continue
            try:
                os.truncate(file.fileno(), 0)
                os.write(file.fileno(), encoded(f"process {os.getpid()} on {platform.node()}: {owner}"))
            except OSError as error:
                path.unlink(missing_ok=True)
                raise Unwritable(f"{path} cannot be written: {error.strerror}") from None
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_at(path: Path, descriptor: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def is_unused(out: Path) -> bool:
    """Returns whether a run may begin in the folder ``out``: it is missing, empty, or holds nothing but the lock of a
    process that was killed."""
    if not out.is_dir():
        return not out.exists()
    if (names := [path.name for path in out.iterdir()]) != [LOCK]:
        return not names
    with _lock_file(out / LOCK) as file:
        return _is_locked(file.fileno(), limit_s=0.0)


@contextlib.contextmanager
def complete_or_nothing(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write to, and renames it to ``path`` when the block ends without an exception."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    yield unfinished
    unfinished.rename(path)


_NO_FILES: dict[str, Callable[[int], bool]] = {
    "a link": stat.S_ISLNK,
    "a folder": stat.S_ISDIR,
    "a named pipe": stat.S_ISFIFO,
    "a socket": stat.S_ISSOCK,
    "a device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
}


class Unreadable(Exception):
    """Signals that a path of the output folder is not a file that the suite writes. The message says what to do."""


class Unwritable(Exception):
    """Signals that a file of the output folder cannot be written. The message names the file and the reason."""


def file_size(path: Path) -> int:
    """Returns the bytes of a regular file. Raises Unreadable for anything else, FileNotFoundError if it is missing."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no {path}") from None
    except (OSError, ValueError) as error:  # the name is too long or has an illegal character
        raise Unreadable(f"{path} cannot be read: {error}") from None
    for kind, is_kind in _NO_FILES.items():
        if is_kind(status.st_mode):
            raise Unreadable(f"{path} is {kind} and not a file; put the file itself there, or run the cell again")
    return status.st_size


def is_link(path: Path) -> bool:
    """Tells whether ``path`` is a symbolic link; False if ``path`` is not a valid name."""
    with contextlib.suppress(OSError, ValueError):
        return path.is_symlink()
    return False


def is_file(path: Path) -> bool:
    """Tells whether ``path`` is a regular file or a link to one; False if a file gave it a name that is not valid."""
    with contextlib.suppress(OSError, ValueError):
        return path.is_file()
    return False


def read_file(path: Path, *, limit: int) -> bytes:
    """Reads a regular file of at most ``limit`` bytes. Raises Unreadable and FileNotFoundError."""
    if (size := file_size(path)) > limit:
        raise Unreadable(f"{path} has {size} bytes, more than the {limit} that the suite would write; run again")
    try:
        return path.read_bytes()
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from None


def read_end(path: Path, *, limit: int) -> bytes:
    """Reads the last ``limit`` bytes of a regular file. Raises Unreadable and FileNotFoundError."""
    size = file_size(path)
    try:
        with path.open("rb") as file:
            file.seek(max(0, size - limit))
            return file.read(limit)
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from None


def encoded(text: str) -> bytes:
    """Encodes text as UTF-8. Characters that UTF-8 cannot represent, for example in folder names, become escapes."""
    return text.encode("utf-8", errors="backslashreplace")


def make_folder(out: Path, *, option: str = "--out") -> None:
    """Creates an output folder if it is missing. Raises UsageError if it cannot be created."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is a link to nothing" if is_link(out) and not out.exists() else error.strerror
        raise UsageError(f"{out} cannot be created: {why}; give another {option}") from None


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a file completely or not at all. A link or a pipe at ``path`` is replaced, not written through.

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


def no_link(path: str, flags: int) -> int:
    """Opens a file for ``open(..., opener=no_link)``, and never through a link, which may lead elsewhere."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


class _Visible:
    """Makes control characters visible in all that is printed to a stream. A progress bar may begin with a return."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.rich_proxied_file = getattr(stream, "rich_proxied_file", stream)  # where rich writes its colours

    def write(self, text: str) -> int:
        bar = text.startswith("\r")
        return self._stream.write("\r" * bar + visible(text[bar:]))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def visible_output() -> Iterator[None]:
    """Makes control characters visible in standard output and error: ids, reasons and names may come from files."""
    out: Any = _Visible(sys.stdout)
    errors: Any = _Visible(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        yield


def unfiltered_errors() -> contextlib.AbstractContextManager[object]:
    """Lets the bars of a library's downloads move on the terminal inside the ``with`` statement."""
    return contextlib.redirect_stderr(getattr(sys.stderr, "rich_proxied_file", sys.stderr))
