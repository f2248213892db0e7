"""The log of a training: JSON lines. The first one says what was asked and with which versions, the others a step each.

A step's line has ``step`` (updates that are done, from 1) and numbers by name; docs/training.md lists them. A training
that goes on from a checkpoint takes away the lines of later steps, so that no step stands there twice.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from conformance.reading import check_file
from conformance.validation import UsageError

Numbers = Mapping[str, float | None]


class RunLog:
    """Lines of one training; the first rank has it. Numbers that are not finite are the strings "inf" and "nan"."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, step: int, numbers: Numbers) -> None:
        self._line({"step": step, **{name: _finite(number) for name, number in numbers.items()}})

    def _line(self, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()


@contextlib.contextmanager
def open_log(path: Path, header: Mapping[str, Any], *, done: int, resumes: bool) -> Iterator[RunLog]:
    """Begin a log, or go on with one behind the update ``done``; its first line then stays. Where a training resumes
    and there was no checkpoint yet, the log that is there is kept as ``LOG.before``.

    Raises UsageError where a training that does not resume finds a log there: nothing is overwritten.
    """
    if path.exists() and not resumes:
        raise UsageError(f"{path} is the log of another training; give a new one, or go on with load_checkpoint")
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = kept_lines(path, done) if done and path.exists() else []
    if path.exists() and not done:
        path.replace(path.with_name(path.name + ".before"))
    beside = path.with_name(path.name + ".partial")
    beside.write_text("".join(kept or [json.dumps({"run": header}) + "\n"]), encoding="utf-8")
    beside.replace(path)
    with path.open("a", encoding="utf-8") as file:
        yield RunLog(file)


def kept_lines(path: Path, step: int) -> list[str]:
    """The lines of a log up to an update. What a crash has cut is left out, with all that follows."""
    check_file(path)
    kept = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            values = _values(line)
            if values is None or values.get("step", 0) > step:
                break
            kept.append(line)
    return kept


def read_log(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What was asked, and the steps' lines. Raises UsageError for a file that is no log."""
    check_file(path)
    lines = [_values(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not lines or lines[0] is None or "run" not in lines[0] or None in lines[1:]:
        raise UsageError(f"{path} is no log of a training, or it is damaged")
    header: dict[str, Any] = lines[0]["run"]
    return header, [line for line in lines[1:] if line]


def _values(line: str) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _finite(number: float | None) -> float | str | None:
    return number if number is None or math.isfinite(number) else str(number)
