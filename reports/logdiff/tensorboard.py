"""TensorBoard's event files: records of TensorFlow with an ``Event`` of protocol buffers in each.

Read here because the library for it (the ``tensorboard`` package) brings a web server and protobuf along, and scalars
need two of its messages. A record is a length, its checksum, the data and its checksum; both are CRC-32C, rotated and
offset (tensorflow/core/lib/io/record_writer.cc; the mask in tensorflow/core/lib/hash/crc32c.h). Messages:
tensorflow/core/util/event.proto, framework/summary.proto and tensor.proto. A scalar is a ``simple_value``, or, as
TensorFlow 2 writes it, a tensor with one number.
"""

import struct
from collections.abc import Iterator, Mapping

from conformance.core.errors import UsageError
from reports.logdiff.run import Log, Row

PATTERN = "*tfevents*"
LARGEST = 2**16  # bytes of a record with a scalar in it; those of images and histograms are larger
MASK = 0xA282EAD8
STEP, SUMMARY, VALUE, TAG, SIMPLE, TENSOR = 2, 5, 1, 1, 2, 8
DTYPE, CONTENT, FLOATS, DOUBLES = 1, 4, 5, 6
CODES = {1: "<f", 2: "<d"}  # of a tensor's dtype: float, double
Field = tuple[int, int | bytes]


def is_event_file(start: bytes) -> bool:
    """Whether a file that begins with these bytes (12 or more) is one: its first length has the right checksum."""
    return len(start) >= 12 and struct.unpack("<I", start[8:12])[0] == masked(start[:8])


def read_events(files: Mapping[str, bytes]) -> Log:
    """The scalars of a run's event files, in their order; ``files`` are their contents by name.

    Raises UsageError, with the name, for one that is damaged.
    """
    rows: list[Row] = []
    notes = []
    for file, data in files.items():
        whole = 0
        for record, end in _records(data, file):
            whole = end
            if len(record) <= LARGEST:
                rows.extend(_rows(record, file))
        if whole < len(data):
            notes.append(f"{file} ends within a record (the run goes on, or was killed)")
    return Log(format="TensorBoard", rows=rows, notes=tuple(notes))


def _records(data: bytes, file: str) -> Iterator[tuple[bytes, int]]:
    """Each whole record and where it ends."""
    at = 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        if struct.unpack_from("<I", data, at + 8)[0] != masked(data[at : at + 8]):
            raise UsageError(f"{file} is damaged at byte {at}: a record's length has another checksum")
        end = at + 12 + length + 4
        if end > len(data):
            return
        record = data[at + 12 : end - 4]
        if length <= LARGEST and struct.unpack_from("<I", data, end - 4)[0] != masked(record):
            raise UsageError(f"{file} is damaged at byte {at}: a record has another checksum")
        yield record, end
        at = end


def _rows(event: bytes, file: str) -> Iterator[Row]:
    try:
        fields = list(_fields(event))
        values = dict(_scalars(fields))
    except (IndexError, KeyError, struct.error):
        raise UsageError(f"{file} has a record that is no event of TensorBoard") from None
    step = next((value for number, value in fields if number == STEP and isinstance(value, int)), 0)
    if values:
        yield Row(step, values)


def _scalars(event: list[Field]) -> Iterator[tuple[str, float]]:
    for summary in (value for number, value in event if number == SUMMARY and isinstance(value, bytes)):
        for one in (value for number, value in _fields(summary) if number == VALUE and isinstance(value, bytes)):
            parts = dict(_fields(one))
            tag, simple, tensor = parts.get(TAG), parts.get(SIMPLE), parts.get(TENSOR)
            if isinstance(tag, bytes) and isinstance(simple, bytes):
                yield tag.decode(errors="replace"), struct.unpack("<f", simple)[0]
            elif isinstance(tag, bytes) and isinstance(tensor, bytes):
                number = _number(dict(_fields(tensor)))
                if number is not None:
                    yield tag.decode(errors="replace"), number


def _number(tensor: dict[int, int | bytes]) -> float | None:
    """The only number of a tensor of floats or doubles; None for any other tensor."""
    dtype = tensor.get(DTYPE, 0)
    if not isinstance(dtype, int) or dtype not in CODES:
        return None
    code = CODES[dtype]
    content = tensor.get(CONTENT) or tensor.get(FLOATS if code == "<f" else DOUBLES)
    return (
        struct.unpack(code, content)[0]
        if isinstance(content, bytes) and len(content) == struct.calcsize(code)
        else None
    )


def _fields(message: bytes) -> Iterator[Field]:
    """The fields of a message of protocol buffers by number; numbers of fixed size as their bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        size, at = _varint(message, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def masked(data: bytes) -> int:
    """The checksum of a record: CRC-32C (Castagnoli, RFC 3720), rotated right by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + MASK) & 0xFFFFFFFF


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _table()
