"""DeepSpeed: AutoTP puts its own linear layers in the place of peft's, and adapters are lost.

Two ranks, CPU, tensor parallelism over both. Exit code 0: present, and the remedy is right. 1: gone. See
deepspeed-autotp-adapters.md.
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
import peft  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
import transformers  # noqa: E402
from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: E402

TOKENS = torch.arange(32)[None] % 64
COLUMN, ROW = "(q|k|v|gate|up)_proj", "(o|down)_proj"
SPECS = [  # of an adapter, B is cut where the layer is cut along its outputs, and A where it is along its inputs
    {"patterns": [rf".*\.{COLUMN}(\.base_layer|\.lora_B\.default)?\.weight$"], "partition_type": "column"},
    {"patterns": [rf".*\.{ROW}(\.base_layer|\.lora_A\.default)?\.weight$"], "partition_type": "row"},
]


def release() -> None:
    """Forgets process groups, also those of releases that have no function for it."""
    groups = deepspeed.utils.groups
    if hasattr(groups, "_release_process_group_references"):
        groups._release_process_group_references()
    else:
        for name in ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mpu"):
            setattr(groups, name, None)


def model_with_adapters() -> Any:
    """A Llama with adapters on q_proj and o_proj, whose B is not 0."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.3,
    )  # fmt: skip
    chosen = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), chosen)


def trained(engine: Any) -> int:
    return sum("lora_" in name for name, _ in engine.module.named_parameters())


def engine_of(model: Any, **cutting: Any) -> Any:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2, **cutting},
        "zero_optimization": {"stage": 0},
    }
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    return engine


@torch.no_grad()
def logits_of(model: Any) -> Any:
    return model(input_ids=TOKENS, use_cache=False).logits


def rank_main(rank: int, folder: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    deepspeed.init_distributed()
    model = model_with_adapters()
    right = logits_of(model)
    with model.disable_adapter():
        base = logits_of(model)
    shipped = engine_of(model_with_adapters())
    seen, held = logits_of(shipped), trained(shipped)
    release()
    hidden = BaseTunerLayer.weight
    del BaseTunerLayer.weight  # the remedy: AutoTP goes into what has no two-dimensional weight
    remedied = engine_of(model_with_adapters(), partition_config={"use_default_specs": False, "layer_specs": SPECS})
    BaseTunerLayer.weight = hidden
    off, from_base, mended = ((x - y).norm() / right.norm() for x, y in (
        (seen, right), (seen, base), (logits_of(remedied), right)))  # fmt: skip
    if rank == 0:
        print(f"logits {off:.2g} off; from those of the base without adapters {from_base:.2g}; adapters left: {held}")
        print(f"  REMEDY opened layers, patterns of their parts: {mended:.2g}; adapters: {trained(remedied)}")
        verdict.put(bool(off > 0.1 and from_base < 1e-5 and held == 0 and mended < 1e-5))


if __name__ == "__main__":
    print(f"deepspeed {deepspeed.__version__}, peft {peft.__version__}, tensor parallelism over 2 ranks")
    verdict = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder, verdict), 2, start_method="fork")
    print("defect present" if (present := verdict.get()) else "defect not as described")
    sys.exit(0 if present else 1)
