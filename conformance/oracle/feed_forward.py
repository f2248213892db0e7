"""The feed-forward of a layer."""

from torch import Tensor
from torch.nn import functional as F

from conformance.oracle.linear import linear
from conformance.oracle.parts import GatedMlp
from conformance.oracle.tap import Module
from conformance.oracle.variant import Weights


def feed_forward_shapes(mlp: GatedMlp, hidden: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters; a Linear's weight is (out, in)."""
    into = {"mlp.gate_up_proj": 2 * mlp.size} if mlp.fused else {"mlp.gate_proj": mlp.size, "mlp.up_proj": mlp.size}
    sizes = {**{name: (rows, hidden) for name, rows in into.items()}, "mlp.down_proj": (hidden, mlp.size)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, size in sizes.items():
        shapes[name + ".weight"] = size
        if mlp.bias:
            shapes[name + ".bias"] = size[:1]
    return shapes


def gated_mlp(x: Tensor, w: Weights, mlp: GatedMlp, module: Module) -> Tensor:
    """down(act(gate(x)) * up(x)) (arXiv 2002.05202 eq. 6); silu, or gelu in its tanh form (1606.08415 section 2)."""
    if mlp.fused:
        gate_TF, up_TF = linear(x, w, "mlp.gate_up_proj", module).chunk(2, dim=-1)
    else:
        gate_TF, up_TF = (linear(x, w, f"mlp.{name}_proj", module) for name in ("gate", "up"))
    gate_TF = F.silu(gate_TF) if mlp.activation == "silu" else F.gelu(gate_TF, approximate="tanh")
    return linear(gate_TF * up_TF, w, "mlp.down_proj", module)
