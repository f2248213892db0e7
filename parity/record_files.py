"""Reads and writes the files of a record: ``record.jsonl``, and one file of summaries per step.

The lines are a header (what ran, and the parameters in the model's order), the loaded weights, one line per optimizer
step, and an end, which an interrupted training lacks. A step's ``file`` holds, for each kind (``weight``,
``gradient``), float64 arrays with a row per trained parameter: ``sums`` [P, 3], ``rows`` [P, 64] (squares) and
``sketch`` [P, 64].

A crash leaves all lines before it intact. Nothing here imports torch. A record may come from anybody, so its lines and
arrays are checked when it is read.
"""

import contextlib
import dataclasses
import errno
import json
import os
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError
from safetensors.numpy import load

from conformance.core.errors import STRICT, UsageError, one_line
from conformance.core.io import Unreadable, Unwritable, file_size, read_file, write_file

Kind = Literal["weight", "gradient"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Parameter:
    """One parameter. shards: the number of its pieces. group: its first optimizer group, by the group's place."""

    shape: list[int]
    dtype: str
    trained: bool
    group: str | None
    shards: int


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Header:
    """The first line. tied: further names of parameters. left_out: rows that ``names=`` leaves without a name."""

    kind: Literal["header"]
    format: str
    version: int
    ranks: int
    python: str
    libraries: dict[str, str]
    parameters: dict[str, Parameter]
    tied: dict[str, str]
    left_out: dict[str, str]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Loaded:
    """The weights before the first step.

    replicas: the distance of replicas that differ, by kind and parameter. tensors: the file of whole tensors.
    """

    kind: Literal["loaded"]
    replicas: dict[Kind, dict[str, float]]
    file: str
    tensors: str = ""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Batch:
    rows: int
    hash: str


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Step:
    """One step of the training loop; without ``file`` and ``replicas`` if no optimizer stepped.

    norm: of the gradients. settings: by group. regrouped: parameters that have moved to another group. unseen: the
    number of optimizer parameters that are not the model's.
    """

    kind: Literal["step"]
    step: int
    stepped: bool
    loss: float | None
    tokens: int | None
    batch: Batch | None
    norm: float
    settings: dict[str, dict[str, float | list[float] | str]]
    regrouped: dict[str, str | None]
    unseen: int
    computed_in: str | None
    replicas: dict[Kind, dict[str, float]] | None = None
    file: str = ""
    tensors: str = ""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class End:
    """The last line. error: the exception that ended the training; empty if it finished."""

    kind: Literal["end"]
    steps: int
    error: str


_LINES: dict[str, TypeAdapter[Any]] = {
    "header": TypeAdapter(Header),
    "loaded": TypeAdapter(Loaded),
    "step": TypeAdapter(Step),
    "end": TypeAdapter(End),
}


def problem(text: str, *, kind: str) -> str:
    """Describe what is wrong with a line of this kind; empty if the line is valid."""
    try:
        line = _LINES[kind].validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    kinds = {"loaded": {"weight"}, "step": {"weight", "gradient"}}
    if kind in kinds and (kind == "loaded" or line.stepped) and set(line.replicas or ()) != kinds[kind]:
        return f"replicas: they are not of {' and '.join(sorted(kinds[kind]))}"
    return ""


FORMAT, VERSION = "parity.record", 2
FILE = "record.jsonl"
LONGEST = 2**31  # bytes of a file; the lines of a million steps are fewer
WIDTHS = {"sums": 3, "rows": 64, "sketch": 64}  # columns of the arrays of each kind
Line = dict[str, Any]
Arrays = dict[str, NDArray[np.float64]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A record that was read. ``complete``: whether the training finished while it was recorded."""

    folder: Path
    header: Line
    loaded: Line
    steps: tuple[Line, ...]
    complete: bool

    @property
    def name(self) -> str:
        return str(self.folder)

    @property
    def parameters(self) -> dict[str, Line]:
        """Shape, dtype, training and first optimizer group of each parameter, by name."""
        found: dict[str, Line] = self.header["parameters"]
        return found

    @property
    def trained(self) -> tuple[str, ...]:
        """The names of the rows of a step's arrays."""
        return tuple(name for name, parameter in self.parameters.items() if parameter["trained"])

    def arrays(self, line: Line) -> Arrays:
        """Read the summaries of a step, or of the loaded weights. Raises UsageError if they are damaged."""
        path, is_step = self._path_of(line["file"]), line is not self.loaded
        try:
            found: Arrays = load(read_file(path, limit=LONGEST))
        except (Unreadable, FileNotFoundError, SafetensorError, KeyError) as error:
            raise UsageError(f"{path} cannot be read ({one_line(error)}); record the training again") from None
        rows = len(self.trained if is_step else self.parameters)
        for kind in ("weight", "gradient") if is_step else ("weight",):
            for name, width in WIDTHS.items():
                array = found.get(f"{kind}.{name}")
                if array is None or array.shape != (rows, width) or array.dtype != np.float64:
                    raise UsageError(
                        f"{path} has no {kind}.{name} of float64 [{rows}, {width}]; record the training again"
                    )
        return found

    def tensors(self, line: Line) -> Path | None:
        """The file with the whole tensors of a step, or of the loaded weights, if these were kept."""
        if "tensors" not in line:
            return None
        path = self._path_of(line["tensors"])
        try:
            file_size(path)
        except (Unreadable, FileNotFoundError) as error:
            raise UsageError(f"{path} cannot be read ({error}); record the training again") from None
        return path

    def _path_of(self, name: object) -> Path:
        """The path of a file of the record. Raises UsageError for one that lies elsewhere."""
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            raise UsageError(f"{self.folder / FILE} names the file {name!r}, which is not one of its folder; refused")
        return self.folder / name


class Writer:
    """Writes a record into a folder that holds none. All of its methods raise UsageError where the disk refuses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lines: FileIO | None = None

    def begin(self, header: Line) -> None:
        """Make the file of lines, which must not be there, and write the first."""
        try:
            self._lines = (self.folder / FILE).open(
                "xb", buffering=0
            )  # neither appends to another record nor follows a link
        except FileExistsError:
            raise UsageError(_taken(self.folder)) from None
        except OSError as error:
            raise UsageError(_unwritable(self.folder / FILE, error)) from None
        self.line(header)

    def line(self, line: Line) -> None:
        """Append a line, whole or not at all; whoever reads in the meantime, or after a crash, sees whole lines."""
        assert self._lines is not None
        content, start = json.dumps(line).encode() + b"\n", self._lines.tell()
        try:
            if self._lines.write(content) < len(content):  # where the disk is full in the middle
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with contextlib.suppress(OSError):  # lines that come after it would make the record unreadable
                self._lines.truncate(start)
                self._lines.seek(start)
            raise UsageError(_unwritable(self.folder / FILE, error)) from None

    def end(self, line: Line) -> None:
        """Append the last line."""
        assert self._lines is not None
        with self._lines:
            self.line(line)

    def file(self, name: str, content: bytes) -> str:
        """Write a file next to the lines, whole or not at all; its name."""
        try:
            write_file(self.folder / name, content)
        except Unwritable as error:
            raise UsageError(f"{error}; record into another folder") from None
        return name


def why_not(folder: Path) -> str:
    """Create ``folder``, and tell why no record can be written to it; empty if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"out={folder} cannot be made: {error.strerror}; choose another folder"
    return _taken(folder) if (folder / FILE).exists() else ""


def _taken(folder: Path) -> str:
    return f"out={folder} holds a record already; remove it or choose another folder"


def _unwritable(path: Path, error: OSError) -> str:
    return f"{path} cannot be written: {error.strerror}; record into another folder"


def read_run(folder: Path) -> Run:
    """Read and check a record. Raises UsageError if ``folder`` holds none, or a damaged one."""
    path = folder / FILE
    try:
        text = read_file(path, limit=LONGEST).decode("utf-8", errors="replace")
    except (Unreadable, FileNotFoundError) as error:
        raise UsageError(f"{error}; name a folder that parity.record wrote") from None
    texts = text.split("\n")
    lines: list[Line] = []
    for number, line in enumerate(texts):
        try:
            lines += [_object(line)] if line or number + 1 < len(texts) else []
        except (ValueError, RecursionError):
            if number + 1 < len(texts):  # the last one may have been cut off when the training died
                raise UsageError(f"line {number + 1} of {path} is damaged; record the training again") from None
    header = lines[0] if lines else {}
    if header.get("format") != FORMAT:
        raise UsageError(f"{path} was not written by parity.record; records of parity run are for parity compare")
    if header.get("version") != VERSION:
        raise UsageError(f"{path} is a record of version {header.get('version')}; this parity reads {VERSION}")
    if len(lines) < 2:
        raise UsageError(f"{path} ends before the weights were recorded; record the training again")
    ended = lines[-1].get("kind") == "end"
    kinds = ["header", "loaded", *(["step"] * (len(lines) - 2 - ended)), *(["end"] if ended else [])]
    for number, kind in enumerate(kinds):
        if message := problem(texts[number], kind=kind):
            raise UsageError(f"line {number + 1} of {path} is damaged ({message}); record the training again")
    return Run(
        folder=folder,
        header=header,
        loaded=lines[1],
        steps=tuple(lines[2 : len(lines) - ended]),
        complete=ended and not lines[-1]["error"],
    )


def _object(text: str) -> Line:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"a line is {type(found).__name__} and no object")
    return found
