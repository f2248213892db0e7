"""DeepSpeed: the loss scale of fp16 grows one update later than its window says, at first and after every overflow.

One rank, CPU. Exit code 0: defect present (window + 1 updates, where torch's GradScaler takes window, and beginning to
count one update earlier mends it). 1: gone. See deepspeed-loss-scale-window.md.
"""

import logging
import os
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable

warnings.filterwarnings("ignore", category=FutureWarning)
os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost")
import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler  # noqa: E402

WINDOW = 4
Update = Callable[[bool], float]  # takes whether gradients overflow, and gives the scale after it


def of_torch() -> Update:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=WINDOW)

    def update(overflows: bool) -> float:
        scaler.scale(parameter.sum())  # the scaler's tensors are made at its first use
        parameter.grad = torch.full((1,), torch.inf if overflows else 1.0)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    return update


def of_deepspeed(*, mended: bool) -> Update:
    scaler = DynamicLossScaler(
        init_scale=2.0**8, scale_window=WINDOW, min_scale=1.0, delayed_shift=1, consecutive_hysteresis=False
    )
    scaler.last_overflow_iter -= mended

    def update(overflows: bool) -> float:
        scaler.update_scale(overflows)
        scaler.last_overflow_iter -= mended and overflows
        return float(scaler.cur_scale)

    return update


def updates_until_it_grows(update: Update) -> list[int]:
    """The first time, the second time, and the first time after an overflow."""
    scale, counts = 2.0**8, []
    for overflows in (False, False, True):
        scale = update(True) if overflows else scale
        counts.append(1)
        while (after := update(False)) == scale:
            counts[-1] += 1
        scale = after
    return counts


if __name__ == "__main__":
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    print(
        f"torch {torch.__version__}, deepspeed {deepspeed.__version__}; window of {WINDOW} updates without an overflow"
    )
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        deepspeed.init_distributed()
        right = updates_until_it_grows(of_torch())
        wrong = updates_until_it_grows(of_deepspeed(mended=False))
        mended = updates_until_it_grows(of_deepspeed(mended=True))
        dist.destroy_process_group()
    print("updates until the scale doubles: the first time, again, and after an overflow")
    for name, counts in (("torch", right), ("deepspeed", wrong), ("REMEDY counting from one update earlier", mended)):
        print(f"{name}: {', '.join(map(str, counts))}; ratio {counts[0] / right[0]:.2f}")
    present = right == [WINDOW] * 3 and wrong == [WINDOW + 1, WINDOW, WINDOW + 1] and mended == right
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
