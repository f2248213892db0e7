"""torch: ``isinstance(placement, Shard)`` and ``placement.is_shard()`` miss shards of FSDP2 over tensor parallelism.

If both shard the same dimension of a tensor, its placements are (_StridedShard, Shard), and since torch 2.10 a
_StridedShard is no Shard. Code that looks for sharded mesh axes in this way misses one; a gradient norm is too small.
Exit code 0: defect present. 1: gone. See strided-shard-is-not-shard.md.
"""

import logging
import math
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import Linear, Sequential, SiLU

DP, TP, HIDDEN = 2, 2, 32


def build() -> Sequential:
    torch.manual_seed(0)
    return Sequential(Linear(HIDDEN, 64, bias=False), SiLU(), Linear(64, HIDDEN, bias=False)).double()


def norm(gradients: list[Any], cuts: Callable[[Placement], bool]) -> float:
    """The norm from local squares, which are added up over the mesh axes that shard the tensor and over no others."""
    total = 0.0
    for gradient in gradients:
        square = gradient.to_local().square().sum()
        for axis, placement in enumerate(gradient.placements):
            if cuts(placement):
                dist.all_reduce(square, group=gradient.device_mesh.get_group(axis))
        total += float(square)
    return math.sqrt(total)


def rank_main(rank: int, store: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    dist.init_process_group("gloo", store=dist.FileStore(store, DP * TP), rank=rank, world_size=DP * TP)
    mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
    data = torch.randn(8, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole, model = build(), build()
    loss = whole(data).square().mean()
    loss.backward()
    right_gradients: list[Any] = [p.grad for p in whole.parameters()]
    right = math.sqrt(sum(float(g.square().sum()) for g in right_gradients))

    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    part = model(data.chunk(DP)[mesh.get_local_rank("dp")]).square().mean()
    part.backward()
    gradients: list[Any] = [p.grad for p in model.parameters()]
    error = max(float((g.full_tensor() - r).norm() / r.norm()) for g, r in zip(gradients, right_gradients, strict=True))
    ways: dict[str, Callable[[Placement], bool]] = {
        "isinstance(p, Shard)": lambda p: isinstance(p, Shard),
        "p.is_shard()": lambda p: p.is_shard(),
        "REMEDY: not p.is_replicate()": lambda p: not p.is_replicate(),
    }
    found = {name: norm(gradients, cuts) for name, cuts in ways.items()}
    strided = gradients[0].placements[0]
    if rank == 0:
        for name, gradient in zip(("colwise", "rowwise"), gradients, strict=True):
            print(f"{name} weight: placements {gradient.placements} on {gradient.device_mesh.mesh_dim_names}")
        print(f"isinstance({strided}, Shard): {isinstance(strided, Shard)}; is_shard(): {strided.is_shard()}")
        print(f"worst gradient error {error:.1e}")
        for name, value in found.items():
            print(f"norm with {name:28}: {value:.6f}, right {right:.6f}, ratio {value / right:.4f}")
        wrong, _, remedy = found.values()
        present = not isinstance(strided, Shard) and wrong < 0.99 * right and abs(remedy / right - 1) < 1e-9
        verdict.put(present and error < 1e-9)


if __name__ == "__main__":
    print(f"torch {torch.__version__}, float64, FSDP2 dp{DP} over tp{TP}")
    verdict = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (f"{folder}/store", verdict), DP * TP, start_method="fork")
    print("defect present" if (present := verdict.get()) else "defect not as described")
    sys.exit(0 if present else 1)
