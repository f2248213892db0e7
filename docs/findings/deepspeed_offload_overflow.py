"""DeepSpeed: after one overflow in fp16, ZeRO-1 and 2 with an offloaded optimizer skip every update from there on.

One rank, CPU. Exit code 0: defect present (the loss scale falls at every step after one that overflowed, and stays with
the buffers cleared, without offload, or where gradients are added up in fp16). 1: gone. See
deepspeed-offload-overflow.md.
"""

import logging
import os
import sys
import tempfile
import warnings
from collections import defaultdict

warnings.filterwarnings("ignore", category=FutureWarning)
os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost")
import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402

STEPS, OVERFLOW = 5, 1
STUCK, RIGHT = [256, 128, 64, 32, 16], [256, 128, 128, 128, 128]


def scales(stage: int, *, offload: bool, dtype: str = "fp32", mended: bool = False) -> list[int]:
    """The loss scale after each of some steps, of which one overflows."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    zero = {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {})}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
        "data_types": {"grad_accum_dtype": dtype},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    found = []
    for step in range(STEPS):
        loss = engine(torch.ones(1, 8, dtype=torch.float16)).float().sum()
        engine.backward(loss * (1e12 if step == OVERFLOW else 1.0))
        engine.step()
        if mended and not engine.was_step_applied():
            wrapper = engine.optimizer
            for gradients in (wrapper.averaged_gradients, wrapper.all_grad_tensors):
                gradients.update(dict.fromkeys(gradients))
        found.append(int(engine.optimizer.loss_scale))
    return found


if __name__ == "__main__":
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    get_accelerator().is_fp16_supported = lambda: True  # docs/findings/deepspeed-cpu-fp16.md
    print(f"torch {torch.__version__}, deepspeed {deepspeed.__version__}; loss scale after each of {STEPS} steps")
    print(f"right, where step {OVERFLOW} alone overflows: {RIGHT}")
    present = True
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        deepspeed.init_distributed()
        for stage in (1, 2, 3):
            wrong, plain = scales(stage, offload=True), scales(stage, offload=False)
            half = scales(stage, offload=True, dtype="fp16")
            mended = scales(stage, offload=True, mended=True) if stage < 3 else RIGHT
            print(f"ZeRO-{stage}, offload: {wrong}; ratio to the right one at the end: {wrong[-1] / RIGHT[-1]:.3f}")
            print(f"  without offload: {plain}; gradients added up in fp16: {half}")
            print(f"  REMEDY buffers cleared after a skipped step: {mended}" if stage < 3 else "  not affected")
            present &= wrong == (STUCK if stage < 3 else RIGHT) and plain == half == mended == RIGHT
        dist.destroy_process_group()
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
