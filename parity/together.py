"""Together: what ranks do so that an error of one of them is raised on all.

A rank that is given wrong rows, or cannot write its file, would else leave the others waiting in their next collective.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.validation import UsageError, one_line

T = TypeVar("T")


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


def add_up(vector: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, in place unless its device cannot communicate; collective."""
    if world_size() > 1:
        if dist.get_backend() == "nccl" and not vector.is_cuda:
            vector = vector.cuda()
        dist.all_reduce(vector)
    return vector


def together(action: Callable[[], T]) -> T:
    """Run ``action``, which may differ from rank to rank, and return this rank's result; collective.

    Where it fails on a rank, all raise: that one its own error, the others a UsageError with the same message, or a
    RuntimeError that says which rank failed if it was none of the user's. The action makes no collective calls.
    """
    try:
        result = action()
    except Exception as error:  # whatever it is, the others have to hear of it
        _agree(error)
        raise
    _agree(None)
    return result


def _agree(error: Exception | None) -> None:
    """Raise on the ranks without an error where another one has one. A single number is exchanged where none has."""
    if world_size() == 1 or not add_up(torch.tensor(float(error is not None))):
        return
    own = None if error is None else (isinstance(error, UsageError), one_line(error))
    told: list[tuple[bool, str] | None] = [None] * world_size()
    dist.all_gather_object(told, own)
    if error is not None:
        return
    rank, (is_usage, message) = next((rank, one) for rank, one in enumerate(told) if one is not None)
    raise UsageError(message) if is_usage else RuntimeError(f"rank {rank} failed: {message}")
