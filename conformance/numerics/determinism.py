"""Makes numbers repeatable: hashed random numbers, computation outside of torch's modes, and deterministic kernels.

Random numbers follow from a name and a position alone. Every device and version computes the same bits, because
several processes compute sketches of tensors (conformance.numerics.sketch, parity.summaries) that are then subtracted.

The suite computes sketches and digests of a backend's tensors outside of the modes that watch and lift the backend
(conformance.numerics.float64_tier, conformance.worker.evidence). An operator inside of a mode costs as much as a small
kernel, and a model of a billion parameters needs thousands of operators per step.

On a GPU, a cell in the exact tier or in fp32 should give the same numbers twice. So kernels are deterministic where
torch has deterministic ones (otherwise torch writes a warning to the rank's log), and TF32 is off, because fp32 does
not mean TF32. Half precision is judged as libraries run it, so no setting changes there. The record's environment
holds the settings that were in force.
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
    """Derives a signed 64-bit seed from the name of a parameter."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)


def splitmix64(positions: Tensor, *, seed: int) -> Tensor:
    """Hashes int64 positions by splitmix64 (Steele, Lea, Flood, OOPSLA 2014).

    The masks are needed because shifts of int64 carry the sign.
    """
    x = positions.mul(-7046029254386353131).add_(seed)
    x.bitwise_xor_((x >> 30).bitwise_and_((1 << 34) - 1)).mul_(-4658895280553007687)
    x.bitwise_xor_((x >> 27).bitwise_and_((1 << 37) - 1)).mul_(-7723592293110705685)
    return x.bitwise_xor_((x >> 31).bitwise_and_((1 << 33) - 1))


@contextmanager
def without_modes(tensor: Tensor) -> Iterator[Tensor]:
    """Yields ``tensor`` detached, and disables all modes inside of the block.

    Modes see the detaching itself. So a LeakWatch learns the dtype of the tensor, even if no operator of the backend
    has returned it. For a subclass such as DTensor, modes stay enabled, because torch dispatches modes and subclasses
    by the same mechanism.
    """
    tensor = tensor.detach()
    if type(tensor) is Tensor:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            yield tensor
    else:
        yield tensor


@contextmanager
def one_thread() -> Iterator[None]:
    """Computes with one thread inside of the block, in this thread and in those that it starts.

    Judges read many small tensors. OpenMP's other threads, which MKL uses too, would spin between two of them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # ranks begin with it (conformance.runtime.preload_server)


@contextlib.contextmanager
def settings_of(precision: PrecisionName, device: str) -> Iterator[dict[str, str]]:
    """Applies the settings of the precision on a GPU and yields the settings in force. Restores them on exit."""
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
    """Returns whether torch uses deterministic kernels, and whether it only warns if a kernel has none."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
