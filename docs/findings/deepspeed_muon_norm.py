"""DeepSpeed: with Muon, ZeRO 1 to 3 clip by the norm of the orthogonalized updates, not of the gradients.

Two ranks on the CPU, one step with `gradient_clipping` 1. Exit code 0: the reported norm is more than five times that
of the gradients, and matrices move by less than a fifth of Muon's update. 1: not so. See deepspeed-muon-norm.md.
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
from torch import nn  # noqa: E402

LR, CLIP = 0.01, 1.0
torch.compiler.set_stance("force_eager")  # compiling Muon's functions takes minutes on a CPU


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))


def loss_of(module: Any) -> torch.Tensor:
    torch.manual_seed(1)
    result: torch.Tensor = module(torch.randn(16, 64)).square().sum()
    return result


def norm_and_update(stage: int) -> tuple[float | None, float]:
    """Returns the norm that the engine reports, and the norm of a matrix's update / learning rate."""
    own = model()
    before = own[0].weight.detach().clone()
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "Muon", "params": {"lr": LR, "momentum": 0.95, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_scatter": False},
    }
    engine, *_ = deepspeed.initialize(
        model=own, model_parameters=own.parameters(), config=settings, dist_init_required=False
    )
    engine.backward(loss_of(engine))
    engine.step()
    norm = engine.get_global_grad_norm()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        moved = float((engine.module[0].weight.detach() - before).norm()) / LR
    engine.destroy()
    return None if norm is None else float(norm), moved


def rank_main(rank: int, folder: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    deepspeed.init_distributed(dist_backend="gloo")
    plain = model()
    loss_of(plain).backward()
    right = float(nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]))
    _, whole = norm_and_update(0)  # which clips first, as torch's Muon is used
    for stage in (1, 2, 3):
        norm, moved = norm_and_update(stage)
        if rank == 0:
            whose = f"norm {norm:.4f} (of the gradients: {right:.4f})"
            print(f"ZeRO-{stage}: {whose}, update of a matrix {moved:.4f} (ZeRO-0: {whole:.4f})", flush=True)
            verdict.put(norm is not None and norm > 5 * right and moved < whole / 5)


if __name__ == "__main__":
    print(f"deepspeed {deepspeed.__version__}, torch {torch.__version__}, 2 ranks, 8 matrices of 64 x 64")
    verdict = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder, verdict), 2, start_method="fork")
    present = all(verdict.get() for _ in range(3))
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
