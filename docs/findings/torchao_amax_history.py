"""torchao: with delayed scaling, histories of magnitudes never keep what a step adds to them.

One process on the CPU, four steps of a linear layer. Exit code 0: after inputs of magnitude 1, 8, 4 and 1 the
history of the input holds the first one only, and the next input is scaled by 1 instead of 8. 1: not so. See
torchao-amax-history.md.
"""

import sys
import warnings
from importlib.metadata import version
from typing import Any

warnings.filterwarnings("ignore")
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torchao import float8  # noqa: E402

LARGEST, HISTORY = 448.0, 3  # of e4m3; steps that the history holds
MAGNITUDES = (1.0, 8.0, 4.0, 1.0)


def keep(layer: Any) -> None:
    """REMEDY Adds the magnitudes of the step to the histories themselves."""
    for operand in ("input", "weight", "grad_output"):
        history = getattr(layer, f"fp8_amax_history_{operand}")
        history.copy_(torch.cat([getattr(layer, f"fp8_amax_{operand}"), history[:-1]]))


def histories(*, remedied: bool) -> list[tuple[list[float], float]]:
    """Returns the history of the input after each step, and the magnitude that the next scale stands for."""
    from torchao.float8.config import CastConfig, DelayedScalingConfig, ScalingType

    delayed = [CastConfig(scaling_type=ScalingType.DELAYED) for _ in range(3)]
    config = float8.Float8LinearConfig(
        cast_config_input=delayed[0],
        cast_config_weight=delayed[1],
        cast_config_grad_output=delayed[2],
        delayed_scaling_config=DelayedScalingConfig(history_len=HISTORY),
        emulate=True,
    )
    model = float8.convert_to_float8_training(nn.Sequential(nn.Linear(16, 16, bias=False)), config=config)
    layer: Any = model[0]
    found = []
    for magnitude in MAGNITUDES:
        model(torch.full((16, 16), magnitude)).sum().backward()
        float8.sync_float8_amax_and_scale_history(model)
        if remedied:
            with torch.no_grad():
                keep(layer)
        found.append((layer.fp8_amax_history_input.tolist(), LARGEST / layer.fp8_scale_input.item()))
    return found


if __name__ == "__main__":
    print(f"torchao {version('torchao')}, torch {torch.__version__}, a history of {HISTORY} steps")
    if not hasattr(float8, "sync_float8_amax_and_scale_history"):
        print("this torchao has no delayed scaling")
        sys.exit(1)
    own, remedied = histories(remedied=False), histories(remedied=True)
    for magnitude, (history, scaled), (kept, right) in zip(MAGNITUDES, own, remedied, strict=True):
        print(f"input {magnitude:g}: history {history}, scaled by {scaled:g}; REMEDY {kept}, {right:g}")
    is_present = own[-1] == ([1.0, 0.0, 0.0], 1.0) and remedied[-1] == ([1.0, 4.0, 8.0], 8.0)
    print("defect present" if is_present else "not reproduced")
    sys.exit(not is_present)
