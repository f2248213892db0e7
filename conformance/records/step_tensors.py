"""Writes and reads the record of one phase of a cell, with its tensors. A record never changes, and reading it needs no
GPU and no backend.

conformance.records.record_format describes the lines. Every step has a safetensors file, in which tensors are named
``KEY/NAME`` by the key of their observable: ``gradient/NAME`` (unclipped), ``weight/NAME`` (after the step),
``logprob/ROW``. The oracle writes its records in the same format.
"""

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from conformance.core.errors import shown
from conformance.core.io import Unreadable, file_size
from conformance.records.record_format import (
    AGAIN,
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
from conformance.spec.known_defects import Defect, defects_to_json
from conformance.spec.layout import Layout
from conformance.spec.objectives import check_imported
from conformance.spec.observables import Observable, observables_to_json
from conformance.spec.precision import PRECISIONS, PrecisionName
from conformance.spec.scenario import Scenario, parse_scenario

DTYPES = ("F64", "F32", "BF16", "F16")  # of tensors in a record


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
        """Reads all tensors of the step, to the CPU, in the dtype in which they were observed."""
        tensors: dict[str, torch.Tensor] = load_file(self.path)
        return tensors

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

    @cached_property
    def scenario(self) -> Scenario:
        """Parses the scenario of the header. Raises UsageError where that would import a module."""
        objective = self.header["scenario"].get("objective")
        check_imported(objective.get("kind") if isinstance(objective, dict) else None)
        return parse_scenario(self.header["scenario"])

    @cached_property
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
        self._file = (path / RECORD_FILE).open("w", encoding="utf-8")
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
    ) -> None:
        """Writes the line and the tensors of the next optimizer step.

        ``values``: by the key of their observable. ``replicas``: JSON values by key. ``generators``: see ``loaded``.
        """
        line: Line = {"values": dict(values), "replicas": replicas or {}, "seconds": seconds}
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


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 (hexadecimal) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


ORACLE = "oracle"  # the name of both the cell and the backend in the headers of the oracle's records
FLOAT64 = "float64"  # the precision of the oracle run that cells are compared with
CHOICES = "choices.safetensors"  # in the folder of that run: the frozen batches with the choices of its routers


def noise_runs(precision: str) -> tuple[str, ...]:
    """Names the oracle runs whose distance to float64 bounds a cell of this precision; none in the exact tier.

    The first run uses torch's fused attention kernel. The second run uses the plain formula, except in passes before
    the first update of a rollout; it is only made if a cell differs by the first run. A backend uses one of the two.
    """
    has_noise = {name for name, tier in PRECISIONS.items() if not tier.is_exact}
    return (precision, f"{precision}-plain") if precision in has_noise else ()


def precision_of_run(run: str) -> PrecisionName:
    """Returns the precision in which the oracle computes this run."""
    return next(name for name in PRECISIONS if run in (noise_runs(name) or (FLOAT64,)))


def check_cell(folder: Path, header: Line, *, cell: str) -> None:
    """Raises RecordError if the record in ``folder`` does not belong to ``cell``."""
    if (found := header.get("cell")) != cell:
        raise RecordError(
            f"{folder} is a record of {found or 'an unnamed cell'} and not of {cell}: folders were mixed up; "
            f"put the cell's own record there, or run the cell again"
        )


def check_oracle(folder: Path, header: Line, *, precision: str, defects: tuple[Defect, ...] = ()) -> None:
    """Raises RecordError if the record in ``folder`` is not the oracle's with this precision and these defects."""
    backend = header.get("backend", {})
    found = header.get("cell"), backend.get("name"), backend.get("precision")
    if found != (ORACLE, ORACLE, precision):
        what = f"one of {found[0]} in {found[2]}" if found[0] == ORACLE else f"a record of {found[0] or 'nothing'}"
        raise RecordError(
            f"{folder} should be the oracle's record in {precision}, and is {what}: folders were mixed up; run the "
            f"cell again"
        )
    if backend.get("defects") != (requested := defects_to_json(defects)):
        observed = _describe(backend["defects"]) if "defects" in backend else "an unknown list of defects"
        raise RecordError(
            f"{folder} should be the oracle's record with {_describe(requested)}, and is one with {observed}: "
            f"folders were mixed up; run the cell again"
        )


def _describe(defects: Any) -> str:
    return shown(defects) if defects else "no defect"


def second_class(header: Line) -> object:
    """Returns whose implementation computed an oracle's record with this header; empty for the suite's own oracle."""
    resolved = header.get("resolved")
    return resolved.get("second_class", "") if isinstance(resolved, dict) else ""
