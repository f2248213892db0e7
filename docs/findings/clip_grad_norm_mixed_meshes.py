"""torch: ``clip_grad_norm_`` refuses parameters on different meshes, and the obvious work-arounds are silently wrong.

FSDP2 over tensor parallelism: a sharded weight is a DTensor on (dp, tp), a norm's weight one on (dp) alone. Exit code
0: defect present (the call raises). 1: gone (it returns). See clip-grad-norm-mixed-meshes.md.
"""

import math
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

DP, TP, HIDDEN, LAYERS = 2, 2, 32, 2


def layer() -> torch.nn.Module:
    parts = {
        "norm": torch.nn.RMSNorm(HIDDEN),
        "up": torch.nn.Linear(HIDDEN, 64, bias=False),
        "act": torch.nn.SiLU(),
        "down": torch.nn.Linear(64, HIDDEN, bias=False),
    }
    return torch.nn.Sequential(*(torch.nn.Sequential() for _ in ()), *parts.values())


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(layer() for _ in range(LAYERS))).double()


def square(tensor: torch.Tensor) -> float:
    return float(tensor.square().sum())


def summed(value: float, group: Any = None) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return float(total)


def once(gradient: Any) -> float:
    """Add a local square up over the mesh axes that cut the tensor, and over no others."""
    value = square(gradient.to_local())
    for axis, placement in enumerate(gradient.placements):
        if not placement.is_replicate():
            value = summed(value, gradient.device_mesh.get_group(axis))
    return value


def rank_main(rank: int, store: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, DP * TP), rank=rank, world_size=DP * TP)
    mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
    data = torch.randn(8, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2
    whole, model = build(), build()
    whole(data).square().mean().backward()
    right = math.sqrt(sum(square(p.grad) for p in whole.parameters() if p.grad is not None))

    for block in model.children():
        parallelize_module(block, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    model(data.chunk(DP)[mesh.get_local_rank("dp")]).square().mean().backward()
    gradients: list[Any] = [p.grad for p in model.parameters()]
    try:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        message = None
    except (RuntimeError, ValueError) as error:
        message = str(error)
    dp = mesh.get_group("dp")
    ways: dict[str, Callable[[], float]] = {
        "each rank its own shards": lambda: sum(square(g.to_local()) for g in gradients),
        "own shards, summed over dp": lambda: summed(sum(square(g.to_local()) for g in gradients), dp),
        "own shards, summed over all": lambda: summed(sum(square(g.to_local()) for g in gradients)),
        "own shards, axes that cut": lambda: sum(once(g) for g in gradients),
        "full_tensor() of each norm": lambda: sum(g.norm().full_tensor().item() ** 2 for g in gradients),
    }
    errors = {}
    for name, way in ways.items():
        found: list[Any] = [None] * DP * TP
        dist.all_gather_object(found, math.sqrt(way()))
        errors[name] = max(abs(value / right - 1) for value in found)
        if rank == 0:
            print(f"  {name:27} | {' '.join(f'{v:.4f}' for v in found)} | {' '.join(f'{v / right:.4f}' for v in found)}")
    if rank == 0:
        print(f"clip_grad_norm_: {'returns' if message is None else message}")
        *naive, cut, full = errors.values()
        verdict.put(message is not None and "mesh" in message and min(naive) > 1e-3 and max(cut, full) < 1e-9)


if __name__ == "__main__":
    print(f"torch {torch.__version__}, float64, FSDP2 dp{DP} over tp{TP}: gradient norm on ranks 0-3 | ratio to the right one")
    verdict = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (f"{folder}/store", verdict), DP * TP, start_method="fork")
    present = verdict.get()
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
