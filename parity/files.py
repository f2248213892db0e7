"""Files of a record: ``record.jsonl`` and one file of summaries per step, written so that a crash leaves all before it.

The lines: a header (what ran, and the parameters in the model's order), the loaded weights, one per optimizer step,
and an end, which a training that was interrupted lacks. A step's ``file`` holds by kind (``weight``, ``gradient``)
float64 arrays with a row per trained parameter: ``sums`` [P, 5], ``rows`` [P, 64] (squares), ``sketch`` [P, 64],
``largest`` [P]. Read and written without torch.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from conformance.record.files import Unreadable, read_file, write_file
from conformance.validation import UsageError

FORMAT, VERSION = "parity.record", 1
FILE = "record.jsonl"
LONGEST = 2**31  # bytes of a file; the lines of a million steps are fewer
Line = dict[str, Any]
Arrays = dict[str, NDArray[np.float64]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A record as it was read. ``complete``: whether the training came to its end while it was recorded."""

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
        """By name: shape, dtype, whether it is trained, and by which group of the optimizers."""
        found: dict[str, Line] = self.header["parameters"]
        return found

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the rows of a step's arrays."""
        return tuple(name for name, parameter in self.parameters.items() if parameter["trained"])

    def arrays(self, line: Line) -> Arrays:
        """The summaries of a step, or of the loaded weights. Raises UsageError where they are damaged."""
        path = self.folder / str(line["file"])
        try:
            found: Arrays = load(read_file(path, limit=LONGEST))
        except (Unreadable, FileNotFoundError, SafetensorError) as error:
            raise UsageError(f"{path} cannot be read ({error}); record the training again") from None
        return found


class Writer:
    """Writes a record into a folder that holds none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def line(self, line: Line) -> None:
        """Append a line; whoever reads in the meantime, or after a crash, sees whole lines."""
        with (self.folder / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def arrays(self, name: str, arrays: Arrays) -> str:
        """Write a file of arrays, whole or not at all; its name."""
        write_file(self.folder / name, save(arrays))
        return name


def why_not(folder: Path) -> str:
    """Why no record can be written to ``folder``, which is made if need be; empty if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"out={folder} cannot be made: {error.strerror}; choose another folder"
    return (
        f"out={folder} holds a record already; remove it or choose another folder" if (folder / FILE).exists() else ""
    )


def read_run(folder: Path) -> Run:
    """Raises UsageError where ``folder`` holds no record of ``parity.record``."""
    path = folder / FILE
    try:
        text = read_file(path, limit=LONGEST).decode("utf-8", errors="replace")
    except (Unreadable, FileNotFoundError) as error:
        raise UsageError(f"{error}; name a folder that parity.record wrote") from None
    lines: list[Line] = []
    for number, line in enumerate(whole := text.split("\n")):
        try:
            lines += [json.loads(line)] if line.strip() else []
        except ValueError:
            if number + 1 < len(whole):  # the last one may have been cut off when the training died
                raise UsageError(f"line {number + 1} of {path} is damaged; record the training again") from None
    header = lines[0] if lines else {}
    if header.get("format") != FORMAT:
        raise UsageError(f"{path} was not written by parity.record; records of parity run are for parity compare")
    if header.get("version") != VERSION:
        raise UsageError(f"{path} is a record of version {header.get('version')}; this parity reads {VERSION}")
    if len(lines) < 2:
        raise UsageError(f"{path} ends before the weights were recorded; record the training again")
    return Run(
        folder=folder,
        header=header,
        loaded=lines[1],
        steps=tuple(line for line in lines[2:] if line["kind"] == "step"),
        complete=lines[-1]["kind"] == "end" and not lines[-1]["error"],
    )
