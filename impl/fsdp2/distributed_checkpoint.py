"""torch.distributed.checkpoint: saving at once or behind the training, and what it raises, as the error that it is.

A rank that fails is told on all ranks, but as a BaseException, which nobody takes for an error, with its traceback as
the message.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from impl.checkpoints.writing import Writing
from impl.together import Group

# Copies into ordinary memory, made before the call returns.
_COPIES = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)


def save(state: dict[str, Any], path: Path, when: Writing) -> None:
    """Write a state into the folder ``path``; collective.

    Behind the training, these are the two halves of ``async_save``. It would start a thread for each model, which would
    all talk over one group at a time.
    """
    if when.copies:
        state = cast(dict[str, Any], DefaultStager(_COPIES).stage(state))  # no Future
    when.add(lambda: _write(state, path, when.group))


def _write(state: dict[str, Any], path: Path, group: Group) -> None:
    with told_alike():
        dcp.save(state, checkpoint_id=path, process_group=group)


@contextlib.contextmanager
def told_alike() -> Iterator[None]:
    """Raise the error of the first rank that failed, on every rank."""
    try:
        yield
    except CheckpointException as error:
        rank = min(error.failures)
        raise error.failures[rank][0] from None
