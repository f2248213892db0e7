"""Gradient norm and clipping over parameters that live on different meshes.

``torch.nn.utils.clip_grad_norm_`` refuses such a mixture (a tensor-parallel weight is a 2-D DTensor, a norm weight a
1-D one). To count every element once, a local sum of squares is added up over the mesh axes that shard the tensor, and
over no others.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def axes_to_sum(gradient: DTensor) -> tuple[int, ...]:
    """The mesh dimensions that shard ``gradient``; over the others it is replicated and must not be counted again."""
    return tuple(i for i, placement in enumerate(gradient.placements) if not placement.is_replicate())


def gradient_norm(gradients: Iterable[DTensor]) -> float:
    """The global 2-norm of all gradients; collective.

    Gradients on the same mesh and sharded over the same axes share one all-reduce per axis.
    """
    squares: dict[tuple[DeviceMesh, tuple[int, ...]], list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        assert not any(p.is_partial() for p in gradient.placements), "a partial gradient was never reduced"
        norm = torch.linalg.vector_norm(gradient.to_local(), dtype=torch.float64)  # without a copy in float64
        square = norm.square().to(gradient.device_mesh.device_type)
        squares[gradient.device_mesh, axes_to_sum(gradient)].append(square)
    total = 0.0
    for (mesh, axes), parts in squares.items():
        square = torch.stack(parts).sum()
        for axis in axes:
            dist.all_reduce(square, group=mesh.get_group(axis))
        total += square.item()
    return math.sqrt(total)


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor, at most 1, that scales ``norm`` down to ``max_norm``, as in ``torch.nn.utils.clip_grad_norm_``."""
    return min(1.0, max_norm / (norm + 1e-6))
