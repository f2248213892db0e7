"""Format: the lines of a record, read and verified without torch. Reports and the judge have no other reader.

A record is a folder with ``record.jsonl`` and one safetensors file per step. Lines: a header (who, what, where, and the
observables), one line per optimizer step, a footer with a digest. Serves claim 9: a run that stopped half-way has no
footer, a changed one a wrong digest; both are errors with a name, never a pass.

A step's line: ``step``; ``values``, the scalars and settings by the key of their observable; ``replicas``, what ranks
that should hold the same numbers held; ``seconds``; and its ``tensors`` file with a SHA-256. Step -1 (or, of a leg that
goes on from a checkpoint, the step before its first) holds the weights as loaded. Numbers that are not finite are
strings: ``"nan"``, ``"inf"``, ``"-inf"``.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.observable import Observable, observables_from_json

SCHEMA = 3
FILE = "record.jsonl"
Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Lines:
    """The lines of a record. ``loaded`` is the line of the weights as loaded, ``steps`` those of optimizer steps."""

    header: Line
    loaded: Line
    steps: tuple[Line, ...]
    footer: Line

    @property
    def observables(self) -> tuple[Observable, ...]:
        """What the record says was observed, in causal order."""
        return observables_from_json(self.header["observables"])

    @property
    def digest(self) -> str:
        """SHA-256 of everything in the record; empty without a footer."""
        return str(self.footer.get("sha256", ""))


class RecordError(ValueError):
    """A record that cannot be trusted; the message says which file, what is wrong, and what to do.

    ``left`` are the lines that could be read all the same, for a reader who wants to see how far it came.
    """

    left: Lines | None = None


class MissingFooter(RecordError):
    """The run stopped before it was complete."""


class DigestMismatch(RecordError):
    """The record, or one of its tensor files, was changed after it was written."""


class WrongSchema(RecordError):
    """Written by another version of the suite."""


def read_lines(path: Path) -> Lines:
    """Read and verify the lines of the record in folder ``path``; its tensors are not looked at.

    Raises RecordError (MissingFooter, DigestMismatch, WrongSchema) with what to do about it.
    """
    file = path / FILE
    if not file.is_file():
        raise RecordError(f"{path} holds no {FILE}: this is not a record, or its cell ended before it wrote anything")
    raw = file.read_bytes().splitlines(keepends=True)
    values: list[Line] = []
    problem: RecordError | None = None
    for number, line in enumerate(raw, start=1):
        try:
            value = json.loads(line)
        except ValueError:
            if number < len(raw):
                problem = DigestMismatch(f"{file}:{number} is not JSON: the file was changed; run the cell again")
            break
        values.append(value if isinstance(value, dict) else {})
    if not values or values[0].get("type") != "header":
        raise problem or RecordError(
            f"{file} does not begin with a header line: not a record, or its beginning is lost; run the cell again"
        )
    lines = _sorted(values)
    problem = problem or _schema(file, lines) or _ending(file, lines, raw) or _order(file, lines)
    if problem:
        problem.left = lines
        raise problem
    return lines


def _sorted(values: list[Line]) -> Lines:
    steps = [value for value in values[1:] if value.get("type") == "step" and isinstance(value.get("step"), int)]
    footer = values[-1] if values[-1].get("type") == "footer" else {}
    return Lines(header=values[0], loaded=steps[0] if steps else {}, steps=tuple(steps[1:]), footer=footer)


def _schema(file: Path, lines: Lines) -> RecordError | None:
    if (schema := lines.header.get("schema")) == SCHEMA:
        return None
    environment = lines.header.get("environment")
    writer = environment.get("backend-parity", "unknown") if isinstance(environment, dict) else "unknown"
    return WrongSchema(
        f"{file} has schema {schema}, this version reads {SCHEMA}; run the cell again, or judge it with the version "
        f"that wrote it (backend-parity {writer})"
    )


def _ending(file: Path, lines: Lines, raw: list[bytes]) -> RecordError | None:
    if not lines.footer:
        last = lines.steps[-1]["step"] if lines.steps else "none"
        return MissingFooter(f"{file} has no footer: the cell stopped after step {last}; run it again")
    if record_digest(b"".join(raw[:-1]), lines.footer) != lines.digest:
        return DigestMismatch(f"{file} does not match its own digest: it was edited; run the cell again")
    return None


def _order(file: Path, lines: Lines) -> RecordError | None:
    first = lines.header.get("first_step", 0)
    seen = [line.get("step") for line in (lines.loaded, *lines.steps)]
    if seen == [*range(first - 1, first + lines.footer.get("steps", 0))]:
        return None
    return DigestMismatch(
        f"{file} has steps {seen}, but its header and footer promise {lines.footer.get('steps')} from step {first}; "
        f"run the cell again"
    )


def record_digest(body: bytes, footer: Line) -> str:
    """SHA-256 of all lines before the footer and of the footer's own values, apart from the digest itself."""
    values = {key: value for key, value in footer.items() if key != "sha256"}
    return hashlib.sha256(body + dumps(values).encode()).hexdigest()


def dumps(values: Any, *, indent: int | None = None) -> str:
    """JSON text that every reader accepts: NaN and infinity, which JSON cannot say, become strings."""
    return json.dumps(_finite(values), indent=indent, allow_nan=False)


def number(value: Any) -> float:
    """A number of a record or a verdict, which may be one of the strings that ``dumps`` writes; NaN for None."""
    return math.nan if value is None else float(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
