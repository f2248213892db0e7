"""DeepSpeed: an engine changes how the next engine in the process works: AutoTP breaks it, ZeRO-3 replaces F.linear.

Two ranks, CPU. Exit code 0: defects present, and the clean-up works. 1: gone. See deepspeed-global-state.md.
"""

import gc
import logging
import os
import sys
import tempfile
import warnings
import weakref
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
from deepspeed.module_inject import set_autotp_mode  # noqa: E402
from deepspeed.runtime.zero import parameter_offload  # noqa: E402

LINEAR = torch.nn.functional.linear


def release() -> None:
    """Forgets process groups, also those of releases that have no function for it."""
    groups = deepspeed.utils.groups
    if hasattr(groups, "_release_process_group_references"):
        groups._release_process_group_references()
    else:
        for name in ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mpu"):
            setattr(groups, name, None)


def one_step(stage: int, tensor_parallel: bool) -> Any:
    """Train a tiny model for a step and destroy the engine; returns a weak reference to the model."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **({"tensor_parallel": {"autotp_size": 2}} if tensor_parallel else {}),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    tokens = torch.arange(32)[None] % 64
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.destroy()
    return weakref.ref(model)


def clean_up() -> None:
    """The remedy, as in impl/deepspeed/global_state.py."""
    release()
    set_autotp_mode(training=False)
    parameter_offload.FWD_MODULE_STACK.clear()
    torch.nn.functional.linear = LINEAR
    gc.collect()


def rank_main(rank: int, folder: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    deepspeed.init_distributed()
    one_step(1, tensor_parallel=True)
    try:
        one_step(1, tensor_parallel=False)
        message = ""
    except AttributeError as error:
        message = str(error)
    clean_up()
    one_step(1, tensor_parallel=False)  # raises if the clean-up does not help
    model = one_step(3, tensor_parallel=False)
    gc.collect()
    linear, alive = torch.nn.functional.linear.__name__, model() is not None
    clean_up()
    mended = torch.nn.functional.linear is LINEAR and model() is None
    if rank == 0:
        print(f"a plain engine after one with AutoTP: {message or 'works'}; REMEDY: works")
        print(f"after a destroyed ZeRO-3 engine: F.linear is {linear}, its model is alive: {alive}")
        print(f"  REMEDY: F.linear restored and model freed: {mended}")
        verdict.put("get_model_parallel_rank" in message and linear != "linear" and alive and mended)


if __name__ == "__main__":
    print(f"torch {torch.__version__}, deepspeed {deepspeed.__version__}, two ranks")
    verdict = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder, verdict), 2, start_method="fork")
    print("defect present" if (present := verdict.get()) else "defect not as described")
    sys.exit(0 if present else 1)
