"""Megatron-FSDP: what of a model every rank holds whole when gradients are ready, in ZeRO-3.

Two ranks on the CPU, a toy model of four layers (units), an embedding and a head outside of them; two micro-batches.
Exit code 0: whole weights outside of units are held after the backward pass. 1: none are. See megatron-fsdp-kept.md.
"""

import warnings
from typing import Any

import megatron_on_cpu as on_cpu
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, FullyShardedDataParallel
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.transformer import TransformerConfig
from torch import nn

from conformance.backends.on_cpu import cuda_is_cpu, replaced

VOCABULARY, FEATURES, LAYERS = 512, 64, 4
if not isinstance(getattr(mcore_fsdp_adapter, "TELinear", type), type):  # TransformerEngine is not installed
    mcore_fsdp_adapter.TELinear = type("NoModule", (), {})


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(VOCABULARY, FEATURES, bias=False)
        self.layers = nn.ModuleList(on_cpu.Layer(number) for number in range(LAYERS))
        self.head = nn.Linear(FEATURES, VOCABULARY, bias=False)

    def forward(self, x: Any) -> Any:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def held(wrapped: Any) -> dict[str, int]:
    """Returns how many numbers of gathered weights are in memory, in units and outside of them."""
    pipeline, groups = wrapped.module.all_gather_pipeline, wrapped.param_and_grad_buffer.parameter_groups
    found = {"layers": 0, "outside": 0}
    for key, status in pipeline.bucket_status.items():
        group = groups[key[0] if isinstance(key, tuple) else key]
        if status.name != "EMPTY" and not (isinstance(key, tuple) and key[1]):
            found["outside" if group.fsdp_unit_id in (None, -1) else "layers"] += sum(p.numel() for p in group.params)
    return found


def present(rank: int) -> bool:
    with cuda_is_cpu(), replaced(torch.cuda, {"current_device": lambda: 0}):  # a number in the name of a device
        return keeps(rank)


def keeps(rank: int) -> bool:
    parallel_state.initialize_model_parallel()
    settings = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        gradient_reduce_div_fusion=False,
    )
    config = TransformerConfig(num_layers=LAYERS, hidden_size=FEATURES, num_attention_heads=1)
    wrapped = FullyShardedDataParallel(
        config, settings, Model(), fsdp_unit_modules=[on_cpu.Layer], device=torch.device("cpu")
    )
    outside = {"layers": 0, "outside": 2 * VOCABULARY * FEATURES}
    for number in range(2):
        loss = wrapped(torch.randn(8, VOCABULARY)).square().mean()
        forward = held(wrapped)
        loss.backward()
        backward = held(wrapped)
        if rank == 0:
            print(
                f"micro-batch {number}: whole numbers after the forward pass {forward}, after the backward {backward}"
            )
    wrapped.finish_grad_sync()
    after = held(wrapped)
    if rank == 0:
        print(f"gradients are ready: {after}; outside of layers there are {outside['outside']}")
    return after["outside"] > 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    on_cpu.two_ranks(present)
