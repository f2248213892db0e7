"""Faults of the optimizer and of what gradients are added up in: the loss sees none, and bf16's noise hides them all.

They are caught because the update is rebuilt from the gradients, and because a sum in bf16 shows in its digits.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from conformance.faults.fault import Fault, Function


def _changed_groups(change: Callable[[dict[str, Any]], None]) -> Callable[[Function], Function]:
    def wrap(create_optimizer: Function) -> Function:
        def faulty(trainable: Any, model: Any, config: Any) -> Any:
            optimizer = create_optimizer(trainable, model, config)
            for group in optimizer.param_groups:
                change(group)
            return optimizer

        return faulty

    return wrap


def _no_decay(group: dict[str, Any]) -> None:
    group.update(weight_decay=0.0, wd_mult=0.0)  # megatron-core's schedule sets the decay to a multiple


def _default_betas(group: dict[str, Any]) -> None:
    group["betas"] = (0.9, 0.999)


def _moments_in_bf16(create_optimizer: Function) -> Function:
    def round_moments(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].to(torch.bfloat16))

    def faulty(trainable: Any, model: Any, config: Any) -> Any:
        made = create_optimizer(trainable, model, config)
        for optimizer in of_torch(made):
            optimizer.register_step_post_hook(round_moments)
        return made

    return faulty


def of_torch(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """torch's optimizers inside of a library's."""
    if isinstance(optimizer, torch.optim.Optimizer):
        yield optimizer
    else:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            yield part.optimizer


def _summed_in_bf16(summing_dtype: Function) -> Function:
    def faulty(*arguments: Any) -> Any:
        return "bf16" if isinstance(summing_dtype(*arguments), str) else torch.bfloat16

    return faulty


OPTIMIZER_FAULTS = (
    Fault(
        name="summed-in-bf16",
        summary="gradients are reduced, or added up over micro-batches, in bf16",
        source="https://github.com/ISEEKYAN/Megatron-LM/issues/149",
        seam="summing_dtype",
        stage="gradients",
        loss_blind=True,
        needs="bf16 and three summands or more: micro-batches times ranks with different tokens",
        wrap=_summed_in_bf16,
    ),
    Fault(
        name="no-weight-decay",
        summary="the groups of parameters are made anew without their weight decay",
        source="https://github.com/pytorch/pytorch/issues/101343",
        seam="create_optimizer",
        stage="clipped update",
        loss_blind=True,
        needs="AdamW with weight decay",
        wrap=_changed_groups(_no_decay),
    ),
    Fault(
        name="default-betas",
        summary="the optimizer has the betas of its library, not those of the configuration",
        source="https://github.com/EleutherAI/gpt-neox/pull/228",
        seam="create_optimizer",
        stage="weights after N steps",
        loss_blind=True,
        needs="AdamW and two steps",
        wrap=_changed_groups(_default_betas),
    ),
    Fault(
        name="moments-in-bf16",
        summary="AdamW's moments are held in bf16",
        source="https://github.com/areal-project/AReaL/issues/1292",
        seam="create_optimizer",
        stage="weights after N steps",
        loss_blind=True,
        needs="AdamW, two steps and a precision below the exact tier, where the rounding is not lifted",
        wrap=_moments_in_bf16,
    ),
)
