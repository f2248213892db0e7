"""Settings: what torch may choose among kernels on a GPU, by tier, and what it was left at (claims 4 and 6).

In the exact tier and in fp32 a cell should come out the same twice: kernels are deterministic where there are such (a
warning goes to the rank's log where there are none), and TF32, which is not what a layout names fp32, is off. Half
precision is judged as libraries run it, so nothing is changed there. The record's environment says what was in force.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from conformance.scenario import Precision

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # ranks begin with it (conformance.world.nursery)


@contextlib.contextmanager
def settings_of(precision: Precision, device: str) -> Iterator[dict[str, str]]:
    """Set what the tier wants on a GPU, and yield what is in force, for the record. Restored on exit."""
    before = _deterministic()
    utils: Any = torch.utils.deterministic
    fills = utils.fill_uninitialized_memory
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    if device != "cpu" and precision in ("exact", "fp32"):
        utils.fill_uninitialized_memory = False  # it costs time and repairs what reads too early
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield {
            "deterministic": "yes" if torch.are_deterministic_algorithms_enabled() else "no",
            "tf32": "yes" if torch.backends.cuda.matmul.allow_tf32 else "no",
            WORKSPACE: os.environ.get(WORKSPACE, ""),
        }
    finally:
        utils.fill_uninitialized_memory = fills
        if _deterministic() != before:  # the function imports torch._inductor, which takes seconds
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


def _deterministic() -> tuple[bool, bool]:
    """Whether torch takes deterministic kernels, and whether it only warns where there are none."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
