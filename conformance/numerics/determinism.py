"""Hashing: random numbers that follow from a name and a place alone, to the bit the same on every device and version.

Sketches of tensors (conformance.numerics.sketch, parity.sketch) are made of them in several processes, and subtracted.

Modes: what the suite itself computes of a backend's tensors, past the modes that watch and lift the backend.

Every operator that goes through torch's modes costs as much as a small kernel (conformance.numerics.float64_tier,
conformance.worker.evidence); sketches and digests of a model of a billion parameters take thousands of them in a step.

Settings: what torch may choose among kernels on a GPU, by tier, and what it was left at (claims 4 and 6).

In the exact tier and in fp32 a cell should come out the same twice: kernels are deterministic where there are such (a
warning goes to the rank's log where there are none), and TF32, which is not what a layout names fp32, is off. Half
precision is judged as libraries run it, so nothing is changed there. The record's environment says what was in force.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from conformance.spec.precision import PRECISIONS, PrecisionName


def seed_of(name: str) -> int:
    """The seed of a parameter's hash, a signed 64-bit number that its name alone decides."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)


def splitmix64(places: Tensor, *, seed: int) -> Tensor:
    """splitmix64 (Steele, Lea, Flood, OOPSLA 2014) of int64; shifts of int64 carry the sign, hence the masks."""
    x = places.mul(-7046029254386353131).add_(seed)
    x.bitwise_xor_((x >> 30).bitwise_and_((1 << 34) - 1)).mul_(-4658895280553007687)
    x.bitwise_xor_((x >> 27).bitwise_and_((1 << 37) - 1)).mul_(-7723592293110705685)
    return x.bitwise_xor_((x >> 31).bitwise_and_((1 << 33) - 1))


@contextmanager
def without_modes(tensor: Tensor) -> Iterator[Tensor]:
    """Give ``tensor`` without its history of gradients. No mode sees or changes what this block computes of it.

    What modes do see is that it is detached. A watch for leaks thus learns its dtype, which no operator of the backend
    may have shown. Of a subclass, such as DTensor, modes see everything, because they and the subclass get operators by
    one mechanism.
    """
    tensor = tensor.detach()
    if type(tensor) is Tensor:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            yield tensor
    else:
        yield tensor


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # ranks begin with it (conformance.runtime.preload_server)


@contextlib.contextmanager
def settings_of(precision: PrecisionName, device: str) -> Iterator[dict[str, str]]:
    """Set what the tier wants on a GPU, and yield what is in force, for the record. Restored on exit."""
    before = _deterministic()
    utils: Any = torch.utils.deterministic
    fills = utils.fill_uninitialized_memory
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    if device != "cpu" and not PRECISIONS[precision].is_half:
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
