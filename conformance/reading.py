"""Reading: reads users' files, without any assumption about what they contain.

A path may lead to a pipe, a device or a folder; a file may be binary or deeply nested. In all cases the result is a
value of the declared type or one UsageError that names the file.
"""

import copy
import functools
import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from conformance.validation import UsageError, one_line, shown

MIB = 2**20


def check_file(path: Path) -> None:
    """Raises UsageError for anything but a readable regular file: reading a pipe or a device might never end.

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
    """The text of a UTF-8 file of at most ``limit`` bytes. Raises UsageError; FileNotFoundError if it is missing."""
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
    """The message for bytes that are not UTF-8: what is wrong, and what to do."""
    return f"not UTF-8 ({error.reason}, byte 0x{error.object[error.start]:02x}); save the file as UTF-8"


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises UsageError, and FileNotFoundError if it is missing."""
    text = read_text(path, limit=MIB)
    try:
        return copy.deepcopy(_parsed_toml(text))
    except RecursionError:
        raise UsageError(f"{path} is not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # also of a number with thousands of digits
        raise UsageError(f"{path} is not valid TOML: {one_line(error)}") from None


@functools.lru_cache(maxsize=64)  # a profile names a scenario's file for each of its models and precisions
def _parsed_toml(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a user's JSON file. Raises UsageError, and FileNotFoundError if it is missing."""
    values = parse_json(read_text(path, limit=64 * MIB), str(path))
    if not isinstance(values, dict):
        raise UsageError(f"{path} holds {shown(values)}, but it has to hold a JSON object ({{...}})")
    return values


def parse_json(text: str, source: str) -> Any:
    """Parse JSON. Raises UsageError, which names ``source``, for other text."""
    try:
        return json.loads(text)
    except RecursionError:
        raise UsageError(f"{source} cannot be read: its JSON is nested too deeply") from None
    except ValueError as error:  # also of a number with thousands of digits
        raise UsageError(f"{source} is not JSON: {one_line(error)}") from None
