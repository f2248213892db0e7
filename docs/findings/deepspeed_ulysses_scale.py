"""DeepSpeed: Ulysses sums gradients over its ranks at ZeRO 0 to 2, and averages them at ZeRO-3; bf16 ZeRO-1 raises.

Two ranks, CPU; each has half of the sequence, and its loss is the sum over its own tokens. Exit code 0: present, and
the remedy is right. 1: gone. See deepspeed-ulysses-scale.md.
"""

import logging
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
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

LENGTH = 32
TOKENS = torch.arange(LENGTH)[None] * 7 % 64
TARGETS = TOKENS.roll(-1, dims=1)
POSITIONS = torch.arange(LENGTH)[None]


def release() -> None:
    """Forgets process groups, also those of releases that have no function for it."""
    groups = deepspeed.utils.groups
    if hasattr(groups, "_release_process_group_references"):
        groups._release_process_group_references()
    else:
        for name in ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mpu"):
            setattr(groups, name, None)


def build() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.3,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def loss_sum(model: Any, part: slice) -> torch.Tensor:
    logits = model(input_ids=TOKENS[:, part], position_ids=POSITIONS[:, part], use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), TARGETS[:, part].flatten(), reduction="sum") / LENGTH


def right_norm() -> float:
    model = build()
    loss_sum(model, slice(None)).backward()
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))


def ulysses_norm(stage: int, rank: int, *, bf16: bool = False, remedy: bool = False) -> float:
    """The gradient norm that DeepSpeed reports; the right one is that of the gradients summed over the ranks."""
    model = build()
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=1
    )
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, **({"memory_efficient_linear": False} if stage == 3 else {})},
        **({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}} if bf16 else {}),
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=mpu)
    try:
        engine.backward(loss_sum(engine, slice(rank * LENGTH // 2, (rank + 1) * LENGTH // 2)) * (2 if remedy else 1))
        engine.step()
        return float(engine.get_global_grad_norm())
    finally:
        release()
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


def rank_main(rank: int, folder: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    deepspeed.init_distributed()
    right = right_norm()
    norms = [ulysses_norm(1, rank), ulysses_norm(2, rank), ulysses_norm(3, rank), ulysses_norm(3, rank, remedy=True)]
    if rank == 0:
        for name, norm in zip(("ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3, REMEDY loss x 2"), norms, strict=True):
            print(f"{name}: norm {norm:.5f}, of one process {right:.5f}, ratio {norm / right:.5f}")
        ratios = [norm / right for norm in norms]
        verdict.put(all(abs(r - wanted) < 1e-4 for r, wanted in zip(ratios, (1, 1, 0.5, 1), strict=True)))
    raised = "none"
    try:
        ulysses_norm(1, rank, bf16=True)
    except RuntimeError as error:  # rank 0 then waits in vain for rank 1, until that has gone
        raised = str(error).splitlines()[0]
    if rank == 1:
        print(f"ZeRO-1 in bf16 with float32 accumulation, rank 1: {raised}", flush=True)
        verdict.put("non-empty TensorList" in raised)
        os._exit(0)


if __name__ == "__main__":
    print(f"torch {torch.__version__}, deepspeed {deepspeed.__version__}, Ulysses over 2 ranks")
    verdict = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder, verdict), 2, start_method="fork")
    present = verdict.get() and verdict.get()
    print("defects present" if present else "defects not as described")
    sys.exit(0 if present else 1)
