"""Reads training logs: files and folders of one run or several, TensorBoard's event files, and wandb's runs.

The content of a file tells its format: structured.py reads CSV and JSON, lines.py consoles. Of several runs
in one file one is read at a time: ``panel.csv#RUN``. Where a log begins again at its first step, it holds several runs:
``log.jsonl#1``, ``log.jsonl#2``. Several files of one run are joined by ``+``: ``loss.csv+grad_norm.csv``.

TensorBoard's event files are read by the ``tensorboard`` package, record by record: its EventAccumulator ends silently
at a damaged record, and drops the rows that a resumed run has logged again.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance.core.errors import UsageError, shown
from conformance.core.io import Unreadable, read_file
from reports.logdiff.lines import FORMATS, format_of, lines_of, read_lines
from reports.logdiff.rows import COUNTED, Log, Row
from reports.logdiff.structured import METRIC_FILE, cells_of, log_of, read_json, read_table, split_columns

WANDB = "wandb:"


def read_wandb(path: str) -> Log:
    """The history of a run of wandb, by its package. ``path``: entity/project/run."""
    try:
        import wandb
    except ImportError:
        way_out = "pip install wandb, or export its panels as CSV and give these files"
        raise UsageError(f"{WANDB}{path} is read by the package wandb: {way_out}") from None
    try:
        history = list(wandb.Api().run(path).scan_history())
    except Exception as error:  # of the network, of rights, or of a run that is not there: wandb has many classes
        raise UsageError(
            f"{WANDB}{path} cannot be read: {shown(str(error))}; the form is {WANDB}entity/project/run"
        ) from None
    if not (found := log_of(history)):
        raise UsageError(f"{WANDB}{path} has no history")
    return replace(found, format="wandb history")


LONGEST, LONGEST_HEADER = 2**30, 2**16  # bytes of a log, and of a table's first line


def read_log(name: str, *, whole: bool = False) -> Log:
    """The log that the argument ``name`` names: a file, a folder of event files, ``panel.csv#RUN``, or a run of wandb.

    ``log.jsonl@30``, or ``log.jsonl#2@30``, is a resumed run whose counter began again after step 30. ``log.jsonl@0``
    says that the lines of a log without steps are steps.
    ``whole``: also of a log that begins again, which is refused otherwise if ``name`` names none of its runs.

    Raises UsageError, with what was looked for and the first line, if no reader knows it.
    """
    if name.startswith(WANDB):
        return read_wandb(name.removeprefix(WANDB))
    path, chosen = Path(name), None
    log, _, later = name.rpartition("@")
    if (
        later.isdecimal()
        and not path.exists()
        and any(Path(one).exists() for one in (log, log.rpartition("#")[0]) if one)
    ):
        return _continued(read_log(log, whole=whole), int(later))
    before, mark, run = name.rpartition("#")
    if not path.exists() and "+" in name and not (mark and Path(before).exists()):
        return _joined([read_log(part) for part in name.split("+")])
    if not path.exists() and mark:
        path, chosen = Path(before), run
    if path.is_dir() and (metrics := path / "metrics").is_dir():
        return _read_mlflow(metrics)
    if path.is_dir():
        files = _event_files(path)
        for file in files:
            _read(file)  # refuses links and files that are too large
        return read_events(files)
    data = _read(path)
    if is_event_file(data):
        return read_events([path])
    if data.startswith(b"\x1f\x8b"):
        raise UsageError(f"{path} is packed by gzip; unpack it first: gunzip {path}")
    wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))  # as PowerShell writes what it redirects
    text = data.decode("utf-16" if wide else "utf-8", errors="replace")
    return read_text(text, name=str(path), chosen=chosen, whole=whole)


def _continued(log: Log, steps: int) -> Log:
    """The log of a run that was resumed after so many ``steps``, from which its counter began again."""
    rows = [replace(row, step=row.step + steps) for row in log.rows if row.step is not None]
    return replace(log, rows=rows, notes=tuple(note for note in log.notes if note != COUNTED))


def _joined(logs: Sequence[Log]) -> Log:
    """The log of a run that several files hold, such as one for each metric."""
    return Log(
        format=" and ".join(dict.fromkeys(log.format for log in logs)),
        rows=sorted((row for log in logs for row in log.rows), key=lambda row: row.step or 0),
        averaged=frozenset().union(*(log.averaged for log in logs)),
        facts={name: value for log in logs for name, value in log.facts.items()},
        notes=tuple(dict.fromkeys(note for log in logs for note in log.notes)),
    )


def _read_mlflow(metrics: Path) -> Log:
    """The log in a run's folder of MLflow: a file for each metric, whose path is its name."""
    rows: list[Row] = []
    for file in sorted(one for one in metrics.rglob("*") if one.is_file()):
        text = _read(file).decode(errors="replace")
        is_metric_file = METRIC_FILE.match(text.partition("\n")[0].strip())
        log = read_table(text, name=str(file), chosen=None) if is_metric_file else None
        if log is None:
            raise UsageError(f"{file} is no metric of MLflow: its lines are not a time, a value and a step")
        own = file.relative_to(metrics).as_posix()
        rows += [replace(row, values={own: value}) for row in log.rows for value in row.values.values()]
    if not rows:
        raise UsageError(f"{metrics} holds no metric")
    return Log(format="MLflow run", rows=sorted(rows, key=lambda row: row.step or 0))


