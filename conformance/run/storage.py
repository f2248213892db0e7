"""Storage: an output folder that fills up, or that somebody removes while cells run, is told as that (claim 9).

Both show as any error at any place: in a writer of records, in a copy, in a library. Neither is a defect of the suite,
and nothing that was run before is lost by it.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from conformance.record.files import Unwritable
from conformance.record.results import SUMMARY

# As every library words them; safetensors raises an error of its own, with these words in it.
_NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))


@contextlib.contextmanager
def lasting(out: Path) -> Iterator[None]:
    """Raises Unwritable for whatever fails because ``out``, which has a summary, is gone or cannot be written to."""
    try:
        yield
    except Exception as error:
        check_output_folder(out)
        if any(words in str(error) for words in _NO_ROOM):
            raise Unwritable(f"nothing can be written: {error}; make room, and run again into a new folder") from error
        raise


def check_output_folder(out: Path) -> None:
    """Raises Unwritable where the summary of the run is gone: something may have been written anew since."""
    if not (out / SUMMARY).is_file():
        raise Unwritable(f"{out} was removed while cells ran, or its {SUMMARY} was; run again into a new folder")
