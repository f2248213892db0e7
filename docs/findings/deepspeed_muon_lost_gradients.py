"""DeepSpeed: with Muon, ZeRO-2 loses gradients of biases where sums have another dtype than the model.

Two ranks on the CPU, one backward pass of a model in bf16, gradients summed in float32. Exit code 0: with Muon, the
gradient of some bias is zero that is not zero with AdamW. 1: not so. See deepspeed-muon-lost-gradients.md.
"""

import logging
import os
import sys
import tempfile
import warnings
from collections import defaultdict
from typing import Any

warnings.filterwarnings("ignore", category=FutureWarning)
os.environ.update(MASTER_ADDR="localhost", WORLD_SIZE="2", CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from deepspeed.utils import safe_get_full_grad  # noqa: E402
from torch import nn  # noqa: E402

torch.compiler.set_stance("force_eager")  # compiling Muon's functions takes minutes on a CPU
LAYERS = 6


def gradients(optimizer: str) -> dict[str, float]:
    """Returns the norm of each gradient after a backward pass at ZeRO-2."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": optimizer, "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings, dist_init_required=False
    )
    torch.manual_seed(1)
    engine.backward(engine(torch.randn(16, 64).bfloat16()).float().square().sum())
    found = {name: float(safe_get_full_grad(p).float().norm()) for name, p in engine.module.named_parameters()}
    engine.step()
    engine.destroy()
    return found


def rank_main(rank: int, folder: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    deepspeed.init_distributed(dist_backend="gloo")
    right, found = gradients("AdamW"), gradients("Muon")
    if rank == 0:
        lost = [name for name in right if "bias" in name and right[name] > 0 and found[name] == 0]
        for name in (name for name in right if "bias" in name):
            print(f"{name}: norm of the gradient {found[name]:.4f} with Muon, {right[name]:.4f} with AdamW")
        verdict.put(bool(lost))


if __name__ == "__main__":
    print(
        f"deepspeed {deepspeed.__version__}, torch {torch.__version__}, 2 ranks, {LAYERS} layers of 64 features, bf16"
    )
    verdict = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder, verdict), 2, start_method="fork")
    present = verdict.get()
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
