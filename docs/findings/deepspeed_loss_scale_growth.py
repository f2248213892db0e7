"""DeepSpeed: the update with which the loss scale of fp16 grows is made with half of its gradients, at all ZeRO stages.

One rank, CPU. Exit code 0: defect present (plain SGD moves a weight by half where the scale has grown, and by the whole
where it grows after the update). 1: gone. See deepspeed-loss-scale-growth.md.
"""

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
from deepspeed.accelerator import get_accelerator  # noqa: E402

WINDOW, NEVER, LR, UPDATES = 2, 10**9, 2.0**-3, 4


def engine_of(stage: int) -> Any:
    """An engine of a model with one weight, 1.0, whose gradient is 1.0."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": WINDOW, "hysteresis": 1},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    return engine


def updates(stage: int, *, mended: bool) -> list[tuple[float, float]]:
    """(how far the weight moves, in units of the learning rate; the scale after it) of some updates."""
    engine, weights, scales = engine_of(stage), [], []
    optimizer = engine.optimizer
    scaler = optimizer.loss_scale_config if stage == 0 else optimizer.loss_scaler
    for _ in range(UPDATES + 1):
        loss = engine(torch.ones(1, 1, dtype=torch.float16)).float().sum()  # the weight itself
        weights.append(float(loss))
        # docs/findings/deepspeed-zero0-half.md: ZeRO-0 never multiplies the loss by the scale.
        engine.backward(loss * (float(scaler.cur_scale) if stage == 0 else 1.0))
        scaler.scale_window = NEVER if mended else WINDOW
        engine.step()
        if mended and (scaler.cur_iter - scaler.last_overflow_iter - 1) % WINDOW == 0:
            scaler.cur_scale *= scaler.scale_factor
        scales.append(float(scaler.cur_scale))
    return [((before - after) / LR, scale) for before, after, scale in zip(weights, weights[1:], scales, strict=False)]


if __name__ == "__main__":
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    get_accelerator().is_fp16_supported = lambda: True  # docs/findings/deepspeed-cpu-fp16.md
    print(f"torch {torch.__version__}, deepspeed {deepspeed.__version__}; the scale doubles after {WINDOW} updates")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        deepspeed.init_distributed()
        runs = {stage: (updates(stage, mended=False), updates(stage, mended=True)) for stage in range(4)}
        dist.destroy_process_group()
    print("updates of one weight in units of the learning rate (right: 1.00), and the scale after each")
    present = True
    for stage, (wrong, mended) in runs.items():
        for name, found in (("", wrong), (" REMEDY grows after the update", mended)):
            print(f"ZeRO-{stage}{name}: {', '.join(f'{moved:.2f} ({scale:.0f})' for moved, scale in found)}")
        print(f"  ratio where the scale has grown: {wrong[2][0] / mended[2][0]:.2f}")
        present &= [moved for moved, _ in wrong] == [1.0, 1.0, 0.5, 1.0]
        present &= mended == [(1.0, 16.0), (1.0, 32.0), (1.0, 32.0), (1.0, 64.0)]
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
