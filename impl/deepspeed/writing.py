"""Writing a checkpoint with DeepSpeed where a disk may be full on one rank.

DeepSpeed ends a save with barriers, at which all ranks would wait for the one whose file could not be written.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from impl.together import agree


@contextlib.contextmanager
def errors_at_the_end(engine: Any) -> Iterator[None]:
    """What cannot be written is told after the ``with`` statement, on all ranks; collective."""
    failed: list[Exception] = []
    library, write = engine.checkpoint_engine, engine.checkpoint_engine.save

    def save(*arguments: Any, **named: Any) -> None:
        try:
            write(*arguments, **named)
        except Exception as error:
            failed.append(error)

    library.save = save
    try:
        yield
    finally:
        del library.save
    agree("DeepSpeed writes a checkpoint", next(iter(failed), None))
