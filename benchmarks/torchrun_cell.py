"""Runs one cell under its own torchrun, as trainers are usually started; benchmarks/worlds.py times it beside the pool.

torchrun --nproc-per-node N benchmarks/torchrun_cell.py KWARGS.json
"""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from conformance.run.task import run_leg
from conformance.world import RankContext


def main() -> None:
    dist.init_process_group("gloo")
    context = RankContext(rank=dist.get_rank(), world_size=dist.get_world_size(), device="cpu", beat=lambda phase: None)
    run_leg(context, **json.loads(Path(sys.argv[1]).read_text()))
    dist.destroy_process_group()


if __name__ == "__main__":
    assert "RANK" in os.environ, "start this with torchrun"
    main()