def read_text(text: str, *, name: str, chosen: str | None = None, whole: bool = False) -> Log:
    """The log that a text holds. Raises UsageError if it holds none."""
    if not text.strip("\ufeff\r\n\t "):
        raise UsageError(f'{name} is empty; a log has lines such as {{"step": 1, "loss": 2.5}}')
    found = read_json(text, name=name) or read_table(text, name=name, chosen=chosen)
    if found is None:
        lines = list(lines_of(text))
        rows, notes = read_lines(lines, name=name)
        form = format_of(line.text for line in lines)
        found = Log(format=form.name, rows=rows, averaged=frozenset({"loss"} if form.averaged else ()), notes=notes)
    if found.format not in PANELS and not whole:
        found = _chosen(found, name=name, chosen=chosen)
    if not found.rows:
        first = next((line for line in text.split("\n") if line.strip()), "")
        looked_for = ", ".join(dict.fromkeys(one.name for one in FORMATS))
        raise UsageError(
            f"{name} is no training log that can be read; looked for: {looked_for}, TensorBoard's event files, and"
            f" lines with a step and numbers. It begins {shown(first)}. Another log is read as JSON lines, such as"
            ' {"step": 1, "loss": 2.5}'
        )
    return found


PANELS = ("wandb CSV", "SwanLab CSV")


def _chosen(log: Log, *, name: str, chosen: str | None) -> Log:
    """The run that was asked for, of a log that begins again; refuses such a log if none was, for it may be either."""
    parts = _runs(log.rows)
    if chosen is None and len(parts) > 1:
        names = " or ".join(f"{name}#{number}" for number in range(1, len(parts) + 1))
        raise UsageError(
            f"{name} begins again at its first step {parts[1][0].step}: it holds {len(parts)} runs; name one: {names}."
            f" A resumed run whose counter began again after step {parts[0][-1].step} is"
            f" {name}#2@{parts[0][-1].step}"
        )
    if chosen is None:
        return log
    if len(parts) < 2 or chosen not in map(str, range(1, len(parts) + 1)):
        raise UsageError(f"{name} holds {len(parts)} run{'s' * (len(parts) > 1)} and none called {chosen!r}")
    return replace(log, rows=parts[int(chosen) - 1])


def _runs(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each run, where one process begins again at the first step that it had."""
    found: list[list[Row]] = []
    single = len({row.process for row in rows}) == 1
    for row in rows:
        assert row.step is not None
        if not found or (single and row.step == found[0][0].step and (found[-1][-1].step or 0) > row.step):
            found.append([])
        found[-1].append(row)
    return found


def runs_in(name: str) -> list[str]:
    """The runs of a panel, or the numbers of those that a log holds which begins again; none of any other log."""
    if runs := runs_of_panel(name):
        return runs
    parts = _runs(read_log(name, whole=True).rows) if Path(name).is_file() else []
    return [str(number) for number in range(1, len(parts) + 1)] if len(parts) > 1 else []


def runs_of_panel(name: str) -> list[str]:
    """The runs whose columns a table of several runs has; none of any other log."""
    path = Path(name)
    start = _read(path)[:LONGEST_HEADER].decode(errors="replace") if path.is_file() else ""
    first = re.split(r"[\r\n]", start.lstrip("\ufeff"), maxsplit=1)[0]
    columns = cells_of([first], max(",;\t", key=first.count), name=name)[0]
    return list(dict.fromkeys(run for run, _ in split_columns(columns).values()))


def _read(path: Path) -> bytes:
    try:
        return read_file(path.resolve() if path.is_file() else path, limit=LONGEST)  # the user may name a link
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
