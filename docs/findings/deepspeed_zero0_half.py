"""DeepSpeed: ZeRO-0 in half precision makes an optimizer step when it is built, and in fp16 never scales the loss.

One rank, CPU. Exit code 0: both present (fp16 only where the CPU has it), and the remedies work. 1: gone. See
deepspeed-zero0-half.md.
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

LR, DECAY, SCALE = 0.1, 0.5, 2**12


def engine_of(stage: int, half: str, optimizer: str) -> Any:
    """An engine of a model with one weight, 1.0, whose gradient is 1.0."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    made = (
        torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
        if optimizer == "adamw"
        else torch.optim.SGD(model.parameters(), lr=LR)
    )
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        half: {"enabled": True, **({"initial_scale_power": 12} if half == "fp16" else {})},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=made, config=settings, dist_init_required=False)
    return engine


def master_of(engine: Any) -> float:
    return float(engine.basic_optimizer.param_groups[0]["params"][0].detach().flatten()[0])


def updated(engine: Any, scale: float = 1.0) -> float:
    """The amount by which one step lowers the master weight."""
    before = master_of(engine)
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.ones(1, 1, dtype=dtype)).float().sum() * scale)
    engine.step()
    return before - master_of(engine)


def construction() -> bool:
    engine, other = engine_of(0, "bf16", "adamw"), engine_of(1, "bf16", "adamw")
    steps = [int(s["step"]) for s in engine.basic_optimizer.state.values()]
    print(f"bf16, AdamW, not trained: weight {master_of(engine):.3f} (ZeRO-1: {master_of(other):.3f}, right: 1.000)")
    print(f"  steps counted: {steps} (right: none); decay alone explains {1 - LR * DECAY:.3f}")
    first, right = updated(engine), updated(other)
    clean = engine_of(0, "bf16", "adamw")
    clean.basic_optimizer.param_groups[0]["params"][0].data.fill_(1.0)
    clean.basic_optimizer.state.clear()
    mended = updated(clean)
    print(f"  first update {first:.4f}, ZeRO-1 {right:.4f}, ratio {first / right:.3f}")
    print(f"  REMEDY weight written again, state cleared: {mended:.4f}")
    return steps == [1] and abs(first / right - 1) > 0.1 and abs(mended / right - 1) < 1e-3


def unscaled() -> bool:
    if not get_accelerator().is_fp16_supported():
        print("fp16: not supported on this CPU, not run")
        return True
    wrong, right = updated(engine_of(0, "fp16", "sgd")), updated(engine_of(1, "fp16", "sgd"))
    mended = updated(engine_of(0, "fp16", "sgd"), scale=SCALE)
    print(f"fp16, SGD: first update {wrong:.3e}, ZeRO-1 {right:.3e}, ratio 1/{right / wrong:.0f} (loss scale {SCALE})")
    print(f"  REMEDY loss times the scale: {mended:.3e}")
    return abs(right / wrong / SCALE - 1) < 0.01 and abs(mended / right - 1) < 1e-3


if __name__ == "__main__":
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    print(f"torch {torch.__version__}, deepspeed {deepspeed.__version__}, ZeRO-0")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        deepspeed.init_distributed()
        present = all([construction(), unscaled()])
        dist.destroy_process_group()
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
