"""What torch.distributed.checkpoint raises, as the error that it is.

A rank that fails is told on all ranks, but as a BaseException, which nobody takes for an error, with its traceback as
the message.
"""

import contextlib
from collections.abc import Iterator

from torch.distributed.checkpoint import CheckpointException


@contextlib.contextmanager
def told_alike() -> Iterator[None]:
    """Raise the error of the first rank that failed, on every rank."""
    try:
        yield
    except CheckpointException as error:
        rank = min(error.failures)
        raise error.failures[rank][0] from None
