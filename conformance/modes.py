"""Modes: what the suite itself computes of a backend's tensors, past the modes that watch and lift the backend.

Every operator that goes through torch's modes costs as much as a small kernel (conformance.run.exact,
conformance.run.evidence); sketches and digests of a model of a billion parameters take thousands of them in a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


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
