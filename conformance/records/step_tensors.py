"""Writes and reads the record of one phase of a cell, with its tensors. A record never changes, and reading it needs no
GPU and no backend.

conformance.records.record_format describes the lines. Every step has a safetensors file, in which tensors are named
``KEY/NAME`` by the key of their observable: ``gradient/NAME`` (unclipped), ``weight/NAME`` (after the step),
``logprob/ROW``. The oracle writes its records in the same format.
"""

import contextlib
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from conformance.core.errors import UsageError
from conformance.core.io import Unreadable, file_size, read_json
from conformance.records.record_format import (
    AGAIN,
    CONTROL,
    RECORD_FILE,
    RECORD_SCHEMA,
    DigestMismatch,
    Line,
    Lines,
    RecordError,
    dumps,
    number,
    read_lines,
    record_digest,
)
from conformance.spec.layout import Layout
from conformance.spec.objectives import check_imported
from conformance.spec.observables import Observable, observables_to_json
from conformance.spec.scenario import Scenario, parse_scenario

DTYPES = ("F64", "F32", "BF16", "F16")  # of tensors in a record
LARGE = 2**20  # bytes of a file of inputs whose digest is remembered
SMALL = 8 * 2**20  # bytes of a step's file whose tensors are kept in memory


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The record of one optimizer step, or of the weights as loaded. Tensors are read on demand."""

    step: int
    line: Line
    path: Path

    def value(self, key: str) -> float | None:
        """Returns a scalar or setting by its key; None if it was not observed."""
        value = self.line.get("values", {}).get(key)
        return None if value is None else number(value)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Reads all tensors of the step, to the CPU, in the dtype in which they were observed; not to be changed.

        Those of a small file are read once.
        """
        return dict(self._tensors) if self.path.stat().st_size <= SMALL else _load(self.path)

    @functools.cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return _load(self.path)

    def open(self) -> contextlib.AbstractContextManager[Any]:
        """Opens the step's file with ``safetensors.safe_open``: ``keys()`` lists names, ``get_tensor(name)`` reads."""
        handle: contextlib.AbstractContextManager[Any] = safe_open(self.path, framework="pt")
        return handle

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor of the step by name, without reading tensors."""
        with self.open() as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}

    def names(self) -> list[str]:
        """Returns the names of all tensors of the step, without reading tensors."""
        with self.open() as file:
            return sorted(file.keys())


def _load(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(path)
    return tensors


@dataclass(frozen=True, kw_only=True)
class Record:
    """A complete, verified record. ``loaded``: the weights as loaded. ``steps``: the optimizer steps in order."""

    path: Path
    lines: Lines
    loaded: StepRecord
    steps: tuple[StepRecord, ...]

    @property
    def header(self) -> Line:
        return self.lines.header

    @property
    def footer(self) -> Line:
        return self.lines.footer

    @property
    def observables(self) -> tuple[Observable, ...]:
        return self.lines.observables

    @functools.cached_property
    def scenario(self) -> Scenario:
        """Parses the scenario of the header. Raises UsageError where that would import a module."""
        objective = self.header["scenario"].get("objective")
        check_imported(objective.get("kind") if isinstance(objective, dict) else None)
        return parse_scenario(self.header["scenario"])

    @functools.cached_property
    def control(self) -> str:
        """Returns how the control of the phase's loading ended: ``failed``, ``differs`` or ``same``; "" without one."""
        try:
            return str(read_json(self.path / CONTROL).get("control"))
        except (FileNotFoundError, UsageError, Unreadable):
            return ""

    @functools.cached_property
    def layout(self) -> Layout:
        """Parses the layout of the header."""
        return Layout.parse(self.header["layout"])


