"""megatron-core: Muon orthogonalizes gate and up projections as one matrix, and by default each rank's part alone.

Two ranks on the CPU, with TensorParallelMuon, the class that megatron-core trains with. It needs the package
emerging-optimizers, so Python 3.12. Exit code 0: both updates are more than 10 % off those of whole Hugging Face
matrices, and those of tp_mode "duplicated" are not. 1: not so. See megatron-muon-parts.md.
"""

from inspect import signature
from typing import Any

import megatron_on_cpu as on_cpu
import torch
import torch.distributed as dist

try:  # megatron-core 0.18 and newer
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
except ImportError:
    from megatron.core.optimizer.muon import TensorParallelMuon
from megatron.core.process_groups_config import ProcessGroupCollection

ROWS, COLUMNS = 96, 64
MODE = "tp_mode" if "tp_mode" in signature(TensorParallelMuon).parameters else "mode"  # until 0.17


def update(gradient: torch.Tensor, *, cut: int | None = None, mode: str = "duplicated") -> torch.Tensor:
    """Returns this rank's update of a matrix that is zero, divided by the learning rate. ``cut``: the sharded axis."""
    own = gradient if cut is None else gradient.chunk(2, cut)[dist.get_rank()].contiguous()
    weight: Any = torch.nn.Parameter(torch.zeros_like(own))
    weight.partition_dim = -1 if cut is None else cut
    groups = ProcessGroupCollection()
    groups.tp = groups.expt_tp = dist.group.WORLD
    options: dict[str, Any] = {"pg_collection": groups, "split_qkv": False, "scale_mode": "shape_scaling"}
    optimizer = TensorParallelMuon([weight], 1.0, 0.95, weight_decay=0.0, **{MODE: mode}, **options)
    weight.grad = own.clone()
    optimizer.step()
    moved: torch.Tensor = -weight.detach()
    return moved


def off(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).norm() / right.norm())


def present(rank: int) -> bool:
    torch.manual_seed(0)
    gate, up = torch.randn(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS)
    whole = torch.cat([update(gate), update(up)])
    fused = off(update(torch.cat([gate, up])), whole)
    errors = {"gate and up as one matrix": fused}
    for mode in ("blockwise", "duplicated"):
        for axis in (0, 1):
            right = update(gate).chunk(2, axis)[rank]
            errors[f"tp2, cut along axis {axis}, {mode}"] = off(update(gate, cut=axis, mode=mode), right)
    if rank == 0:
        for name, error in errors.items():
            print(f"{name}: {error:.1e} off", flush=True)
    wrong = [error for name, error in errors.items() if "duplicated" not in name]
    return min(wrong) > 0.1 and all(error < 1e-3 for name, error in errors.items() if "duplicated" in name)


if __name__ == "__main__":
    torch.set_float32_matmul_precision("highest")
    on_cpu.two_ranks(present)
