"""Megatron-FSDP: `fully_shard_optimizer` makes an update by zero gradients, which AdamW counts and decays weights by.

Two ranks on the CPU, two linear layers, ZeRO-3, one update by AdamW; torch alone on the same numbers is right. Exit
code 0: the first update is smaller than torch's, and right with the remedy. 1: it is torch's. See
megatron-fsdp-counted-update.md.
"""

import copy
import warnings
from typing import Any

import megatron_on_cpu as on_cpu
import torch
import torch.distributed as dist
from megatron.core.distributed.fsdp.src import megatron_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from conformance.backends.on_cpu import cuda_is_cpu, replaced

FEATURES, RATE = 8, 1e-2


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.1)


def remedied(optimizer: torch.optim.Optimizer) -> None:
    """Shards an optimizer without an update: no rate, no decay, and none of the state that it leaves."""
    settings = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    megatron_fsdp.fully_shard_optimizer(optimizer)
    optimizer.state.clear()
    for group, (rate, decay) in zip(optimizer.param_groups, settings, strict=True):
        group["lr"], group["weight_decay"] = rate, decay


def trained(model: nn.Module, shard: Any, x: Tensor) -> tuple[float, list[Tensor]]:
    """Returns what AdamW counts after one update, and the updated weights."""
    wrapped = megatron_fsdp.fully_shard_model(
        copy.deepcopy(model),
        device_mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")),
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[nn.Linear],
        device=torch.device("cpu"),
    )
    wrapped.ddp_config.gradient_reduce_div_fusion = False  # gloo cannot scale while it sums
    optimizer = adamw(wrapped.parameters())
    shard(optimizer)
    wrapped(x).square().mean().backward()
    optimizer.step()
    own: list[Any] = [parameter for _, parameter in wrapped.param_and_grad_buffer.optimizer_named_parameters]
    everyone: list[Any] = [None, None]
    counts = {float(state["step"]) for state in optimizer.state.values()}
    dist.all_gather_object(everyone, (counts, [parameter._local_tensor.flatten() for parameter in own]))
    parts = zip(*(locals_ for _, locals_ in everyone), strict=True)
    return max(set.union(*(found for found, _ in everyone))), [torch.cat(part) for part in parts]


def present(rank: int) -> bool:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES, bias=False), nn.Linear(FEATURES, FEATURES, bias=False))
    x = torch.randn(4, FEATURES)  # the same on both ranks, so the mean over ranks is that of one
    before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    right = copy.deepcopy(model)
    right(x).square().mean().backward()
    adamw(right.parameters()).step()
    moved = torch.cat([parameter.detach().flatten() for parameter in right.parameters()]) - before
    found = {}
    with cuda_is_cpu(), replaced(torch.cuda, {"current_device": lambda: 0}):  # a number in the name of a device
        for name, shard in (("shipped", megatron_fsdp.fully_shard_optimizer), ("REMEDY", remedied)):
            count, weights = trained(model, shard, x)
            change = torch.cat(weights) - before
            found[name] = float((change - moved).norm() / moved.norm())
            if rank == 0:
                print(f"{name}: AdamW has counted {count:.0f} updates after one; it is {found[name]:.2g} off torch's")
    return found["shipped"] > 0.1 and found["REMEDY"] < 1e-5


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    on_cpu.two_ranks(present)
