"""Reads training logs: CSV, JSON, TensorBoard's event files, and consoles. The content tells the format.

CSV has a header with a counter of steps. wandb exports a panel in this format: it names a column ``RUN - METRIC`` and
adds ``__MIN`` and ``__MAX`` of the interval that a point stands for, which are not metrics here (docs.wandb.ai, "Export
data from a panel"). A panel of several runs is read one run at a time: ``panel.csv#RUN``.

JSON is lines of objects (this project's log, wandb's history, verl's file logger), or Hugging Face's
trainer_state.json. An object with a counter of steps is a row. The first object without one is the header, which holds
the options of the run. Nested objects are flattened with ``/``; verl's ``{"step": 1, "data": {...}}``
(verl/utils/tracking.py, FileLogger) is flattened without it. ``trainer_state.json`` holds its rows under
``log_history`` (transformers/trainer_callback.py, TrainerState), and the Trainer logs the mean loss since the last line
(transformers/trainer.py, ``_maybe_log_save_evaluate``).

Event files are read by the ``tensorboard`` package, record by record: its EventAccumulator ends silently at a damaged
record, and drops the rows that a resumed run has logged again.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.core.errors import UsageError, shown
from conformance.core.io import Unreadable, read_file
from reports.logdiff.console import CONSOLES, lines_of
from reports.logdiff.run import STEP, Log, Row

BETWEEN = " - "


def read_table(text: str, *, name: str, chosen: str | None) -> Log | None:
    """The log in ``text``, or None if its first line is no header with a counter of steps. ``chosen``: a wandb run."""
    text = text.lstrip("\ufeff\r\n ")
    first = text.splitlines()[0] if text else ""
    delimiter = max(",;\t", key=first.count)
    header = [column.strip() for column in next(csv.reader([first], delimiter=delimiter), [])]
    lower = [column.lower() for column in header]
    counter = next((lower.index(column) for column in STEP if column in lower), None)
    if counter is None or len(header) < 2:
        return None
    table = [line for line in csv.reader(io.StringIO(text, newline=None), delimiter=delimiter) if line]
    names = {place: column for place, column in enumerate(header) if place != counter}
    exported = any(BETWEEN in column for column in names.values())
    if exported:
        names = _of_one_run(names, name=name, chosen=chosen)
    rows, broken = [], 0
    for line in table[1:]:
        step = _number(line[counter]) if counter < len(line) else None
        if step is None or not step.is_integer():
            broken += 1
            continue
        cells = {column: _number(line[place]) for place, column in names.items() if place < len(line)}
        values = {column: value for column, value in cells.items() if value is not None}
        rows.append(Row(int(step), values, frozenset(cells.keys() - values.keys())))
    notes = (f"{broken} lines have no whole number as their step; they were left out",) if broken else ()
    return Log(format="wandb CSV" if exported else "CSV", rows=rows, notes=notes)


def _of_one_run(names: dict[int, str], *, name: str, chosen: str | None) -> dict[int, str]:
    """The columns of the run that was asked for, or of the only one, without its name."""
    parts = {place: column.rpartition(BETWEEN) for place, column in names.items() if BETWEEN in column}
    runs = list(dict.fromkeys(run for run, _, _ in parts.values()))
    if chosen is None and len(runs) > 1:
        raise UsageError(f"{name} holds {len(runs)} runs; name one: " + " or ".join(f"{name}#{run}" for run in runs))
    if chosen is not None and chosen not in runs:
        raise UsageError(f"{name} holds no run {chosen!r}; it has {', '.join(runs)}")
    return {place: metric for place, (run, _, metric) in parts.items() if run == (chosen or runs[0])}


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


TRANSPARENT = "data"
LARGEST = 2**63  # of whole numbers; an identifier may be larger
NOT_FINITE = ("nan", "inf", "-inf", "infinity", "-infinity")  # as texts, since JSON has no such numbers
OURS = {"kl": "ppo_kl"}  # the divergence from the roll-out's policy, where others mean that from the reference


def read_json(text: str) -> Log | None:
    """The log in ``text``, or None if this is no JSON with a counter of steps."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return _read_lines(text)
    history = whole.get("log_history") if isinstance(whole, dict) else None
    if isinstance(history, list):
        logged = [
            one for one in history if isinstance(one, dict) and "train_runtime" not in one
        ]  # that sums the run up
        rows = [row for one in logged for row in _rows(one)]
        return Log(format="Hugging Face trainer_state.json", rows=rows, averaged=frozenset({"loss"}))
    objects = whole if isinstance(whole, list) else [whole]
    return _log(objects, broken=0)


def _read_lines(text: str) -> Log | None:
    objects: list[Any] = []
    broken = 0
    for line in text.splitlines():
        if line.strip():
            try:
                objects.append(json.loads(line))
            except (ValueError, RecursionError):
                broken += 1
    return _log(objects, broken=broken)


def _log(objects: list[Any], *, broken: int) -> Log | None:
    objects = [one for one in objects if isinstance(one, dict)]
    rows = [row for one in objects for row in _rows(one)]
    if not rows:
        return None
    notes = (f"{broken} lines are no JSON, perhaps cut off; they were left out",) if broken else ()
    header = objects[0] if not list(_rows(objects[0])) else {}
    if "run" in header:
        rows = [
            Row(
                row.step,
                {OURS.get(name, name): value for name, value in row.values.items()},
                frozenset(OURS.get(name, name) for name in row.blank),
            )
            for row in rows
        ]
    wandb = any("_step" in one and "_timestamp" in one for one in objects)
    return Log(format="wandb history" if wandb else "JSON lines", rows=rows, facts=header, notes=notes)


