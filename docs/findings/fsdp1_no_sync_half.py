"""torch: FullyShardedDataParallel adds up gradients of micro-batches in half precision under ``no_sync``.

``MixedPrecision(reduce_dtype=torch.float32)`` holds for reductions alone. Two ranks, CPU. Exit code 0: as described.
1: otherwise. See fsdp1-no-sync-half.md.
"""

import contextlib
import sys
import tempfile
import warnings
from typing import Any

warnings.filterwarnings("ignore")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch.distributed.fsdp import (  # noqa: E402
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn import Linear  # noqa: E402

RANKS = 2
LARGE, SMALL = 1.0, 2.0**-9  # gradients of two micro-batches; bf16 has no number between 1 and 1 + 2^-7
RIGHT = LARGE + SMALL


def accumulated(way: str) -> float:
    """The gradient of a weight after both micro-batches, the same on both ranks."""
    layer = Linear(1, 2, bias=False)
    half, full = torch.bfloat16, torch.float32
    model: Any
    if way == "FSDP2":
        model = fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=half, reduce_dtype=full))
    else:
        precision = MixedPrecision(param_dtype=half, reduce_dtype=full)
        device = torch.device("cpu")
        model = FullyShardedDataParallel(layer, mixed_precision=precision, device_id=device, use_orig_params=True)
    for gradient, is_last in ((LARGE, False), (SMALL, True)):
        if way == "FSDP2":
            model.set_requires_gradient_sync(is_last)
        with model.no_sync() if way == "no_sync" and not is_last else contextlib.nullcontext():
            model(torch.full((1, 1), gradient)).sum().backward()
    (weight,) = model.parameters()
    own = weight.grad.to_local() if way == "FSDP2" else weight.grad
    return float(own.mean())


def rank_main(rank: int, store: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    found = {way: accumulated(way) for way in ("no_sync", "reduced each time", "FSDP2")}
    if rank == 0:
        for way, number in found.items():
            print(f"{way:20} {number:.9f} (right: {RIGHT:.9f})")
        verdict.put(found["no_sync"] == LARGE and found["reduced each time"] == found["FSDP2"] == RIGHT)


if __name__ == "__main__":
    print(f"torch {torch.__version__}, gradients {LARGE:g} and {SMALL:g}, param_dtype bfloat16, reduce_dtype float32")
    verdict = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (f"{folder}/store", verdict), RANKS, start_method="fork")
    print("as described" if (present := verdict.get()) else "not as described")
    sys.exit(0 if present else 1)
