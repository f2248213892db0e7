"""DeepSpeed: the float32 master weights of bf16 and fp16 training start from weights that were rounded first.

One rank, CPU. Exit code 0: defect present (masters differ from the float32 weights that the engine was given, and
writing them once more mends it). 1: gone. See deepspeed-rounded-masters.md.
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
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param  # noqa: E402


def engine_of(stage: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """An engine in bf16, and the float32 weights that its model had before."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "memory_efficient_linear": False},
        "zero_allow_untested_optimizer": True,
        **({"data_types": {"grad_accum_dtype": "fp32"}} if stage else {}),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    return engine, weights


def masters_of(engine: Any, stage: int) -> dict[str, torch.Tensor]:
    if stage:
        return {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    names = [name for name, _ in engine.module.named_parameters()]
    return {n: p.detach() for n, p in zip(names, engine.optimizer.fp32_groups[0], strict=True)}


def error(x: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return max(float((x[n] - right[n]).norm() / right[n].norm()) for n in right)


if __name__ == "__main__":
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    present = True
    print(f"torch {torch.__version__}, deepspeed {deepspeed.__version__}, bf16; masters against the weights given")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        deepspeed.init_distributed()
        for stage in (0, 1, 2, 3):
            engine, weights = engine_of(stage)
            masters = masters_of(engine, stage)
            wrong = error(masters, weights)
            rounded = all(torch.equal(m, m.bfloat16().float()) for m in masters.values())
            for name, parameter in engine.module.named_parameters():  # the remedy
                if stage:
                    safe_set_full_fp32_param(parameter, weights[name])
                else:
                    masters[name].data.copy_(weights[name])
            right = error(masters_of(engine, stage), weights)
            print(f"ZeRO-{stage}: {wrong:.1e} off, all of them bf16 numbers: {rounded}; REMEDY written again: {right}")
            present = present and wrong > 1e-4 and rounded and right == 0
        dist.destroy_process_group()
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
