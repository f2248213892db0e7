"""Runs one cell under its own torchrun, as trainers are usually started; cells_a_minute.py compares it to the pool.

torchrun --nproc-per-node N benchmarks/torchrun_cell.py cpu|cuda KWARGS.json
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from conformance.runtime import RankContext
from conformance.worker.phase import run_phase


def main() -> None:
    device, kwargs = sys.argv[1:]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    context = RankContext(rank=rank, world_size=size, device=device, beat=lambda phase: None)
    run_phase(context, **json.loads(Path(kwargs).read_text()))
    dist.destroy_process_group()


if __name__ == "__main__":
    assert "RANK" in os.environ, "start this with torchrun"
    main()
