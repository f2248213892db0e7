"""Gathers full tensors from many DTensors at a time, and fills DTensors from whole tensors in files.

``DTensor.full_tensor`` needs a collective for each tensor, and in a tiny cell most of the time is spent waiting for all
ranks to join. Here, all tensors that are sharded along their first dimension over the same single mesh axis share one
collective. Filling a DTensor from a file needs none.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from impl.files import Regions, fill


def full_tensors(tensors: Sequence[DTensor]) -> list[torch.Tensor]:
    """The full tensor of each DTensor, in the same order, on every rank; collective."""
    alike: dict[tuple[DeviceMesh, int, torch.dtype], list[int]] = defaultdict(list)
    full: dict[int, torch.Tensor] = {}
    for i, tensor in enumerate(tensors):
        axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
        if len(axes) == 1 and type(tensor.placements[axes[0]]) is Shard and tensor.placements[axes[0]].is_shard(0):
            alike[tensor.device_mesh, axes[0], tensor.dtype].append(i)
        else:
            full[i] = tensor.full_tensor()
    for (mesh, axis, _), members in alike.items():
        wholes = _gather([tensors[i] for i in members], mesh.get_group(axis), mesh.size(axis))
        full |= dict(zip(members, wholes, strict=True))
    return [full[i] for i in range(len(tensors))]


def _gather(tensors: list[DTensor], group: dist.ProcessGroup, size: int) -> list[torch.Tensor]:
    """Pieces are padded to the same number of rows, laid end to end, gathered at once, and taken apart again."""
    shapes = [(-(-t.shape[0] // size), *t.shape[1:]) for t in tensors]  # of a padded piece
    lengths = [math.prod(shape) for shape in shapes]
    everyone = tensors[0].to_local().new_empty(size * sum(lengths))
    dist.all_gather_into_tensor(everyone, _end_to_end(tensors, lengths), group=group)
    columns = everyone.view(size, -1).split(lengths, dim=1)
    return [
        column.reshape(size * shape[0], *shape[1:])[: tensor.shape[0]]
        for column, tensor, shape in zip(columns, tensors, shapes, strict=True)
    ]


def _end_to_end(tensors: list[DTensor], lengths: list[int]) -> torch.Tensor:
    """This rank's pieces, each padded to its length."""
    own = tensors[0].to_local().new_zeros(sum(lengths))
    for tensor, piece in zip(tensors, own.split(lengths), strict=True):
        local = tensor.to_local().flatten()
        piece[: local.numel()] = local
    return own


def write_region(tensor: DTensor, name: str, read: Regions) -> None:
    """Set this rank's part of ``tensor`` from the whole tensor ``name`` in a file."""
    axis = _packed_axis(tensor)
    placements = [Replicate() if i == axis else p for i, p in enumerate(tensor.placements)]
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, placements)
    local = tensor.to_local()
    if axis is None:
        assert local.shape == shape, f"{name}: this rank holds {tuple(local.shape)}, and its part is {tuple(shape)}"
        fill(local, name, start, read.region)
        return
    packed: Any = tensor.placements[axis]
    ranks, rank = tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis)
    length = tensor.shape[packed.dim] // (packed.split_factor * ranks)
    for matrix, piece in enumerate(local.split(length, dim=packed.dim)):
        begin = list(start)
        begin[packed.dim] = (matrix * ranks + rank) * length
        fill(piece, name, begin, read.region)


def _packed_axis(tensor: DTensor) -> int | None:
    """The mesh axis that cuts each of several matrices, which are one tensor, into equal parts: transformers' plan for
    gate and up of stacked experts. None if there is none.

    torch's own functions take the part of a rank for one region. A strided shard of another kind, of FSDP2 over tensor
    parallelism, is followed by a shard of the same dimension, and is one.
    """
    for axis, placement in enumerate(tensor.placements):
        later = tensor.placements[axis + 1 :]
        if isinstance(placement, _StridedShard) and not any(p.is_shard(placement.dim) for p in later):
            return axis
    return None
