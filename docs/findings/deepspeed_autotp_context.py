"""DeepSpeed: AutoTP's check of the first inputs opens the first rank's GPU in every other rank.

Two ranks, tensor parallelism over both; on two GPUs where there are two, else on the CPU. Exit code 0: what the first
rank sent is unpickled where it was, with the remedy in host memory. 1: not so. See deepspeed-autotp-context.md.
"""

import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from typing import Any

warnings.filterwarnings("ignore", category=FutureWarning)
os.environ.update(MASTER_ADDR="localhost", WORLD_SIZE="2")
import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
import transformers  # noqa: E402

ON_GPUS = torch.cuda.device_count() > 1


def release() -> None:
    """Forgets process groups, also those of releases that have no function for it."""
    groups = deepspeed.utils.groups
    if hasattr(groups, "_release_process_group_references"):
        groups._release_process_group_references()
    else:
        for name in ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mpu"):
            setattr(groups, name, None)


def engine_of() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)[0]


def in_host_memory(engine: Any) -> None:
    """The remedy: the check gets copies."""
    own = engine.first_dataloader_check
    check = engine.module._forward_pre_hooks[own.id]
    own.remove()
    engine.first_dataloader_check = engine.module.register_forward_pre_hook(
        lambda module, args, kwargs: check(module, args, {"input_ids": kwargs["input_ids"].cpu()}),
        prepend=True, with_kwargs=True,
    )  # fmt: skip


def forward(engine: Any, device: str) -> list[Any]:
    """One forward pass. Returns where torch.load was told to put what it unpickled, and where that then was."""
    places, load = list[Any](), torch.load

    def watched(*args: Any, **options: Any) -> Any:
        loaded = load(*args, **options)
        places.append((options.get("map_location"), str(loaded._untyped_storage.device)))
        return loaded

    torch.load = watched
    engine(input_ids=torch.arange(32, device=device)[None], use_cache=False)
    torch.load = load
    return places


def rank_main(rank: int, folder: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.logger.setLevel(logging.ERROR)
    device, backend = (f"cuda:{rank}", "nccl") if ON_GPUS else ("cpu", "gloo")
    if ON_GPUS:
        torch.cuda.set_device(device)
    else:
        deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    deepspeed.init_distributed(dist_backend=backend)
    for remedied, expected in ((True, "cpu"), (False, "cuda:0" if ON_GPUS else "cpu")):
        engine = engine_of()
        if remedied:
            in_host_memory(engine)
        places = forward(engine, device)
        release()
        dist.barrier()
        if rank == 1:
            print(f"{'REMEDY' if remedied else 'shipped'}: unpickled (map_location, device) {places}", flush=True)
            verdict.put(places == [(None, expected)])
            if ON_GPUS:
                subprocess.run(["nvidia-smi", "--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader"])
        dist.barrier()


if __name__ == "__main__":
    print(f"deepspeed {deepspeed.__version__}, torch {torch.__version__}, tensor parallelism over 2 ranks")
    verdict = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder, verdict), 2, start_method="spawn")
    print("defect present" if (present := verdict.get() and verdict.get()) else "defect not as described")
    sys.exit(0 if present else 1)
