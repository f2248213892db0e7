"""Megatron-FSDP: `fully_shard` puts all parameters into one group of the optimizer, with the optimizer's defaults.

Two ranks on the CPU, two linear layers with biases, ZeRO-3; matrices decay by 0.1 and biases do not. Exit code 0: after
`fully_shard` both decay by AdamW's default, and as they should with the remedy. 1: they decay as they should. See
megatron-fsdp-one-group.md.
"""

import warnings
from typing import Any

import megatron_on_cpu as on_cpu
import torch
from megatron.core.distributed.fsdp.src import megatron_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from conformance.backends.on_cpu import cuda_is_cpu, replaced

FEATURES, DECAY = 8, 0.1
Named = list[tuple[str, Any]]


def adamw(named: Named) -> torch.optim.AdamW:
    matrices, biases = ([p for name, p in named if name.endswith(kind)] for kind in ("weight", "bias"))
    return torch.optim.AdamW([{"params": matrices, "weight_decay": DECAY}, {"params": biases, "weight_decay": 0.0}])


def decays(optimizer: torch.optim.Optimizer, named: Named) -> dict[str, float]:
    """Returns by how much each parameter decays."""
    found = {id(parameter): group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    return {name: found[id(parameter)] for name, parameter in named}


def present(rank: int) -> bool:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)) for _ in range(2)]
    settings: dict[str, Any] = {
        "device_mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")),
        "dp_shard_dim": "dp",
        "tp_dim": "tp",
        "fsdp_unit_modules": [nn.Linear],
        "device": torch.device("cpu"),
    }
    right = decays(adamw([*layers[0].named_parameters()]), [*layers[0].named_parameters()])
    with cuda_is_cpu(), replaced(torch.cuda, {"current_device": lambda: 0}):  # a number in the name of a device
        whole, shipped = megatron_fsdp.fully_shard(layers[0], adamw([*layers[0].named_parameters()]), **settings)
        half: Any = megatron_fsdp.fully_shard_model(layers[1], **settings)
        sharded = [*half.param_and_grad_buffer.optimizer_named_parameters]
        remedied = megatron_fsdp.fully_shard_optimizer(adamw(sharded))
    found = {
        "shipped": decays(shipped, [*whole.param_and_grad_buffer.optimizer_named_parameters]),
        "REMEDY": decays(remedied, sharded),
    }
    if rank == 0:
        for name, one in {"asked for": right, **found}.items():
            print(f"{name}: weight decay by parameter {one}")
    default = torch.optim.AdamW([torch.zeros(1)]).defaults["weight_decay"]
    return {*found["shipped"].values()} == {default} and found["REMEDY"] == right


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    on_cpu.two_ranks(present)
