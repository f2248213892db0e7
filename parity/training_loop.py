"""Looks into a training loop: fingerprints of batches, optimizer groups and settings, and the dtype of computation.

A group is known by its place, ``0.1`` for the second group of the first optimizer, because ``load_state_dict`` puts a
new group into the place of each, and ``add_param_group`` appends one.

A model or optimizer that keeps its gradients outside of the parameters is refused: its record would have none.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from conformance.core.errors import UsageError
from parity.record_files import Line

WORDS = 4  # 32-bit words of a row's SHA-256 that are added up; in float64, exact for two million rows

Rows = Tensor | Iterable[Tensor | Sequence[int]]
"""Token ids: [rows, length], or rows of any lengths, without padding."""


def fingerprint(batch: Rows | None) -> list[float]:
    """Fingerprint rows whatever their order, rank and micro-batch.

    Returns the number of rows and the sums of the words of their hashes: 1 + WORDS numbers to be summed over ranks.
    """
    total = np.zeros(1 + WORDS)
    for row in () if batch is None else batch:
        ids = torch.as_tensor(row)
        if ids.dim() != 1 or ids.is_floating_point():
            raise UsageError(
                f"batch= has to be rows of token ids; it has a row of shape {tuple(ids.shape)}, {ids.dtype}"
            )
        digest = hashlib.sha256(ids.cpu().numpy().astype("<i8").tobytes()).digest()
        total += [1, *np.frombuffer(digest, dtype="<u4", count=WORDS)]
    return [float(number) for number in total]


def hexadecimal(words: Sequence[float]) -> str:
    """Format the sums of WORDS words as a record holds them."""
    return "".join(f"{int(word) % 2**32:08x}" for word in words)


HOW = {"foreach", "fused", "capturable", "differentiable", "initial_lr"}  # how an optimizer computes, not what


def grouped(optimizers: Sequence[Optimizer]) -> dict[int, str]:
    """Give the current group of each parameter of the optimizers, by the parameter's id."""
    return {
        id(parameter): f"{number}.{place}"
        for number, optimizer in enumerate(optimizers)
        for place, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }


def settings(optimizer: Optimizer, *, number: int) -> dict[str, Line]:
    """Give the optimizer's class and its numeric settings (a list for betas), by group."""
    return {
        f"{number}.{place}": {"optimizer": type(optimizer).__name__, **_numbers(group)}
        for place, group in enumerate(optimizer.param_groups)
    }


def _numbers(group: dict[str, Any]) -> Line:
    found = {}
    for name, value in group.items():
        values = [float(one) for one in (value if isinstance(value, tuple | list) else [value]) if _is_number(one)]
        if name not in HOW and values:
            found[name] = values if len(values) > 1 else values[0]
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1 and value.dim() == 0)


DEEPSPEED = (
    "DeepSpeed keeps gradients and masters outside of the parameters, where no record sees them. Record the training "
    "without it, and compare losses by parity diff of the logs; per parameter, use parity run --backend deepspeed"
)


def torch_optimizers(optimizer: Any) -> tuple[Optimizer, ...]:
    """Take torch optimizers out of wrappers such as Accelerate's. Raises UsageError for any other object."""
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
    """Tell why a model cannot be recorded, with advice; empty if it can."""
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


def watch_precision(model: nn.Module, dtypes: list[str]) -> RemovableHandle | None:
    """Add to ``dtypes`` the dtype of the first forward pass: autocast's dtype, or that of the weights at that moment.

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
        dtypes.append(str(dtype).removeprefix("torch."))
        handle.remove()

    handle: RemovableHandle = inner.register_forward_pre_hook(look)
    return handle
