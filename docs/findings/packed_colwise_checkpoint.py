"""torch: a rank's part of stacked gate and up projections is saved and loaded as if it were one region.

transformers' plan ``packed_colwise`` cuts [gate; up] into equal parts of both, as torch's _StridedShard.
torch.distributed.checkpoint refuses to save that, and loads a whole tensor into it wrongly without a word.
Exit code 0: defect present. 1: gone. See packed-colwise-checkpoint.md.
"""

import logging
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

RANKS, EXPERTS, FEATURES, HIDDEN = 2, 2, 4, 3


def whole() -> Tensor:
    """(experts, gate and up, hidden)"""
    return torch.arange(EXPERTS * 2 * FEATURES * HIDDEN, dtype=torch.float64).view(EXPERTS, 2 * FEATURES, HIDDEN)


def part_of(rank: int) -> Tensor:
    """What packed_colwise gives a rank: its part of gate, and its part of up."""
    return torch.cat([half.chunk(RANKS, dim=1)[rank] for half in whole().chunk(2, dim=1)], dim=1)


def packed(mesh: Any, local: Tensor) -> DTensor:
    placement = _StridedShard(1, split_factor=2)
    shape, stride = whole().shape, whole().stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)


def error_of_saving(state: dict[str, Any], folder: str) -> str:
    try:
        dcp.save(state, checkpoint_id=folder)
    except CheckpointException as error:
        return str(error).strip().splitlines()[-1].partition(": ChunkStorage")[0]
    return ""


def rank_main(rank: int, folder: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    gathered = torch.equal(packed(mesh, part_of(rank)).full_tensor(), whole())
    refused = error_of_saving({"w": packed(mesh, part_of(rank))}, f"{folder}/packed")
    dcp.save({"w": distribute_tensor(whole(), mesh, [Shard(0)])}, checkpoint_id=f"{folder}/whole")
    loaded = {"w": packed(mesh, torch.zeros_like(part_of(rank)))}
    dcp.load(loaded, checkpoint_id=f"{folder}/whole")
    off = float((loaded["w"].to_local() - part_of(rank)).norm() / part_of(rank).norm())
    halves: dict[str, Any] = {  # REMEDY: gate and up as tensors of their own
        name: distribute_tensor(torch.zeros_like(half), mesh, [Shard(1)])
        for name, half in zip(("gate", "up"), whole().chunk(2, dim=1), strict=True)
    }
    apart = {name: distribute_tensor(h, mesh, [Shard(0)]) for name, h in zip(halves, whole().chunk(2, 1), strict=True)}
    dcp.save(apart, checkpoint_id=f"{folder}/apart")
    dcp.load(halves, checkpoint_id=f"{folder}/apart")
    remedy = torch.equal(torch.cat([h.to_local() for h in halves.values()], dim=1), part_of(rank))
    if rank == 0:
        print(f"full_tensor() is right: {gathered}")
        print(f"saving a packed tensor: {refused or 'done'}")
        print(f"loading a whole one into packed parts: rank 0 is {off:.2f} off, right: 0")
        print(f"REMEDY: gate and up apart: right: {remedy}")
        verdict.put(gathered and bool(refused) and off > 0.1 and remedy)


if __name__ == "__main__":
    print(f"torch {torch.__version__}, tp{RANKS}")
    verdict = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder, verdict), RANKS, start_method="fork")
    print("defect present" if (present := verdict.get()) else "defect not as described")
    sys.exit(0 if present else 1)
