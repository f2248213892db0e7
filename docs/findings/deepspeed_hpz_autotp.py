"""DeepSpeed: with AutoTP, the groups of ZeRO++'s second copies of weights mix parts of different ranks.

Four ranks on the CPU: tensor parallelism over two, ZeRO-3 with `zero_hpz_partition_size` 2. Exit code 0: the loss is
wrong with hpZ, right without it, and right with the remedy. 1: not so. See deepspeed-hpz-autotp.md.
"""

import logging
import os
import sys
import tempfile
import warnings
from collections import defaultdict
from typing import Any

warnings.filterwarnings("ignore", category=FutureWarning)
os.environ.update(MASTER_ADDR="localhost", WORLD_SIZE="4", CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
import transformers  # noqa: E402
from deepspeed.utils import groups  # noqa: E402

TOKENS = torch.arange(32).view(1, 32) * 7 % 64
CONFIG = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)


def release() -> None:
    """Forgets process groups, also those of releases that have no function for it."""
    if hasattr(groups, "_release_process_group_references"):
        groups._release_process_group_references()
    else:
        for name in ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mpu"):
            setattr(groups, name, None)


def model() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(CONFIG)


def losses_and_norm(*, hpz: int, remedied: bool) -> tuple[float, float]:
    """Returns the losses of two forward passes of one step added up, and the norm of its gradients."""
    if remedied:
        for first in (0, 1):  # ranks with the same part of tensor parallelism
            group = dist.new_group([first, first + 2])
            if dist.get_rank() % 2 == first:
                groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = group
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": hpz, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=own, optimizer=optimizer, config=settings, dist_init_required=False)
    total = 0.0
    for _ in range(2):
        loss = engine(input_ids=TOKENS, labels=TOKENS).loss
        total += float(loss.detach())
        engine.backward(loss)
        engine.step()
    norm = float(engine.get_global_grad_norm())
    engine.destroy()
    release()
    return total, norm


def rank_main(rank: int, folder: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 4), rank=rank, world_size=4)
    deepspeed.init_distributed(dist_backend="gloo")
    loss = model()(input_ids=TOKENS, labels=TOKENS).loss
    right = 2 * float(loss.detach())
    for what, hpz, remedied, is_right in (
        ("ZeRO-3", 1, False, True),
        ("ZeRO-3 with hpZ", 2, False, False),
        ("the same, REMEDY", 2, True, True),
    ):
        total, norm = losses_and_norm(hpz=hpz, remedied=remedied)
        if rank == 0:
            print(
                f"tp2, {what}: two losses {total:.6f} (right: {right:.6f}), norm {norm:.6f}",
                flush=True,
            )
            verdict.put((abs(total - right) < 1e-4) == is_right)


if __name__ == "__main__":
    print(f"deepspeed {deepspeed.__version__}, torch {torch.__version__}, 4 ranks, tensor parallelism over 2")
    verdict = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder, verdict), 4, start_method="fork")
    present = all(verdict.get() for _ in range(3))
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
