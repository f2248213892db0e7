"""Runs collective actions in which an error of one rank ends all ranks, reduces and gathers values, and copies tensors.

A rank that cannot write its file, or finds a damaged one, would otherwise leave the others waiting in their next
collective. Copies between the CPU and the device do not make the host wait for the device.
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


def together(doing: str, action: Callable[[], T], *, group: Group = None) -> list[T]:
    """Run ``action`` on every rank and return the picklable results of all, by rank; collective.

    If it fails on a rank, all ranks raise: this rank its own error, the others an error that names the rank and says
    how it failed. The action makes no collective calls that can fail on one rank alone.

    doing: the action in a few words, for the message. group: all ranks, in the default group or in another one for a
    thread beside the training.
    """
    try:
        result = action()
    except Exception as error:  # whatever it is, the others have to hear of it
        return agree(doing, error, group=group)
    return agree(doing, None, result, group=group)


def agree(doing: str, error: Exception | None, result: Any = None, *, group: Group = None) -> list[Any]:
    """Exchange the result or the error of an action that every rank has run; the second half of ``together``."""
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


def all_reduce_number(value: float, *, groups: Iterable[dist.ProcessGroup], device: str) -> float:
    """Sum ``value`` over the ranks of all ``groups``, which are the axes of a mesh, in float64."""
    return all_reduce_over(torch.tensor(value, dtype=torch.float64, device=device), groups=groups).item()


def all_reduce_over(tensor: torch.Tensor, *, groups: Iterable[dist.ProcessGroup]) -> torch.Tensor:
    """Sum ``tensor`` over the ranks of all ``groups``."""
    total = tensor.clone()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total


def all_gather_value(value: Any) -> list[Any]:
    """Gather the values of all ranks, in rank order; ``value`` has to be picklable."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def moved(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Move ``tensor`` to ``device``; returns the same tensor if it is there.

    A copy from the CPU to a GPU is made from pinned memory. From any other memory, the host would wait until everything
    that was asked of the GPU before is done. All other copies are made when this function returns.
    """
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        # Tensors that have a number at several places, as expanded ones have, cannot be pinned.
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Reading:
    """A copy of numbers from the device that the host will read later.

    The host then waits for what the device was asked for before this object was made, and for nothing after that, so
    that it can ask for more in the meantime, as for an update.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """``tensor``: with one dimension; nothing writes to it any more."""
        self._numbers = tensor.detach().to("cpu", non_blocking=True)  # of a GPU: into pinned memory
        self._copied = torch.cuda.Event() if tensor.is_cuda else None
        if self._copied:
            self._copied.record()

    def numbers(self) -> list[float]:
        if self._copied and not self._copied.query():
            self._copied.synchronize()
        return list(self._numbers.tolist())
