"""DeepSpeed: loading a universal checkpoint at ZeRO-3 gives all parameter groups the first one's settings and counter.

One rank, CPU, the usual two groups (weight decay for matrices, none for biases), torch's AdamW. Exit code 0: defect
present, and the page's remedy mends it. 1: gone. See deepspeed-universal-groups.md.
"""

import argparse
import logging
import os
import sys
import tempfile
import warnings
from collections import defaultdict
from typing import Any

warnings.filterwarnings("ignore", category=FutureWarning)
os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost")
import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.checkpoint import ds_to_universal  # noqa: E402

UPDATES = 3  # before the checkpoint is saved


def fresh(stage: int, universal: bool = False) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "memory_efficient_linear": False},
        "checkpoint": {"load_universal": universal},
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)[0]


def train(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()


def shown(engine: Any) -> tuple[list[float], list[float]]:
    """The weight decay of each group, and the number of updates that each optimizer state has counted."""
    optimizer = engine.basic_optimizer
    decay = [group["weight_decay"] for group in optimizer.param_groups]
    return decay, [float(state["step"]) for state in optimizer.state.values()]


def resumed(folder: str, stage: int) -> Any:
    """An engine that has loaded the universal form of a checkpoint of ``UPDATES`` steps."""
    engine = fresh(stage)
    for _ in range(UPDATES):
        train(engine)
    engine.save_checkpoint(folder, tag="native")
    given: dict[str, Any] = {"input_folder": f"{folder}/native", "output_folder": f"{folder}/universal"}
    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    flags = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    ds_to_universal.main(argparse.Namespace(**given, **workers, **flags))
    engine = fresh(stage, universal=True)
    engine.load_checkpoint(folder, tag="universal")
    return engine


if __name__ == "__main__":
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    print(f"torch {torch.__version__}, deepspeed {deepspeed.__version__}; {UPDATES} updates, loaded, one more")
    right = [0.1, 0.0], [UPDATES + 1.0] * 2
    found, mended = {}, right
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        deepspeed.init_distributed()
        for stage in (2, 3):
            engine = resumed(f"{folder}/{stage}", stage)
            train(engine)
            found[stage] = shown(engine)
        engine = resumed(f"{folder}/again", 3)
        for group, own in zip(engine.basic_optimizer.param_groups, right[0], strict=True):
            group["weight_decay"] = own
        for state in engine.basic_optimizer.state.values():
            state["step"] = state["step"].clone()
        train(engine)
        mended = shown(engine)
        dist.destroy_process_group()
    print(f"right    weight decay {right[0]}, updates {right[1]}")
    for name, (decay, steps) in {"ZeRO-2": found[2], "ZeRO-3": found[3], "REMEDY": mended}.items():
        print(f"{name}   weight decay {decay}, updates {steps}")
    present = found[2] == mended == right and found[3] == ([0.1, 0.1], [UPDATES + 2.0] * 2)
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
