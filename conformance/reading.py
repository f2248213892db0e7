"""Reading: files of users, of which nothing is expected.

Any of them may be a pipe, a device, a folder, no text, or nested without end. Whatever it is, the answer is a value of
the promised type or one UsageError with the file's name.
"""

import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from conformance.validation import UsageError, one_line, shown

MIB = 2**20


def check_file(path: Path) -> None:
    """Raises UsageError for anything but a file: a pipe waits for its writer, and a device never ends.

    Raises FileNotFoundError where there is nothing.
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
    """The text of a file of at most ``limit`` bytes. Raises UsageError, and FileNotFoundError where there is none."""
    check_file(path)
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise UsageError(f"{path} has more than {limit // MIB} MiB, which no file of its kind needs")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}, line {line}: {not_utf8(error)}") from None


def not_utf8(error: UnicodeDecodeError) -> str:
    """What is wrong with bytes that are no text, and what to do."""
    return f"not UTF-8 ({error.reason}, byte 0x{error.object[error.start]:02x}); save the file as UTF-8"


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises UsageError, and FileNotFoundError where there is none."""
    text = read_text(path, limit=MIB)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"{path} is not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # also of a number with thousands of digits
        raise UsageError(f"{path} is not valid TOML: {one_line(error)}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UsageError, and FileNotFoundError where there is none."""
    values = parse_json(read_text(path, limit=64 * MIB), str(path))
    if not isinstance(values, dict):
        raise UsageError(f"{path} holds {shown(values)} where a JSON object ({{...}}) is due")
    return values


def parse_json(text: str, source: str) -> Any:
    """A JSON value. Raises UsageError that names ``source``."""
    try:
        return json.loads(text)
    except RecursionError:
        raise UsageError(f"{source} is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:  # also of a number with thousands of digits
        raise UsageError(f"{source} is not JSON: {one_line(error)}") from None
