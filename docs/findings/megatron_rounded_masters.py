"""megatron-core: the float32 master weights of bf16 and fp16 training start from weights that were rounded first.

One rank, CPU. Exit code 0: defect present (masters differ from the float32 weights that the model had, and writing them
once more mends it). 1: gone. See megatron-rounded-masters.md.
"""

import sys
import tempfile
from importlib.metadata import version
from typing import Any

import megatron_on_cpu  # noqa: F401  (before megatron)
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule


class Model(MegatronModule):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(64, 64)


def masters_of(chunk: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """The float32 masters by name; on one rank, the distributed optimizer has the whole of each, flat."""
    return {name: p.main_param.view_as(p) for name, p in chunk.module.module.named_parameters()}


def present(precision: str, distributed: bool) -> bool:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    half: dict[str, Any] = {precision: True, "params_dtype": dtype}
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=2, pipeline_dtype=None, **half)
    model = Model(config)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    chunk = DistributedDataParallel(config, reduction, Float16Module(config, model))
    settings = OptimizerConfig(lr=1e-3, min_lr=0.0, use_distributed_optimizer=distributed, **half)
    optimizer = get_megatron_optimizer(settings, [chunk])
    wrong = error(masters_of(chunk, optimizer), weights)
    rounded = all(torch.equal(m, m.to(dtype).float()) for m in masters_of(chunk, optimizer).values())
    for name, master in masters_of(chunk, optimizer).items():  # the remedy
        master.copy_(weights[name])
    right = error(masters_of(chunk, optimizer), weights)
    kind = type(optimizer.chained_optimizers[0]).__name__
    print(f"{precision}, {kind}: {wrong:.1e} off, all of them {precision} numbers: {rounded}; REMEDY {right}")
    return wrong > 1e-5 and rounded and right == 0


def error(x: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return max(float((x[n] - right[n]).norm() / right[n].norm()) for n in right)


if __name__ == "__main__":
    print(", ".join(f"{name} {version(name)}" for name in ("megatron-core", "torch")), "; masters against the weights")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        there = [present(precision, cut) for precision in ("bf16", "fp16") for cut in (False, True)]
        dist.destroy_process_group()
    print("defect present" if all(there) else "defect not as described")
    sys.exit(0 if all(there) else 1)
