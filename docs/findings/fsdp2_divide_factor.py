"""torch: FSDP2 divides twice by ``set_gradient_divide_factor`` on a mesh of one rank.

It divides before and after its reduction, and on one rank, where there is none, once more. In float32 and bf16 it is
right, because there the division is part of the reduction; in float64 and fp16, and with sums forced, it is not.
Exit code 0: defect present. 1: gone. See fsdp2-divide-factor.md.
"""

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import Linear

RANKS, FACTOR = 2, 4.0
WAYS: dict[str, tuple[torch.dtype, bool]] = {
    "float32": (torch.float32, False),
    "float32, forced sums": (torch.float32, True),
    "float64": (torch.float64, False),
}


def gradient(mesh: Any, dtype: torch.dtype, *, forced: bool, by_hand: bool) -> float:
    """The mean gradient of a linear layer whose gradient is 1 on every rank."""
    layer = Linear(4, 4, bias=False, dtype=dtype)
    model: Any = fully_shard(layer, mesh=mesh)
    if not by_hand:
        model.set_gradient_divide_factor(FACTOR)
        model.set_force_sum_reduction_for_comms(forced or mesh.size() > 1)  # gloo has no other way on several ranks
    loss = model(torch.ones(1, 4, dtype=dtype)).sum()
    # FSDP2 averages over the ranks of the mesh.
    (loss * mesh.size() / FACTOR if by_hand else loss).backward()
    return float(layer.weight.grad.full_tensor().mean())  # type: ignore[union-attr]


def rank_main(rank: int, store: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    whole = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("several", "one"))
    found: dict[str, dict[str, float]] = {}
    for name, (dtype, forced) in WAYS.items():
        found[name] = {axis: gradient(whole[axis], dtype, forced=forced, by_hand=False) for axis in ("several", "one")}
        found[name]["by hand"] = gradient(whole["one"], dtype, forced=forced, by_hand=True)
    if rank == 0:
        for name, numbers in found.items():
            print(f"{name:22} {RANKS} ranks: {numbers['several']:.4f} (right: {RANKS / FACTOR:.4f})")
            for way in ("one", "by hand"):
                text = "one rank" if way == "one" else "REMEDY: divided before"
                right = 1 / FACTOR
                print(f"{'':22} {text}: {numbers[way]:.4f} (right: {right:.4f}), ratio {numbers[way] / right:.4f}")
        right = all(n["several"] == RANKS / FACTOR and n["by hand"] == 1 / FACTOR for n in found.values())
        wrong = [name for name, n in found.items() if n["one"] == 1 / FACTOR**2]
        verdict.put(right and found["float32"]["one"] == 1 / FACTOR and wrong == ["float32, forced sums", "float64"])


if __name__ == "__main__":
    print(f"torch {torch.__version__}, FSDP2, divide factor {FACTOR:g}")
    verdict = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (f"{folder}/store", verdict), RANKS, start_method="fork")
    print("defect present" if (present := verdict.get()) else "defect not as described")
    sys.exit(0 if present else 1)
