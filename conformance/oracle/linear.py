"""Linear layers, under the names that their weights have in the Hugging Face model."""

from functools import partial

from torch import Tensor
from torch.nn import functional as F

from conformance.oracle.tap import Module
from conformance.oracle.variant import Weights


def linear(x: Tensor, w: Weights, name: str, module: Module) -> Tensor:
    """x W^T + b, and without b where ``w``, the weights of a layer, has none of this name."""
    return module(name, partial(F.linear, weight=w[name + ".weight"], bias=w.get(name + ".bias")), x)
