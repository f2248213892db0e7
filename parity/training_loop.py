"""Looks into a training loop: fingerprints of batches, optimizer groups and settings, and the dtype of computation.

A group is known by its place, ``0.1`` for the second group of the first optimizer, because ``load_state_dict`` puts a
new group into the place of each, and ``add_param_group`` appends one.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
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


def settings(optimizer: Optimizer, *, number: int, places: Mapping[int, str]) -> dict[str, Line]:
    """Give the optimizer's class and its numeric settings (a list for betas), by group.

    places: the groups of tensors that a library steps a group at a time, under another number.
    """
    found: dict[str, Line] = {}
    for place, group in enumerate(optimizer.param_groups):
        known = next((places[id(one)] for one in group["params"] if id(one) in places), f"{number}.{place}")
        found[known] = {"optimizer": type(optimizer).__name__, **_numbers(group)}
    return found


def _numbers(group: dict[str, Any]) -> Line:
    found = {}
    for name, value in group.items():
        values = [float(one) for one in (value if isinstance(value, tuple | list) else [value]) if _is_number(one)]
        if name not in HOW and values:
            found[name] = values if len(values) > 1 else values[0]
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1 and value.dim() == 0)


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
