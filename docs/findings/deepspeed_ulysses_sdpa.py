"""DeepSpeed: Ulysses drops attention masks, so that sdpa silently ignores packed documents and sliding windows.

Two ranks, CPU, each with half of the sequence. Exit code 0: present, and the remedy is right. 1: gone. See
deepspeed-ulysses-sdpa.md.
"""

import logging
import os
import sys
import tempfile
from collections import defaultdict
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="localhost", WORLD_SIZE="2")
import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import Tensor
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

LENGTH, WINDOW = 32, 8
TOKENS = torch.arange(LENGTH)[None] * 7 % 64
CASES = {
    "one document": (torch.arange(LENGTH)[None], None),
    "two documents": (torch.arange(LENGTH)[None] % 20, None),
    f"one document, window {WINDOW}": (torch.arange(LENGTH)[None], WINDOW),
}


def release() -> None:
    """Forgets process groups, also those of releases that have no function for it."""
    groups = deepspeed.utils.groups
    if hasattr(groups, "_release_process_group_references"):
        groups._release_process_group_references()
    else:
        for name in ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mpu"):
            setattr(groups, name, None)


def sdpa_by_position(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
    """The remedy: a mask from the positions of all ranks, after the exchange. q, k, v: (rows, heads, length, E)."""
    positions = options["position_ids"][0]
    document, at = (positions == 0).cumsum(0), torch.arange(len(positions))
    distance = at[:, None] - at[None]
    window = options.get("sliding_window") or len(positions)
    seen = (document[:, None] == document[None]) & (distance >= 0) & (distance < window)
    scaling = options.get("scaling")
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


def build(window: int | None, attention: str) -> Any:
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, sliding_window=window, initializer_range=0.3,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def error(case: str, attention: str, part: slice) -> float:
    """The relative error of this rank's logits, against a model with the whole sequence and transformers' masks."""
    positions, window = CASES[case]
    with torch.no_grad():
        right = build(window, "eager")(input_ids=TOKENS, position_ids=positions, use_cache=False).logits[:, part]
        model = build(window, attention)
        original = ALL_ATTENTION_FUNCTIONS[attention]
        UlyssesSPAttentionHF.register_with_transformers(
            model, core_attn_implementation=attention, sequence_parallel_size=2, micro_batch_size=1
        )
        logits = model(input_ids=TOKENS[:, part], position_ids=positions[:, part], use_cache=False).logits
    ALL_ATTENTION_FUNCTIONS[attention] = original
    release()
    return float((logits - right).norm() / right.norm())


def rank_main(rank: int, folder: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    deepspeed.init_distributed()
    AttentionInterface.register("by_position", sdpa_by_position)
    part = slice(rank * LENGTH // 2, (rank + 1) * LENGTH // 2)
    wrong = {case: error(case, "sdpa", part) for case in CASES}
    right = {case: error(case, "by_position", part) for case in CASES}
    if rank == 1:  # the first document of rank 0 is whole
        for case in CASES:
            print(f"{case}: logits with sdpa {wrong[case]:.2g} off; REMEDY mask from positions {right[case]:.2g}")
        one, *others = wrong.values()
        verdict.put(one < 1e-5 and min(others) > 0.1 and max(right.values()) < 1e-5)


if __name__ == "__main__":
    print(f"torch {torch.__version__}, deepspeed {deepspeed.__version__}, Ulysses over 2 ranks")
    verdict = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder, verdict), 2, start_method="fork")
    print("defect present" if (present := verdict.get()) else "defect not as described")
    sys.exit(0 if present else 1)
