"""Policy: in which dtypes the oracle computes."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Policy:
    """Mixed precision as transformers and the backends do it.

    compute: matrix products and activations. stable: norms, softmax, rotary tables, the loss, and also the master
    weights, gradients and optimizer. fused: attention by torch's kernel, which is what most backends run below the
    exact tier and which rounds otherwise than the plain formula.
    """

    compute: torch.dtype
    stable: torch.dtype
    fused: bool = False
