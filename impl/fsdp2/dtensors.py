"""Gathers, fills, clips and saves many DTensors at a time.

``DTensor.full_tensor`` needs a collective per tensor, and a tiny cell spends most of its time waiting for all ranks to
join. Here, all tensors that are sharded along their first dimension over the same single mesh axis share one
collective. Filling a DTensor from a file needs none.

``torch.nn.utils.clip_grad_norm_`` rejects parameters on different meshes (a tensor-parallel weight is a 2-D DTensor, a
norm weight a 1-D one). To count every element once, a local sum of squares is summed over the mesh axes that shard the
tensor, and over no other axes.

torch.distributed.checkpoint raises the failure of a rank on all ranks, but as a BaseException, with its traceback as
the message. Here, the original error is raised.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from impl.engine.optimizers import sums_of_squares
from impl.interface.distributed import Group
from impl.interface.sharded_safetensors import Regions, fill
from impl.interface.trainable import Writing


def full_tensors(tensors: Sequence[DTensor]) -> list[torch.Tensor]:
    """Returns the full tensor of each DTensor, in the same order, on every rank; collective."""
    batches: dict[tuple[DeviceMesh, int, torch.dtype], list[int]] = defaultdict(list)
    full: dict[int, torch.Tensor] = {}
    for i, tensor in enumerate(tensors):
        axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
        if len(axes) == 1 and type(tensor.placements[axes[0]]) is Shard and tensor.placements[axes[0]].is_shard(0):
            batches[tensor.device_mesh, axes[0], tensor.dtype].append(i)
        else:
            full[i] = tensor.full_tensor()
    for (mesh, axis, _), members in batches.items():
        wholes = _gather([tensors[i] for i in members], mesh.get_group(axis), mesh.size(axis))
        full |= dict(zip(members, wholes, strict=True))
    return [full[i] for i in range(len(tensors))]


def _gather(tensors: list[DTensor], group: dist.ProcessGroup, size: int) -> list[torch.Tensor]:
    """Pads pieces to the same number of rows, concatenates and gathers them at once, and splits the result."""
    shapes = [(-(-t.shape[0] // size), *t.shape[1:]) for t in tensors]  # shape of a padded piece
    lengths = [math.prod(shape) for shape in shapes]
    everyone = tensors[0].to_local().new_empty(size * sum(lengths))
    dist.all_gather_into_tensor(everyone, _end_to_end(tensors, lengths), group=group)
    columns = everyone.view(size, -1).split(lengths, dim=1)
    return [
        column.reshape(size * shape[0], *shape[1:])[: tensor.shape[0]]
        for column, tensor, shape in zip(columns, tensors, shapes, strict=True)
    ]


def _end_to_end(tensors: list[DTensor], lengths: list[int]) -> torch.Tensor:
    """Concatenates this rank's pieces, each padded to its length."""
    own = tensors[0].to_local().new_zeros(sum(lengths))
    for tensor, piece in zip(tensors, own.split(lengths), strict=True):
        local = tensor.to_local().flatten()
        piece[: local.numel()] = local
    return own


def write_region(tensor: DTensor, name: str, read: Regions) -> None:
    """Sets this rank's part of ``tensor`` from the whole tensor ``name`` in a file."""
    axis = _packed_axis(tensor)
    placements = [Replicate() if i == axis else p for i, p in enumerate(tensor.placements)]
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, placements)
    local = tensor.to_local()
    if axis is None:
        assert local.shape == shape, f"{name}: this rank holds {tuple(local.shape)}, but its part is {tuple(shape)}"
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
    """Returns the mesh axis that splits each of several matrices packed in one tensor; None if there is none.

    transformers' plan does so for gate and up of stacked experts. torch's own functions treat the part of a rank as one
    region. Another kind of strided shard, of FSDP2 over tensor parallelism, is followed by a shard of the same
    dimension; its part is one region.
    """
    for axis, placement in enumerate(tensor.placements):
        later = tensor.placements[axis + 1 :]
        if isinstance(placement, _StridedShard) and not any(p.is_shard(placement.dim) for p in later):
            return axis
    return None


def axes_to_sum(gradient: DTensor) -> tuple[int, ...]:
    """Returns the mesh dimensions that shard ``gradient``; over other dimensions it is replicated and counts once."""
    return tuple(i for i, placement in enumerate(gradient.placements) if not placement.is_replicate())


def gradient_norm(gradients: Sequence[DTensor]) -> torch.Tensor:
    """Computes the global 2-norm of all gradients, a float64 scalar on the mesh's device; collective.

    Gradients on the same mesh and sharded over the same axes share one all-reduce per axis.
    """
    assert not any(p.is_partial() for g in gradients for p in g.placements), "a partial gradient was never reduced"
    with torch.no_grad():
        own = sums_of_squares([g.to_local() for g in gradients])
    squares: dict[tuple[DeviceMesh, tuple[int, ...]], list[torch.Tensor]] = defaultdict(list)
    for gradient, square in zip(gradients, own, strict=True):
        squares[gradient.device_mesh, axes_to_sum(gradient)].append(square)
    total = torch.zeros([], dtype=torch.float64, device=gradients[0].device_mesh.device_type)
    for (mesh, axes), parts in squares.items():
        square = torch.stack(parts).sum().to(total.device)
        for axis in axes:
            dist.all_reduce(square, group=mesh.get_group(axis))
        total += square
    return total.sqrt()


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Returns the factor, at most 1, that scales ``norm`` to ``max_norm``; see ``torch.nn.utils.clip_grad_norm_``."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


# The state is copied into pageable memory before the call returns.
_COPIES = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)


def save(state: dict[str, Any], path: Path, when: Writing) -> None:
    """Writes a state into the folder ``path``; collective.

    A write during the training uses the two halves of ``async_save``, which itself would start a thread for each model;
    all threads would use one process group at a time.
    """
    if when.copies:
        state = cast(dict[str, Any], DefaultStager(_COPIES).stage(state))  # not a Future
    when.add(lambda: _write(state, path, when.group))


def _write(state: dict[str, Any], path: Path, group: Group) -> None:
    with raising_first_failure():
        dcp.save(state, checkpoint_id=path, process_group=group)


@contextlib.contextmanager
def raising_first_failure() -> Iterator[None]:
    """Raises the error of the first rank that failed, on every rank."""
    try:
        yield
    except CheckpointException as error:
        rank = min(error.failures)
        raise error.failures[rank][0] from None
