"""Record: what one cell observed. Immutable, on disk, readable without a GPU, a backend or torch.distributed.

A folder with ``record.jsonl`` (a header line, one line per optimizer step, a footer line) and one safetensors file
per step. Serves claim 8: a run that stopped half-way has no footer, a changed one a wrong digest; both are errors with
a name, never a pass. The oracle writes its records in the same format.

Tensor names in a step's file: ``gradient/NAME`` (unclipped), ``weight/NAME`` (after the step), ``logprob/ROW``; step
-1, written before the first step, holds only the weights as loaded.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from conformance.record.format import record_digest

SCHEMA = 1
FILE = "record.jsonl"


class RecordError(ValueError):
    """A record that cannot be trusted; the message says which file, what is wrong, and what to do."""


class MissingFooter(RecordError):
    """The run stopped before it was complete."""


class DigestMismatch(RecordError):
    """The record, or one of its tensor files, was changed after it was written."""


class WrongSchema(RecordError):
    """Written by another version of the suite."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step. ``values`` are the line's plain JSON values; tensors are read on demand."""

    step: int
    values: dict[str, Any]
    path: Path

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of the step, on the CPU, in the dtype in which they were observed."""
        tensors: dict[str, torch.Tensor] = load_file(self.path)
        return tensors

    def open(self) -> contextlib.AbstractContextManager[Any]:
        """The step's file as safetensors opens it: names with ``keys()``, one tensor with ``get_tensor(name)``."""
        handle: contextlib.AbstractContextManager[Any] = safe_open(self.path, framework="pt")
        return handle


@dataclass(frozen=True, kw_only=True)
class Record:
    """A complete, verified record. ``initial`` is step -1, ``steps`` are the optimizer steps in order."""

    path: Path
    header: dict[str, Any]
    initial: StepRecord
    steps: tuple[StepRecord, ...]
    footer: dict[str, Any]


class RecordWriter:
    """Writes a record line by line, flushed, so that what was seen before a crash stays on disk."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        path.mkdir(parents=True, exist_ok=False)
        self._path = path
        self._file = (path / FILE).open("w", encoding="utf-8")
        self._steps = 0
        self._line({"type": "header", "schema": SCHEMA, **header})

    def step(self, step: int, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Add one step; tensors are written first, so that a line never names a file that is not complete."""
        name = f"step-{step:04d}.safetensors" if step >= 0 else "initial.safetensors"
        save_file({key: t.detach().cpu().contiguous() for key, t in tensors.items()}, self._path / name)
        sha256 = _sha256(self._path / name)
        self._line({"type": "step", "step": step, **values, "tensors": {"file": name, "sha256": sha256}})
        self._steps += step >= 0

    def finish(self, values: Mapping[str, Any]) -> None:
        """Write the footer, with the digest of all lines and of itself; the record is complete now."""
        footer = {"type": "footer", "steps": self._steps, **values}
        self._line({**footer, "sha256": record_digest((self._path / FILE).read_bytes(), footer)})
        self._file.close()

    def _line(self, values: Mapping[str, Any]) -> None:
        line = json.dumps(values, allow_nan=True) + "\n"
        self._file.write(line)
        self._file.flush()


def read_record(path: Path) -> Record:
    """Read and verify the record in folder ``path``.

    Raises RecordError (MissingFooter, DigestMismatch, WrongSchema) with what to do about it.
    """
    values = read_lines(path)
    steps = [_read_step(path, value) for value in values[1:-1]]
    if [s.step for s in steps] != list(range(-1, values[-1]["steps"])):
        raise DigestMismatch(
            f"{path / FILE} names steps {[s.step for s in steps]}, its footer {values[-1]['steps']}; run the cell again"
        )
    return Record(path=path, header=values[0], initial=steps[0], steps=tuple(steps[1:]), footer=values[-1])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read and verify the lines of the record in folder ``path``: header, steps, footer. Its tensors are not looked at.

    Raises RecordError (MissingFooter, DigestMismatch, WrongSchema) with what to do about it.
    """
    file = path / FILE
    if not file.is_file():
        raise RecordError(f"{path} holds no {FILE}: this is not a record, or its cell ended before it wrote anything")
    lines = file.read_bytes().splitlines(keepends=True)
    values = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            values.append(value if isinstance(value, dict) else {})
        except ValueError:
            if number < len(lines):
                raise DigestMismatch(f"{file}:{number} is not JSON: the file was changed; run the cell again") from None
    if not values or values[0].get("type") != "header":
        raise RecordError(
            f"{file} does not begin with a header line: not a record, or its beginning is lost; run the cell again"
        )
    if (schema := values[0].get("schema")) != SCHEMA:
        writer = values[0].get("environment", {}).get("backend-parity", "unknown")
        raise WrongSchema(
            f"{file} has schema {schema}, this version reads {SCHEMA}; run the cell again, or judge it with the "
            f"version that wrote it (backend-parity {writer})"
        )
    if values[-1].get("type") != "footer":
        seen = [v["step"] for v in values if v.get("type") == "step"]
        raise MissingFooter(
            f"{file} has no footer: the cell stopped after step {max(seen, default='none')}; run it again"
        )
    if record_digest(b"".join(lines[:-1]), values[-1]) != values[-1].get("sha256"):
        raise DigestMismatch(f"{file} does not match its own digest: it was edited; run the cell again")
    return values


def _read_step(folder: Path, values: dict[str, Any]) -> StepRecord:
    file = folder / values["tensors"]["file"]
    try:
        if _sha256(file) != values["tensors"]["sha256"]:
            raise DigestMismatch(f"{file} was changed after the run; run the cell again")
        return StepRecord(step=values["step"], values=values, path=file)
    except FileNotFoundError:
        raise DigestMismatch(f"{file} is missing; copy the whole record folder, or run the cell again") from None
    except SafetensorError as error:
        raise DigestMismatch(f"{file} cannot be read ({error}); run the cell again") from None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
