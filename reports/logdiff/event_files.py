"""Reads TensorBoard's event files.

They are read by the ``tensorboard`` package, record by record: its EventAccumulator ends silently at a damaged record,
and drops the rows that a resumed run has logged again.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from conformance.core.errors import UsageError
from reports.logdiff.rows import Log, Row

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
