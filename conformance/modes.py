"""Modes: what the suite itself computes of a backend's tensors, past the modes that watch and lift the backend.

Every operator that goes through torch's modes costs as much as a small kernel (conformance.run.exact,
conformance.run.evidence); sketches and digests of a model of a billion parameters take thousands of them in a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def without_modes(tensor: Tensor) -> Iterator[None]:
    """No mode sees or changes what is computed in this block of ``tensor``, a plain one.

    Take it by ``detach()`` before the block. A watch sees this one operator, and with it the tensor's dtype, which no
    other operator may have shown. Of a subclass, such as DTensor, modes see everything, because the subclass gets its
    operators in the same way.
    """
    if type(tensor) is Tensor:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            yield
    else:
        yield
