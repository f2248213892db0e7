"""Runs work on all ranks and raises an error of one rank on all of them; reduces, gathers and copies to the device.

A rank that cannot write its file, or finds a damaged one, would otherwise leave the others waiting at the next
collective.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from conformance.core.errors import UsageError, one_line

T = TypeVar("T")
Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class _Failure:
    message: str
    is_usage: bool


def on_all_ranks(doing: str, action: Callable[[], T], *, group: Group = None) -> list[T]:
    """Runs ``action`` on every rank and returns the picklable results of all ranks, by rank; collective.

    If ``action`` fails on a rank, all ranks raise: that rank its own error, the others an error with its rank and
    message. ``doing`` describes the work in a few words, for the message. ``group`` contains all ranks; it is the
    default group, or another one for a thread that runs beside the training. The action makes no collective calls,
    except such as cannot fail on one rank alone.
    """
    try:
        result = action()
    except Exception as error:  # any error must reach the other ranks
        return agree(doing, error, group=group)
    return agree(doing, None, result, group=group)


def agree(doing: str, error: Exception | None, result: Any = None, *, group: Group = None) -> list[Any]:
    """Exchanges errors and results as ``on_all_ranks`` does, for work that cannot be put into a function."""
    if isinstance(error, OSError):  # a full disk or a missing permission is not a bug
        error = UsageError(f"{doing}: {one_line(error)}")
    outcome = _Failure(one_line(error), isinstance(error, UsageError)) if error else result
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome, group=group)
    if error:
        raise error
    for rank, other in enumerate(outcomes):
        if isinstance(other, _Failure) and other.is_usage:
            raise UsageError(other.message)
        if isinstance(other, _Failure):
            raise RuntimeError(f"rank {rank} failed: {doing}: {other.message}")
    return outcomes


def on_first(doing: str, action: Callable[[], T], *, group: Group = None) -> T:
    """Runs ``action`` on the first rank and returns its result on every rank; collective."""
    results: list[Any] = on_all_ranks(doing, lambda: action() if dist.get_rank() == 0 else None, group=group)
    result: T = results[0]
    return result


def all_reduce_number(value: float, *, groups: Iterable[dist.ProcessGroup], device: str) -> float:
    """Sums ``value`` in float64 over the ranks of all ``groups``, which are the axes of a mesh."""
    return all_reduce_over(torch.tensor(value, dtype=torch.float64, device=device), groups=groups).item()


def all_reduce_over(tensor: torch.Tensor, *, groups: Iterable[dist.ProcessGroup]) -> torch.Tensor:
    """Returns the sum of ``tensor`` over the ranks of all ``groups``."""
    total = tensor.clone()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total


def all_gather_value(value: Any) -> list[Any]:
    """Returns the picklable values of all ranks in the worker group, in rank order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def moved(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Returns ``tensor`` on ``device``; the same tensor if it is there already.

    A copy from the CPU to a GPU goes through pinned memory. From unpinned memory, the host would wait until the GPU has
    finished all earlier work. All other copies are complete when this function returns.
    """
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        # Expanded tensors, whose elements share memory, cannot be pinned.
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Reading:
    """Copies numbers from the device so that the host can read them later.

    The host waits only for device work that was queued before this object was made. It can queue more in the meantime,
    such as an update.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """Begins the copy of ``tensor``, which has one dimension and is not written to any more."""
        self._numbers = tensor.detach().to("cpu", non_blocking=True)  # of a GPU: into pinned memory
        self._copied = torch.cuda.Event() if tensor.is_cuda else None
        if self._copied:
            self._copied.record()

    def numbers(self) -> list[float]:
        """Waits for the copy and returns the numbers."""
        if self._copied and not self._copied.query():
            self._copied.synchronize()
        return list(self._numbers.tolist())
