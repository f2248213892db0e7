"""A decoder layer: attention and feed-forward on a residual stream, with norms where the architecture places them.

Norms before (arXiv 2002.04745), after and before the sum (OLMo 2, arXiv 2501.00656 section 3.2), or both (Gemma 2,
arXiv 2408.00118 section 2).
"""

from functools import partial

from torch import Tensor

from conformance.oracle.attention import attention, attention_shapes
from conformance.oracle.feed_forward import feed_forward, feed_forward_shapes
from conformance.oracle.latent_attention import latent_attention, latent_shapes
from conformance.oracle.norm import rms_norm
from conformance.oracle.parts import LatentAttention, Layer, Norm
from conformance.oracle.policy import Policy
from conformance.oracle.positions import Table
from conformance.oracle.routing import Routing
from conformance.oracle.tap import Module
from conformance.oracle.variant import Weights


def layer_shapes(layer: Layer, hidden: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a layer's parameters, in the model's order, without the prefix ``model.layers.N.``."""
    a = layer.attention
    return {
        **(latent_shapes(a, hidden) if isinstance(a, LatentAttention) else attention_shapes(a, hidden)),
        **feed_forward_shapes(layer.feed_forward, hidden),
        **{f"{name}.weight": (hidden,) for name in layer.norms.names},
    }


def decoder_layer(
    x: Tensor,
    w: Weights,
    layer: Layer,
    norm: Norm,
    *,
    table: Table,
    hidden: Tensor,
    policy: Policy,
    module: Module,
    routing: Routing,
) -> Tensor:
    """``x`` and the result: (T, D). ``w``: the layer's own weights. ``hidden``: (T, T), the keys that are not seen."""

    def normed(name: str | None, x: Tensor) -> Tensor:
        if name is None:
            return x
        return module(name, partial(rms_norm, weight=w[name + ".weight"], norm=norm, policy=policy), x)

    if isinstance(layer.attention, LatentAttention):
        attend = partial(latent_attention, a=layer.attention)
    else:
        attend = partial(attention, a=layer.attention, norm=norm)
    attend = partial(attend, w=w, table=table, hidden=hidden, policy=policy, module=module)
    y = module("self_attn", attend, normed(layer.norms.before_attention, x))
    x = x + normed(layer.norms.after_attention, y)
    feed = partial(feed_forward, w=w, part=layer.feed_forward, policy=policy, module=module, routing=routing)
    y = module("mlp", feed, normed(layer.norms.before_feed_forward, x))
    return x + normed(layer.norms.after_feed_forward, y)
