"""Storage: reports a full disk, or an output folder that was removed during a run, as what it is (claim 9).

Both can cause any error at any place: in a writer of records, in a copy, in a library. Neither is a defect of the
suite, and cells that were run before are not lost.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from conformance.record.files import Unwritable
from conformance.record.results import SUMMARY
from conformance.validation import UsageError

# The system's messages for a full or read-only disk. safetensors raises its own error type, with the same messages.
_NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))


def make_folder(out: Path) -> None:
    """Make the output folder, if it is not there. Raises UsageError if it cannot be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out} cannot be made: {error.strerror}; give another --out") from None


@contextlib.contextmanager
def lasting(out: Path) -> Iterator[None]:
    """Turn an error inside the block into Unwritable if ``out``, which has a summary, was removed or has no room."""
    try:
        yield
    except Exception as error:
        check_output_folder(out)
        if any(words in str(error) for words in _NO_ROOM):
            raise Unwritable(f"nothing can be written: {error}; make room, and run again into a new folder") from error
        raise


def check_output_folder(out: Path) -> None:
    """Raises Unwritable if the run's summary is missing. Other files may exist, written after ``out`` was removed."""
    if not (out / SUMMARY).is_file():
        raise Unwritable(f"{out} was removed while cells ran, or its {SUMMARY} was; run again into a new folder")
