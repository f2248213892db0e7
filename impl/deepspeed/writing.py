"""Writing a checkpoint with DeepSpeed where a disk may be full on one rank, at once or behind the training.

DeepSpeed ends a save with barriers, at which all ranks would wait for the one whose file could not be written. Its
engines that write beside the training need libaio or the package datastates, and one of them waits for the files in the
next step. So behind the training, the engine that is always there writes into memory, and a thread writes to the disk.
"""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from impl.checkpoints.writing import Writing
from impl.together import agree


@contextlib.contextmanager
def files_written(engine: Any, when: Writing) -> Iterator[None]:
    """What cannot be written is told after the ``with`` statement, or with the work of ``when``, on all ranks;
    collective."""
    failed: list[Exception] = []
    copies: list[tuple[Path, io.BytesIO]] = []
    library, write = engine.checkpoint_engine, engine.checkpoint_engine.save

    def save(state_dict: Any, path: str) -> None:
        try:
            if when.copies:
                write(state_dict, copy := io.BytesIO())
                copies.append((Path(path), copy))
            else:
                write(state_dict, path)
        except Exception as error:
            failed.append(error)

    library.save = save
    try:
        yield
    finally:
        del library.save
    agree("DeepSpeed writes a checkpoint", next(iter(failed), None))
    when.add(lambda: _write(copies))


def _write(copies: list[tuple[Path, io.BytesIO]]) -> None:
    for path, copy in copies:
        path.write_bytes(copy.getbuffer())
