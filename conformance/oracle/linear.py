"""Linear layers, under the names that their weights have in the Hugging Face model."""

from functools import partial

from torch import Tensor
from torch.nn import functional as F

from conformance.oracle.tap import Function, Module
from conformance.oracle.variant import Weights


def linear(x: Tensor, w: Weights, name: str, module: Module) -> Tensor:
    """x W^T + b, and without b where ``w``, the weights of a layer, has none of this name."""
    return module(name, partial(F.linear, weight=w[name + ".weight"], bias=w.get(name + ".bias")), x)


def in_products_of(tokens: int, module: Module, w: Weights) -> Module:
    """``module`` with zeros in the place of further tokens wherever a matrix in ``w`` is multiplied by fewer than
    ``tokens`` of them. The result is the same but for its rounding: a GPU's library chooses a kernel by the size of a
    product, and kernels add up in different orders. Stacked experts and the head are left as they are, the head because
    its outputs would take gigabytes."""

    def run(name: str, function: Function, x: Tensor) -> Tensor:
        weight, count = w.get(f"{name}.weight"), len(x)
        if weight is None or weight.dim() != 2 or count >= tokens:
            return module(name, function, x)
        return module(name, lambda x: function(F.pad(x, (0, 0, 0, tokens - count)))[:count], x)

    return run
