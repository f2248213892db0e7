"""Gathers, fills, clips and saves many DTensors at a time.

``DTensor.full_tensor`` needs a collective per tensor and axis, and a tiny cell spends most of its time waiting for all
ranks to join. Here, all tensors that are sharded over the same mesh axis share one collective. Filling a DTensor from a
file needs none.

``torch.nn.utils.clip_grad_norm_`` rejects parameters on different meshes (a tensor-parallel weight is a 2-D DTensor, a
norm weight a 1-D one). To count every element once, a local sum of squares is summed over the mesh axes that shard the
tensor, and over no other axes.

torch.distributed.checkpoint raises the failure of a rank on all ranks, but as a BaseException, with its traceback as
the message. Here, the original error is raised.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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

GATHERED_AT_ONCE = 2**22  # elements


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """A mesh axis that splits a DTensor along the dimension ``dim``. length: of this dimension before the split, on
    this rank."""

    axis: int
    dim: int
    length: int


def region_of(tensor: DTensor) -> str:
    """Names the part of a tensor that this rank holds."""
    mesh = tensor.device_mesh
    place = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), tensor.placements, strict=True)
    return ".".join(f"{axis}{at}" for axis, at, placement in place if not placement.is_replicate()) or "full"


def full_tensors(tensors: Sequence[DTensor]) -> list[torch.Tensor]:
    """Returns the full tensor of each DTensor, in the same order, on every rank; collective.

    Each is a copy, also where no axis cuts the DTensor: a later update does not change it.
    """
    cuts = [_cuts(tensor) for tensor in tensors]
    full = [
        tensor.full_tensor() if of_tensor is None else tensor.to_local() if of_tensor else tensor.to_local().clone()
        for tensor, of_tensor in zip(tensors, cuts, strict=True)
    ]
    left = [[*(c or ())] for c in cuts]
    while any(left):  # each round gathers every tensor over one more axis
        batches: dict[tuple[DeviceMesh, int, torch.dtype], list[int]] = defaultdict(list)
        for i, of_tensor in enumerate(left):
            if of_tensor:
                batches[tensors[i].device_mesh, of_tensor[0].axis, tensors[i].dtype].append(i)
        for (mesh, axis, _), members in batches.items():
            at = [left[i].pop(0) for i in members]
            with (
                torch._C.DisableTorchFunction(),
                torch._C._DisableTorchDispatch(),
            ):  # modes, which cost more than copies
                parts = [full[i].movedim(cut.dim, 0) for i, cut in zip(members, at, strict=True)]
                wholes = _gather(parts, [cut.length for cut in at], mesh.get_group(axis), mesh.size(axis))
                for i, cut, whole in zip(members, at, wholes, strict=True):
                    full[i] = whole.movedim(0, cut.dim).contiguous()
    return full


def gathered(tensors: Iterable[tuple[str, DTensor]], device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each full tensor by its name, GATHERED_AT_ONCE elements at a time; collective."""
    batch: dict[str, DTensor] = {}
    numbers = 0
    for name, tensor in tensors:
        numbers += tensor.numel()
        if batch and numbers > GATHERED_AT_ONCE:
            yield from zip(batch, full_tensors(list(batch.values())), strict=True)
            batch, numbers = {}, tensor.numel()
        batch[name] = cast(DTensor, tensor.to(device))  # NCCL cannot gather offloaded pieces
    yield from zip(batch, full_tensors(list(batch.values())), strict=True)


def _cuts(tensor: DTensor) -> list[_Cut] | None:
    """Returns the splits of a DTensor, the last one first; None if only torch can put its parts together."""
    mesh = tensor.device_mesh
    shards = [(axis, p) for axis, p in enumerate(tensor.placements) if not p.is_replicate() and mesh.size(axis) > 1]
    if _packed_axis(tensor) is not None or not all(isinstance(p, Shard | _StridedShard) for _, p in shards):
        return None
    # FSDP2 splits the parts of tensor parallelism, though its axis comes first: it is the strided one.
    shards.sort(key=lambda shard: isinstance(shard[1], _StridedShard))
    lengths, cuts = list(tensor.shape), list[_Cut]()
    for axis, placement in shards:
        dim = cast(Shard, placement).dim
        cuts.insert(0, _Cut(axis=axis, dim=dim, length=lengths[dim]))
        rows = -(-lengths[dim] // mesh.size(axis))
        lengths[dim] = max(0, min(rows, lengths[dim] - rows * mesh.get_local_rank(axis)))
    assert tuple(lengths) == tensor.to_local().shape, f"{tensor.placements} of {tuple(tensor.shape)} cut otherwise"
    return cuts


def _gather(parts: list[torch.Tensor], lengths: list[int], group: dist.ProcessGroup, size: int) -> list[torch.Tensor]:
    """Gathers the parts of several tensors, each split along its first dimension of the given length, at once.

    Parts are padded to the same number of rows and concatenated; the result is split again.
    """
    shapes = [(-(-length // size), *part.shape[1:]) for part, length in zip(parts, lengths, strict=True)]  # padded
    numbers = [math.prod(shape) for shape in shapes]
    everyone = parts[0].new_empty(size * sum(numbers))
    dist.all_gather_into_tensor(everyone, _end_to_end(parts, numbers), group=group)
    columns = everyone.view(size, -1).split(numbers, dim=1)
    return [
        column.reshape(size * shape[0], *shape[1:])[:length]
        for column, shape, length in zip(columns, shapes, lengths, strict=True)
    ]


def _end_to_end(parts: list[torch.Tensor], numbers: list[int]) -> torch.Tensor:
    """Concatenates this rank's parts, each padded to its number of elements."""
    if len(parts) == 1 and parts[0].numel() == numbers[0]:
        return parts[0].flatten()  # not a copy: a large tensor is gathered alone
    own = parts[0].new_zeros(sum(numbers))
    for part, piece in zip(parts, own.split(numbers), strict=True):
        piece[: part.numel()] = part.flatten()
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


def multiply(gradients: Sequence[DTensor], factor: torch.Tensor, *, in_float32: bool) -> None:
    """Multiplies gradients in place. ``in_float32``: without rounding the factor to the dtype of gradients."""
    with torch.no_grad():
        local = [gradient.to_local() for gradient in gradients]
    if in_float32:
        for gradient in local:
            gradient.mul_(float(factor))
    else:
        torch._foreach_mul_(local, torch.as_tensor(factor, dtype=local[0].dtype, device=local[0].device))


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
