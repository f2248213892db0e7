"""torch: ``clip_grad_norm_`` refuses parameters on different meshes, and the obvious work-arounds are silently wrong.

With FSDP2 over tensor parallelism, a sharded weight is a DTensor on (dp, tp), and a norm's weight a DTensor on (dp)
alone. Exit code 0: defect present (the call raises). 1: gone (it returns). See clip-grad-norm-mixed-meshes.md.
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
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import Linear, RMSNorm, Sequential, SiLU

DP, TP, HIDDEN = 2, 2, 32


def build() -> Sequential:
    torch.manual_seed(0)
    blocks = [[RMSNorm(HIDDEN), Linear(HIDDEN, 64), SiLU(), Linear(64, HIDDEN)] for _ in range(2)]
    return Sequential(*(Sequential(*block) for block in blocks)).double()


def sharded(model: Sequential, mesh: Any) -> Sequential:
    for block in model.children():
        parallelize_module(block, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def local_square(gradients: list[Any]) -> float:
    return sum(float(g.to_local().square().sum()) for g in gradients)


def summed(value: float, group: Any = None) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return float(total)


def rank_main(rank: int, store: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    dist.init_process_group("gloo", store=dist.FileStore(store, DP * TP), rank=rank, world_size=DP * TP)
    mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
    data = torch.randn(8, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole, model = build(), sharded(build(), mesh)
    whole(data).square().mean().backward()
    right = math.sqrt(sum(float(p.grad.square().sum()) for p in whole.parameters() if p.grad is not None))
    model(data.chunk(DP)[mesh.get_local_rank("dp")]).square().mean().backward()
    gradients: list[Any] = [p.grad for p in model.parameters()]
    try:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        message = None
    except (RuntimeError, ValueError) as error:
        message = str(error).splitlines()[0]
    ways: dict[str, Callable[[], float]] = {
        "local norms, not summed": lambda: local_square(gradients),
        "local norms, summed over dp": lambda: summed(local_square(gradients), mesh.get_group("dp")),
        "local norms, summed over all ranks": lambda: summed(local_square(gradients)),
        "REMEDY: full_tensor() of each norm": lambda: sum(g.norm().full_tensor().item() ** 2 for g in gradients),
    }
    errors = []
    for name, way in ways.items():
        found: list[Any] = [None] * DP * TP
        dist.all_gather_object(found, math.sqrt(way()))
        errors.append(max(abs(value / right - 1) for value in found))
        if rank == 0:
            print(f"{name:34}:", "  ".join(f"{v:.6f} ({v / right:.4f})" for v in found))
    if rank == 0:
        print(f"right: {right:.6f}\nclip_grad_norm_: {'returns' if message is None else message}")
        verdict.put(message is not None and "mesh" in message and min(errors[:3]) > 1e-3 and errors[3] < 1e-9)


if __name__ == "__main__":
    print(f"torch {torch.__version__}, float64, FSDP2 dp{DP} over tp{TP}; norm on ranks 0 to 3 (ratio to right)")
    verdict = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (f"{folder}/store", verdict), DP * TP, start_method="fork")
    print("defect present" if (present := verdict.get()) else "defect not as described")
    sys.exit(0 if present else 1)
