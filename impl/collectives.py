"""Collectives of Python values, for contexts."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


def all_reduce_number(value: float, *, groups: Iterable[dist.ProcessGroup], device: str) -> float:
    """The sum of ``value`` over the ranks of all ``groups``, which are the axes of a mesh, in float64."""
    return all_reduce_over(torch.tensor(value, dtype=torch.float64, device=device), groups=groups).item()


def all_reduce_over(tensor: torch.Tensor, *, groups: Iterable[dist.ProcessGroup]) -> torch.Tensor:
    """The sum of ``tensor`` over the ranks of all ``groups``."""
    total = tensor.clone()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total


def all_gather_value(value: Any) -> list[Any]:
    """The values of all ranks of the world, in rank order; ``value`` has to be picklable."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
