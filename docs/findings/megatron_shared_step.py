"""megatron-core: after DistributedOptimizer.load_state_dict, all parameters share one `step`, so it counts too fast.

AdamW increments it once for each parameter. Two ranks, CPU, torch's AdamW, which is used without Transformer Engine and
Apex. Exit code 0: defect present, and a step for each parameter is right. 1: gone, or one of the two packages is
installed. See megatron-shared-step.md.
"""

import sys
from typing import Any

import megatron_on_cpu as on_cpu
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

LAYERS, BEFORE, AFTER = 12, 3, 5  # steps before and after the round trip
ADAM: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.0}


def build() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(LAYERS)))


def one_loss(model: Any) -> torch.Tensor:
    return torch.Tensor.mean(model(torch.linspace(-1, 1, 32).view(4, 8)).square())


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plain() -> tuple[torch.Tensor, torch.Tensor]:
    """The reference: the weights at the time of the round trip, and at the end."""
    model = build()
    optimizer, seen = torch.optim.AdamW(model.parameters(), **ADAM), []
    for _ in range(BEFORE + AFTER):
        optimizer.zero_grad()
        one_loss(model).backward()
        optimizer.step()
        seen.append(weights(model))
    return seen[BEFORE - 1], seen[-1]


def megatron(*, round_trip: bool, remedy: bool = False) -> tuple[torch.Tensor, list[float]]:
    """The weights at the end, and the steps that AdamW has counted for each parameter on this rank."""
    model, config = build(), TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    model.config = config
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    settings = OptimizerConfig(optimizer="adam", clip_grad=0.0, use_distributed_optimizer=True, **ADAM)
    settings.adam_beta1, settings.adam_beta2 = 0.9, 0.999
    optimizer = get_megatron_optimizer(settings, [ddp])
    (inner,) = (chained.optimizer for chained in optimizer.chained_optimizers)
    for number in range(BEFORE + AFTER):
        if round_trip and number == BEFORE:
            optimizer.load_state_dict(optimizer.state_dict())
            for state in inner.state.values() if remedy else ():
                state["step"] = state["step"].clone()
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        one_loss(ddp).backward()
        ddp.finish_grad_sync()
        optimizer.step()
    return weights(model), [float(state["step"]) for state in inner.state.values()]


def present(rank: int) -> bool:
    parallel_state.initialize_model_parallel()
    before, right = plain()
    runs = [megatron(round_trip=False), megatron(round_trip=True), megatron(round_trip=True, remedy=True)]
    errors = [float((found - right).norm() / (right - before).norm()) for found, _ in runs]
    if rank == 0:
        print(f"{BEFORE} steps, load_state_dict(state_dict()), {AFTER} steps; the last {AFTER} updates against AdamW:")
        for name, error, (_, steps) in zip(("no load", "load", "REMEDY"), errors, runs, strict=True):
            print(f"{name}: {error:.1e} off; AdamW has counted {steps}")
    return errors[1] > 0.02 and max(errors[0], errors[2]) < 1e-4


if __name__ == "__main__":
    if distrib_optimizer.HAVE_APEX_OR_TE:
        sys.exit("not reproduced: with Transformer Engine or Apex their FusedAdam counts steps, and once per group")
    on_cpu.two_ranks(present)
