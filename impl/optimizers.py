"""torch's optimizers and transformers' schedules as a scenario asks for them, for backends that train with these."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from torch.nn import Module, Parameter

from conformance.scenario import OptimizerConfig, ScheduleConfig


def parameter_groups(
    parameters: Iterable[Parameter], config: OptimizerConfig, *, dims: Callable[[Parameter], int] = Parameter.dim
) -> list[dict[str, Any]]:
    """Groups for an optimizer: AdamW decays parameters of two or more dimensions, SGD none.

    ``parameters``: those that are trained. ``dims`` gives a parameter's number of dimensions, for libraries that
    flatten the parameters that they cut.
    """
    parameters = list(parameters)
    if config.name == "sgd":
        return [{"params": parameters}]
    return [
        {"params": [p for p in parameters if dims(p) >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if dims(p) < 2], "weight_decay": 0.0},
    ]


def trained_parameters(model: Module, config: OptimizerConfig) -> list[Parameter]:
    """All but the frozen ones. ``model`` has the parameter names of Hugging Face."""
    return [parameter for name, parameter in model.named_parameters() if config.trains(name)]


def torch_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """torch's SGD or AdamW over the groups of ``parameter_groups``."""
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def learning_rates(optimizer: torch.optim.Optimizer, config: ScheduleConfig) -> torch.optim.lr_scheduler.LRScheduler:
    """transformers' schedule, which sets the learning rates of the optimizer."""
    # transformers' "constant" has no warm-up, whatever it is given.
    name = {"constant": "constant_with_warmup", "cosine": "cosine_with_min_lr"}.get(config.name, config.name)
    scheduler: torch.optim.lr_scheduler.LRScheduler = transformers.get_scheduler(
        name,
        optimizer,
        num_warmup_steps=config.warmup_steps,
        num_training_steps=config.total_steps,
        scheduler_specific_kwargs={"min_lr_rate": config.min_factor} if config.name == "cosine" else None,
    )
    return scheduler
