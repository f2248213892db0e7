"""Gradient norm and clipping over parameters that live on different meshes.

``torch.nn.utils.clip_grad_norm_`` refuses such a mixture (a tensor-parallel weight is a 2-D DTensor, a norm weight a
1-D one). To count every element once, a local sum of squares is added up over the mesh axes that shard the tensor, and
over no others.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from impl.squares import sums_of_squares


def axes_to_sum(gradient: DTensor) -> tuple[int, ...]:
    """The mesh dimensions that shard ``gradient``; over the others it is replicated and must not be counted again."""
    return tuple(i for i, placement in enumerate(gradient.placements) if not placement.is_replicate())


def gradient_norm(gradients: Sequence[DTensor]) -> torch.Tensor:
    """The global 2-norm of all gradients, a float64 scalar on the mesh's device; collective.

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
    """The factor, at most 1, that scales ``norm`` down to ``max_norm``, as in ``torch.nn.utils.clip_grad_norm_``."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
