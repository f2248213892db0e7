"""Unwrapping: the torch optimizers inside of what a framework hands out, and which models cannot be observed.

A training that keeps its gradients somewhere else is refused: a record of it would say that there were none.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from conformance.validation import UsageError

DEEPSPEED = (
    "DeepSpeed keeps gradients and masters outside of the parameters, where no record sees them. Record the training "
    "without it, and compare losses by parity diff of the logs; per parameter, use parity run --backend deepspeed"
)


def torch_optimizers(optimizer: Any) -> tuple[Optimizer, ...]:
    """The torch optimizers in one optimizer or several, out of wrappers such as Accelerate's. Raises UsageError."""
    given = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    return tuple(_inside(one) for one in given)


def _inside(optimizer: Any) -> Optimizer:
    if any(_comes_from(kind, "deepspeed") or "DeepSpeed" in kind.__name__ for kind in type(optimizer).__mro__):
        raise UsageError(DEEPSPEED)
    if type(optimizer).__module__.startswith("accelerate.") and hasattr(optimizer, "optimizer"):
        return _inside(optimizer.optimizer)
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer; give the ones that it steps, as a list"
        )
    return optimizer


def refusal(model: nn.Module) -> str:
    """Why a model cannot be observed, with what to do; empty if it can."""
    for module in model.modules():
        if _comes_from(type(module), "deepspeed.runtime"):
            return DEEPSPEED
        if type(module).__name__ == "FullyShardedDataParallel":
            return "FSDP1 flattens parameters, and a record is by parameter; shard the model by fully_shard (FSDP2)"
    if any(getattr(parameter, "tensor_model_parallel", False) for parameter in model.parameters()):
        return "Megatron's tensor-parallel weights do not say which rows they hold; record with tensor parallel size 1"
    return ""


def _comes_from(kind: type, package: str) -> bool:
    return f"{kind.__module__}.".startswith(f"{package}.")


def watch_precision(model: nn.Module, seen: list[str]) -> RemovableHandle | None:
    """Add to ``seen`` what the first forward pass computes in: autocast's dtype, or that of the weights at that moment.

    Nothing is watched in a compiled model, where a hook would be compiled too.
    """
    modules = list(model.modules())
    if any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in modules):
        return None
    inner = next((module for module in modules if list(module.parameters(recurse=False))), None)
    if inner is None:
        return None

    def look(module: nn.Module, _: Any) -> None:
        weight = next(module.parameters(recurse=False))
        device = weight.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        seen.append(str(dtype).removeprefix("torch."))
        handle.remove()

    handle: RemovableHandle = inner.register_forward_pre_hook(look)
    return handle