class RecordWriter:
    """Writes a record line by line, and flushes every line, so that the lines before a crash stay on disk.

    ``first_step``: the number of the first optimizer step; not 0 for a phase that follows another.
    """

    def __init__(
        self, path: Path, header: Mapping[str, Any], *, observables: Sequence[Observable], first_step: int = 0
    ) -> None:
        path.mkdir(parents=True, exist_ok=False)
        self._path = path
        self._file = (path / RECORD_FILE).open("x", encoding="utf-8")
        self._next = first_step - 1
        self._first = first_step
        declared = observables_to_json(observables)
        self._line(
            {"type": "header", "schema": RECORD_SCHEMA, "first_step": first_step, "observables": declared, **header}
        )

    def loaded(self, tensors: Mapping[str, torch.Tensor], *, generators: Sequence[Mapping[str, str]] = ()) -> None:
        """Writes the line of the weights before the first step, and of the training state of a resume.

        ``generators``: for each rank, digests of its random generators at this moment, by the generator's name.
        """
        self._entry("loaded.safetensors", {"generators": [*generators]} if generators else {}, tensors)

    def step(
        self,
        values: Mapping[str, float],
        tensors: Mapping[str, torch.Tensor],
        *,
        replicas: Mapping[str, Any] | None = None,
        seconds: float,
        generators: Sequence[Mapping[str, str]] = (),
        unread: Sequence[str] = (),
    ) -> None:
        """Writes the line and the tensors of the next optimizer step.

        ``values``: by the key of their observable. ``replicas``: JSON values by key. ``generators``: see ``loaded``.
        ``unread``: the kinds of tensors that were not read.
        """
        line: Line = {"values": dict(values), "replicas": replicas or {}, "seconds": seconds}
        if unread:
            line["unread"] = [*unread]
        if generators:
            line["generators"] = [*generators]
        self._entry(f"step-{self._next:04d}.safetensors", line, tensors)

    def _entry(self, name: str, line: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        # Tensors are written first, so that a line never names a file that is not complete.
        save_file({key: t.detach().cpu().contiguous() for key, t in tensors.items()}, self._path / name)
        file = {"file": name, "sha256": file_sha256(self._path / name)}
        self._line({"type": "step", "step": self._next, **line, "tensors": file})
        self._next += 1

    def finish(self, values: Mapping[str, Any]) -> None:
        """Writes the footer, with ``values`` and the digest of the record. The record is then complete."""
        footer = {"type": "footer", "steps": self._next - self._first, **values}
        self._line({**footer, "sha256": record_digest((self._path / RECORD_FILE).read_bytes(), footer)})
        self._file.close()

    def _line(self, values: Mapping[str, Any]) -> None:
        self._file.write(dumps(values) + "\n")
        self._file.flush()


def read_record(path: Path) -> Record:
    """Reads and verifies the record in folder ``path``, including its tensor files.

    Raises RecordError or one of its subclasses MissingFooter, DigestMismatch and WrongSchema.
    """
    lines = read_lines(path)
    try:
        loaded, *steps = [_read_step(path, line) for line in (lines.loaded, *lines.steps)]
    except RecordError as error:
        error.left = lines
        raise
    return Record(path=path, lines=lines, loaded=loaded, steps=tuple(steps))


def _read_step(folder: Path, line: Line) -> StepRecord:
    if not (named := line.get("tensors")):
        raise DigestMismatch(f"{folder / RECORD_FILE} names no tensors of step {line['step']}: it was changed; {AGAIN}")
    file = folder / named["file"]
    try:
        file_size(file)  # raises for anything but a regular file
        _check_dtypes(file)  # raises for a file that is not safetensors, before the whole file is read
        if file_sha256(file) != named["sha256"]:
            raise DigestMismatch(f"{file} was changed after the run; {AGAIN}")
    except FileNotFoundError:
        raise DigestMismatch(f"{file} is missing; copy the whole record folder, or {AGAIN}") from None
    except Unreadable as error:
        raise DigestMismatch(str(error)) from None
    except (SafetensorError, OSError) as error:
        raise DigestMismatch(f"{file} cannot be read ({error}); {AGAIN}") from None
    return StepRecord(step=line["step"], line=line, path=file)


def _check_dtypes(file: Path) -> None:
    with safe_open(file, framework="pt") as tensors:
        for name in sorted(tensors.keys()):
            if (dtype := tensors.get_slice(name).get_dtype()) not in DTYPES:
                raise DigestMismatch(f"{file} holds {name} in {dtype}, and no backend computes that; {AGAIN}")


def input_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file of inputs. A large one is read once in this process, unless it is changed."""
    state = path.stat()
    if state.st_size < LARGE:
        return file_sha256(path)
    return _large_sha256(
        path.resolve(), state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
    )


@functools.cache
def _large_sha256(path: Path, *_: int) -> str:
    return file_sha256(path)


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 (hexadecimal) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
