"""What ranks do together, so that an error of one of them ends all of them.

A rank that cannot write its file, or finds one damaged, would else leave the others waiting at the next collective.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from conformance.validation import UsageError, one_line

T = TypeVar("T")
Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class _Failure:
    message: str
    is_usage: bool


def together(doing: str, action: Callable[[], T], *, group: Group = None) -> list[T]:
    """Run ``action`` on every rank and return the picklable results of all, by rank; collective.

    Where it fails on a rank, all raise: that one its own error, the others one that says which rank failed and how.
    ``doing`` says in a few words what is done, for the message. ``group``: of all ranks; the default one, or another
    for a thread beside the training. The action itself makes no collective calls, or only such as cannot fail on one
    rank alone.
    """
    try:
        result = action()
    except Exception as error:  # whatever it is, the others have to hear of it
        return agree(doing, error, group=group)
    return agree(doing, None, result, group=group)


def agree(doing: str, error: Exception | None, result: Any = None, *, group: Group = None) -> list[Any]:
    """The end of ``together``, for what cannot be put into a function."""
    if isinstance(error, OSError):  # a full disk, a missing permission: no bug
        error = UsageError(f"{doing}: {one_line(error)}")
    told = _Failure(one_line(error), isinstance(error, UsageError)) if error else result
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, told, group=group)
    if error:
        raise error
    for rank, one in enumerate(of_all):
        if isinstance(one, _Failure) and one.is_usage:
            raise UsageError(one.message)
        if isinstance(one, _Failure):
            raise RuntimeError(f"rank {rank} failed: {doing}: {one.message}")
    return of_all


def on_first(doing: str, action: Callable[[], T], *, group: Group = None) -> T:
    """Run ``action`` on the first rank, and return its result on every rank; collective."""
    results: list[Any] = together(doing, lambda: action() if dist.get_rank() == 0 else None, group=group)
    found: T = results[0]
    return found
