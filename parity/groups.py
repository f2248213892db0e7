"""Groups: which group of the optimizers each parameter is in, and what the groups are set to.

A group is known by its place, ``0.1`` for the second group of the first optimizer, because ``load_state_dict`` puts a
new one into the place of each and ``add_param_group`` appends one.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from parity.files import Line

HOW = {"foreach", "fused", "capturable", "differentiable", "initial_lr"}  # how an optimizer computes, not what


def grouped(optimizers: Sequence[Optimizer]) -> dict[int, str]:
    """The group of each parameter that the optimizers have now, by its id."""
    return {
        id(parameter): f"{number}.{place}"
        for number, optimizer in enumerate(optimizers)
        for place, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }


def settings(optimizer: Optimizer, *, number: int) -> dict[str, Line]:
    """By group of the optimizer with this number: its class, and the settings that are numbers, or several (betas)."""
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