def _rows(one: Mapping[str, Any]) -> Iterator[Row]:
    """The row that an object is; none without a whole number as its step."""
    named = dict(_flat(one))
    values = {name: value for name, value in named.items() if value is not None}
    lower = {name.lower(): name for name in values}
    counter = next((lower[name] for name in STEP if name in lower), None)
    if counter is not None and values[counter].is_integer():
        step = int(values[counter])
        blank = frozenset(name for name, value in named.items() if value is None)
        yield Row(step, {name: value for name, value in values.items() if name.lower() not in STEP}, blank)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float | None]]:
    """Names with their numbers, or None for null."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, prefix if name == TRANSPARENT else f"{prefix}{name}/")
        elif value is None:
            yield f"{prefix}{name}", None
        elif isinstance(value, bool) or (isinstance(value, int) and abs(value) > LARGEST):
            continue
        elif isinstance(value, int | float) or (isinstance(value, str) and value.lower() in NOT_FINITE):
            yield f"{prefix}{name}", float(value)


EVENT_FILES = "*tfevents*"


def is_event_file(start: bytes) -> bool:
    """Tell by the version record, with which every writer of event files begins."""
    return b"brain.Event:" in start[:64]


def read_events(files: Sequence[Path]) -> Log:
    """Read the scalars of one run's event files, in the given order.

    Raises UsageError for a damaged file, and if tensorboard is not installed.
    """
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        raise UsageError(
            "TensorBoard's event files are read by the package tensorboard: pip install 'backend-parity[tensorboard]'"
        ) from None
    rows: list[Row] = []
    notes = []
    for file in files:
        try:
            rows.extend(_event_rows(file))
        except _CutOff:
            notes.append(f"{file.name} ends within a record (the run goes on, or was killed)")
    return Log(format="TensorBoard", rows=rows, notes=tuple(notes))


class _CutOff(Exception):
    """Raised where an event file ends within a record."""


def _event_rows(file: Path) -> Iterator[Row]:
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub import errors
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    reader, position = PyRecordReader_New(str(file)), 0
    while True:
        try:
            reader.GetNext()
            record = reader.record()
            event = Event.FromString(record)
        except errors.OutOfRangeError:
            return
        except errors.DataLossError as error:
            if "truncated" in str(error):
                raise _CutOff from None
            raise UsageError(f"{file.name} is damaged at byte {position}: a record has another checksum") from None
        except DecodeError:
            raise UsageError(f"{file.name} has a record that is not an event of TensorBoard") from None
        scalars = ((value.tag, _scalar(value)) for value in event.summary.value)
        if values := {tag: scalar for tag, scalar in scalars if scalar is not None}:
            yield Row(event.step, values)
        position += len(record) + 16  # the length of a record, its checksum, and the checksum of the data


def _scalar(value: Any) -> float | None:
    """Return the number of a summary's value, which TensorFlow 2 writes as a tensor; None for any other value."""
    from tensorboard.compat.proto import types_pb2
    from tensorboard.util.tensor_util import make_ndarray

    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor") or value.tensor.dtype not in (types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE):
        return None
    try:
        array = make_ndarray(value.tensor)
    except ValueError:
        return None
    return float(array.item()) if array.size == 1 else None


LONGEST = 2**30  # bytes of a log
LOOKED_FOR = (
    "JSON lines with a `step`, trainer_state.json, CSV with a header that has a `step`, TensorBoard event files, and"
    " the consoles of verl, torchtitan, Megatron, OpenRLHF and Hugging Face's Trainer"
)


def read_log(name: str) -> Log:
    """The log that the argument ``name`` names: a file, a folder of event files, or ``panel.csv#RUN``.

    Raises UsageError, with what was looked for and the first line, if no reader knows it.
    """
    path, chosen = Path(name), None
    if not path.exists() and "#" in name:
        before, _, chosen = name.rpartition("#")
        path = Path(before)
    if path.is_dir():
        files = _event_files(path)
        for file in files:
            _read(file)  # refuses links and files that are too large
        return read_events(files)
    data = _read(path)
    if is_event_file(data):
        return read_events([path])
    text = data.decode(errors="replace")
    found = read_json(text) or read_table(text, name=str(path), chosen=chosen)
    if found is None:
        lines = lines_of(text)
        found = max((read(lines) for read in CONSOLES), key=lambda log: len(log.rows))
    if chosen is not None and found.format != "wandb CSV":
        raise UsageError(f"{path} is no panel of wandb with several runs; name it without #{chosen}")
    if not found.rows:
        first = next((line for line in text.splitlines() if line.strip()), "")
        raise UsageError(
            f"{path} is no training log that can be read; looked for: {LOOKED_FOR}. It begins {shown(first)}"
        )
    return found


def _read(path: Path) -> bytes:
    try:
        return read_file(path, limit=LONGEST)
    except FileNotFoundError:
        raise UsageError(f"there is no log {path}") from None
    except Unreadable as error:
        raise UsageError(str(error)) from None


def _event_files(folder: Path) -> list[Path]:
    """In the order of their names, which hold the time of their making."""
    files = sorted(folder.glob(EVENT_FILES))
    if files:
        return files
    below = sorted({file.parent for file in folder.rglob(EVENT_FILES)})
    if below:
        raise UsageError(f"{folder} holds several runs of TensorBoard; name one: " + " or ".join(map(str, below)))
    raise UsageError(f"{folder} holds neither TensorBoard's event files nor a record (record.jsonl); name a log")
