"""DeepSpeed: ZeRO-0 reports no gradient norm in float32, and under AutoTP in bf16 it clips by a norm that lacks shards.

Two ranks, CPU, tensor parallelism over both. Exit code 0: both present, and the remedies are right. 1: gone. See
deepspeed-zero0-norm.md.
"""

import logging
import math
import os
import sys
import tempfile
import warnings
from collections import defaultdict
from typing import Any

warnings.filterwarnings("ignore", category=FutureWarning)
os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="localhost", WORLD_SIZE="2")
import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
import transformers  # noqa: E402
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META  # noqa: E402

CLIP = 1e-3  # active


def release() -> None:
    """Forgets process groups, also those of releases that have no function for it."""
    groups = deepspeed.utils.groups
    if hasattr(groups, "_release_process_group_references"):
        groups._release_process_group_references()
    else:
        for name in ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mpu"):
            setattr(groups, name, None)


def gradients_of(precision: str) -> Any:
    """An engine that has made a backward pass and no step yet."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.3,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": 0},
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    tokens = torch.arange(32)[None] % 64
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    return engine


def cut(parameter: torch.nn.Parameter) -> bool:
    note = getattr(parameter, DS_AUTOTP_UC_META, None)
    return note is not None and not note["replicated"]


def right_norm(engine: Any) -> float:
    """The norm in which sharded parameters count on both ranks, and whole parameters on one rank."""
    total = torch.zeros((), dtype=torch.float64)
    for parameter in engine.module.parameters():
        square = parameter.grad.double().square().sum()
        if cut(parameter):
            dist.all_reduce(square)
        total += square
    return math.sqrt(total)


def rank_main(rank: int, folder: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    deepspeed.init_distributed()
    reported, right = [], []
    for precision, mark in (("fp32", False), ("bf16", False), ("bf16", True)):
        engine = gradients_of(precision)
        right.append(right_norm(engine))
        for parameter in engine.module.parameters():
            if mark and cut(parameter):
                parameter.grad.tensor_model_parallel = True  # the remedy
        engine.step()
        reported.append(engine.get_global_grad_norm())
        release()
    if rank == 0:
        print(f"fp32: norm {right[0]:.6f}, reported {reported[0]}; REMEDY compute it before step()")
        print(f"bf16: norm {right[1]:.6f}, clipped by {reported[1]:.6f} (ratio {reported[1] / right[1]:.4f})")
        print(f"  REMEDY gradients marked as pieces: {reported[2]:.6f} (ratio {reported[2] / right[2]:.4f})")
        verdict.put(reported[0] is None and reported[1] / right[1] < 0.9 and abs(reported[2] / right[2] - 1) < 1e-3)


if __name__ == "__main__":
    print(f"torch {torch.__version__}, deepspeed {deepspeed.__version__}, ZeRO-0, tensor parallelism over 2 ranks")
    verdict = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder, verdict), 2, start_method="fork")
    print("defect present" if (present := verdict.get()) else "defect not as described")
    sys.exit(0 if present else 1)
