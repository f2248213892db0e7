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
    """No mode sees or changes what is computed of the ``tensor`` in this block.

    Of a subclass, such as DTensor, modes see it as before, because the subclass gets its operators by the same way.
    """
    if type(tensor) in (Tensor, torch.nn.Parameter):
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            yield
    else:
        yield
