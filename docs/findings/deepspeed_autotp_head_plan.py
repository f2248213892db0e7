"""DeepSpeed: AutoTP cuts no layer of a model whose own plan for tensor parallelism names the head alone.

Two ranks, tensor parallelism over both, on the CPU. Exit code 0: AutoTP cuts the layers of a Llama, those of the same
code with such a plan not, and with the remedy again. 1: not so. See deepspeed-autotp-head-plan.md.
"""

import logging
import os
import sys
import tempfile
import warnings
from collections import defaultdict
from typing import Any

warnings.filterwarnings("ignore", category=FutureWarning)
os.environ.update(MASTER_ADDR="localhost", WORLD_SIZE="2", CUDA_VISIBLE_DEVICES="")
import deepspeed  # noqa: E402
import deepspeed.ops  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
import transformers  # noqa: E402

COLUMN, ROW = r".*\.(q|k|v|gate|up)_proj\.weight$", r".*\.(o|down)_proj\.weight$"
REMEDY = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [COLUMN], "partition_type": "column"},
        {"patterns": [ROW], "partition_type": "row"},
    ],
}


def release() -> None:
    """Forgets process groups, also those of releases that have no function for it."""
    groups = deepspeed.utils.groups
    if hasattr(groups, "_release_process_group_references"):
        groups._release_process_group_references()
    else:
        for name in ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mpu"):
            setattr(groups, name, None)


class OfPublishedCode(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """As model code on the hub has it, which came before plans of layers."""

    _tp_plan = {"lm_head": "colwise_rep"}  # noqa: RUF012


def whole_and_cut(kind: Any, *, remedied: bool) -> tuple[int, int]:
    """How many matrices of layers this rank holds, and how many of these are cut."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    if kind is OfPublishedCode:
        config.base_model_tp_plan = None  # its configuration is of published code, too
    model = kind(config)
    shapes = {name: p.shape for name, p in model.named_parameters() if "_proj" in name}
    settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}}
    if remedied:
        settings["tensor_parallel"]["partition_config"] = REMEDY
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    cut = sum(engine.module.get_parameter(name).shape != shape for name, shape in shapes.items())
    release()
    return len(shapes), cut


def rank_main(rank: int, folder: str, verdict: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # no op is compiled
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    deepspeed.init_distributed(dist_backend="gloo")
    cases = (
        ("Llama of transformers", transformers.LlamaForCausalLM, False, 14),
        ("with a plan of the head alone", OfPublishedCode, False, 0),
        ("the same, REMEDY", OfPublishedCode, True, 14),
    )
    for what, kind, remedied, expected in cases:
        matrices, cut = whole_and_cut(kind, remedied=remedied)
        dist.barrier()
        if rank == 0:
            print(f"{what}: {cut} of {matrices} matrices of layers are cut", flush=True)
            verdict.put(cut == expected)


if __name__ == "__main__":
    print(f"deepspeed {deepspeed.__version__}, transformers {transformers.__version__}, 2 tensor-parallel ranks")
    verdict = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder, verdict), 2, start_method="spawn")
    present = all(verdict.get() for _ in range(3))
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
