"""Returns the names and shapes of an architecture's parameters.

The names are Hugging Face's. The weight of a Linear is (out, in), and experts are stacked.
"""

from conformance.models.components import (
    Architecture,
    Attention,
    ClampedMlp,
    GatedMlp,
    LatentAttention,
    Layer,
    MixtureOfExperts,
)

CORRECTION = "e_score_correction_bias"  # the only buffer of a model; it is loaded and not trained


def parameter_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of all parameters and buffers, in the model's order."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocab_size, a.hidden_size)}
    for i, layer in enumerate(a.layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in _layer_shapes(layer, a.hidden_size).items()}
    shapes["model.norm.weight"] = (a.hidden_size,)
    if a.value_head:
        shapes["score.weight"] = (1, a.hidden_size)
    elif not a.tied:
        shapes["lm_head.weight"] = (a.vocab_size, a.hidden_size)
    return shapes


def _layer_shapes(layer: Layer, hidden: int) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of a layer's parameters, in the model's order, without ``model.layers.N.``."""
    a = layer.attention
    return {
        **(_latent_shapes(a, hidden) if isinstance(a, LatentAttention) else _attention_shapes(a, hidden)),
        **_feed_forward_shapes(layer.feed_forward, hidden),
        **{f"{name}.weight": (hidden,) for name in layer.norms.names},
    }


def _attention_shapes(a: Attention, hidden: int) -> dict[str, tuple[int, ...]]:
    q_size, kv_size = a.heads * a.head_dim, a.kv_heads * a.head_dim
    rows = {"qkv": q_size + 2 * kv_size} if a.fused else {"q": q_size, "k": kv_size, "v": kv_size}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, size in {**{name: (n, hidden) for name, n in rows.items()}, "o": (hidden, q_size)}.items():
        shapes[f"self_attn.{name}_proj.weight"] = size
        if name in a.biases:
            shapes[f"self_attn.{name}_proj.bias"] = size[:1]
    if a.sinks:
        shapes["self_attn.sinks"] = (a.heads,)
    if a.qk_norm:
        widths = (a.head_dim, a.head_dim) if a.qk_norm == "head" else (q_size, kv_size)
        shapes |= {f"self_attn.{x}_norm.weight": (width,) for x, width in zip("qk", widths, strict=True)}
    return shapes


def _latent_shapes(a: LatentAttention, hidden: int) -> dict[str, tuple[int, ...]]:
    q_size, kv_size = a.heads * (a.plain_dim + a.rotary.dims), a.heads * (a.plain_dim + a.value_dim)
    low_rank = {"kv_a_proj_with_mqa": (a.kv_rank + a.rotary.dims, hidden), "kv_b_proj": (kv_size, a.kv_rank)}
    if a.q_rank is None:
        matrices = {"q_proj": (q_size, hidden), **low_rank}
    else:
        matrices = {"q_a_proj": (a.q_rank, hidden), "q_b_proj": (q_size, a.q_rank), **low_rank}
    matrices["o_proj"] = (hidden, a.heads * a.value_dim)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, size in matrices.items():
        shapes[f"self_attn.{name}.weight"] = size
        if a.bias and name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
            shapes[f"self_attn.{name}.bias"] = size[:1]
    shapes["self_attn.kv_a_layernorm.weight"] = (a.kv_rank,)
    return shapes if a.q_rank is None else {**shapes, "self_attn.q_a_layernorm.weight": (a.q_rank,)}


def _feed_forward_shapes(part: GatedMlp | MixtureOfExperts, hidden: int) -> dict[str, tuple[int, ...]]:
    if isinstance(part, GatedMlp):
        return _gated_shapes(part, hidden, "mlp")
    shapes: dict[str, tuple[int, ...]] = {f"mlp.{part.router}.weight": (part.experts, hidden)}
    if part.corrected:
        shapes[f"mlp.{part.router}.{CORRECTION}"] = (part.experts,)
    if part.router_bias:
        shapes[f"mlp.{part.router}.bias"] = (part.experts,)
    shapes |= {f"mlp.experts.{name}": (part.experts, *size) for name, size in expert_shapes(part.expert, hidden)}
    if part.shared:
        shapes |= _gated_shapes(part.shared, hidden, part.shared_name)
        if part.shared_gate:
            shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def expert_shapes(expert: GatedMlp | ClampedMlp, hidden: int) -> list[tuple[str, tuple[int, ...]]]:
    """Returns names and shapes of one expert, without the dimension that counts experts."""
    into, size = 2 * expert.size, expert.size
    if isinstance(expert, GatedMlp):
        return [("gate_up_proj", (into, hidden)), ("down_proj", (hidden, size))]
    biases: list[tuple[str, tuple[int, ...]]] = [("gate_up_proj_bias", (into,)), ("down_proj_bias", (hidden,))]
    return [("gate_up_proj", (hidden, into)), ("down_proj", (size, hidden)), *biases]


def _gated_shapes(mlp: GatedMlp, hidden: int, name: str) -> dict[str, tuple[int, ...]]:
    into = {"gate_up_proj": 2 * mlp.size} if mlp.fused else {"gate_proj": mlp.size, "up_proj": mlp.size}
    sizes = {**{part: (rows, hidden) for part, rows in into.items()}, "down_proj": (hidden, mlp.size)}
    shapes: dict[str, tuple[int, ...]] = {}
    for part, size in sizes.items():
        shapes[f"{name}.{part}.weight"] = size
        if mlp.bias:
            shapes[f"{name}.{part}.bias"] = size[:1]
    return shapes
