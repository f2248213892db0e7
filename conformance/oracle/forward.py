"""Forward pass of one document, from the papers, and the model's weights.

Serves claim 6: the same plain code, run in float64, is the reference of every backend; run in float32, bfloat16 or
float16 it shows how much error that precision costs.

Capital letters in names and comments are shapes: T tokens, D hidden, H heads, K kv heads, E head_dim, F intermediate,
V vocabulary. x and y are always the (T, D) activations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from conformance.inputs.model import weight_files, weight_shapes
from conformance.oracle.architecture import Architecture, Layer
from conformance.oracle.attention import attend, hidden_keys
from conformance.oracle.tap import NO_TAP, Module, Tap
from conformance.oracle.variant import HONEST, Variant
from conformance.oracle.variant import Weights as Weights
from conformance.validation import UsageError
from conformance.world.heartbeat import mark


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


def load_weights(model: Path, architecture: Architecture, dtype: torch.dtype) -> Weights:
    """All parameters of the Hugging Face folder ``model`` in ``dtype``; a tied head is left out.

    Raises UsageError for a missing or broken file and for names or shapes that do not fit the architecture.
    """
    check_shapes(weight_shapes(model), architecture, str(model))
    found = {name: tensor for file in weight_files(model) for name, tensor in load_file(file).items()}
    return {name: found[name].to(dtype) for name in parameter_shapes(architecture)}


def check_shapes(found: Mapping[str, tuple[int, ...]], architecture: Architecture, source: str) -> None:
    """Raises UsageError where tensors, by name and shape, are not the parameters of the architecture.

    The head of a tied pair may be there or not.
    """
    expected = parameter_shapes(architecture)
    optional = {"lm_head.weight"} if architecture.tied else set()
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is not expected" for name in found if name not in expected and name not in optional]
    wrong += [
        f"{name} has shape {found[name]} instead of {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if wrong:
        raise UsageError(f"the weights in {source} do not fit its config.json: {'; '.join(wrong[:8])}")


def parameter_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters, in the model's order; a Linear's weight is (out, in)."""
    q_size, kv_size = a.heads * a.head_dim, a.kv_heads * a.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocab_size, a.hidden_size)}
    for i in range(len(a.layers)):
        layer = f"model.layers.{i}."
        for name, rows, columns, bias in (
            ("self_attn.q_proj", q_size, a.hidden_size, a.attention_bias),
            ("self_attn.k_proj", kv_size, a.hidden_size, a.attention_bias),
            ("self_attn.v_proj", kv_size, a.hidden_size, a.attention_bias),
            ("self_attn.o_proj", a.hidden_size, q_size, a.attention_bias),
            ("mlp.gate_proj", a.intermediate_size, a.hidden_size, a.mlp_bias),
            ("mlp.up_proj", a.intermediate_size, a.hidden_size, a.mlp_bias),
            ("mlp.down_proj", a.hidden_size, a.intermediate_size, a.mlp_bias),
        ):
            shapes[layer + name + ".weight"] = (rows, columns)
            if bias:
                shapes[layer + name + ".bias"] = (rows,)
        if a.qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = shapes[layer + "self_attn.k_norm.weight"] = (a.head_dim,)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if a.sandwich_norms:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        shapes |= {f"{layer}{norm}.weight": (a.hidden_size,) for norm in norms}
    shapes["model.norm.weight"] = (a.hidden_size,)
    if a.value_head:
        shapes["score.weight"] = (1, a.hidden_size)
    elif not a.tied:
        shapes["lm_head.weight"] = (a.vocab_size, a.hidden_size)
    return shapes


def forward(
    tokens: Tensor, weights: Weights, a: Architecture, policy: Policy, variant: Variant = HONEST, tap: Tap = NO_TAP
) -> Tensor:
    """Logits (T, V) in ``policy.compute`` of one document ``tokens`` (T,) int64; ``weights`` are the masters.

    A value model gives one number per token instead, (T, 1), without soft-capping.

    The masters are cast here, inside autograd, so that their gradients come back in the master dtype. ``variant``: a
    known defect, if any. ``tap`` sees the modules, under the names that they have in the Hugging Face model.
    """
    w = {name: tensor.to(policy.compute) for name, tensor in weights.items()}
    embeddings_VD = w["model.embed_tokens.weight"]
    x = tap.module("model.embed_tokens", partial(_embed, weight=embeddings_VD, a=a, policy=policy), tokens)
    tables = {
        layer: (
            _rope(len(tokens), layer, a, policy),
            variant.hidden_keys(hidden_keys(len(tokens), layer.window), layer.window),
        )
        for layer in set(a.layers)
    }
    for i, layer in enumerate(a.layers):
        mark()
        prefix = f"model.layers.{i}."
        own = {name.removeprefix(prefix): tensor for name, tensor in w.items() if name.startswith(prefix)}
        x = _decoder_layer(x, own, *tables[layer], a, policy, tap.inside(prefix))
    x = tap.module("model.norm", partial(_norm, weight=w["model.norm.weight"], a=a, policy=policy), x)
    if a.value_head:
        return tap.module("score", lambda x: x @ w["score.weight"].T, x)
    head_VD = variant.head(embeddings_VD if a.tied else w["lm_head.weight"], w)
    logits_TV = tap.module("lm_head", lambda x: x @ head_VD.T, x)
    if a.final_softcap is not None:
        logits_TV = torch.tanh(logits_TV / a.final_softcap) * a.final_softcap
    return logits_TV


def _embed(tokens: Tensor, weight: Tensor, a: Architecture, policy: Policy) -> Tensor:
    x = F.embedding(tokens, weight, padding_idx=a.padding_token)
    if a.embedding_scale != 1.0:
        # Rounded to the compute dtype first, as Gemma does.
        x = x * torch.tensor(a.embedding_scale, dtype=policy.compute)
    return x


def _decoder_layer(
    x: Tensor, w: Weights, rope: tuple[Tensor, Tensor], hidden: Tensor, a: Architecture, policy: Policy, module: Module
) -> Tensor:
    """Pre-norm residual layer; with sandwich norms, the outputs of attention and MLP are normed as well."""

    def norm(name: str, x: Tensor) -> Tensor:
        return module(name, partial(_norm, weight=w[name + ".weight"], a=a, policy=policy), x)

    y = norm("input_layernorm", x)
    attention = partial(_attention, w=w, rope=rope, hidden=hidden, a=a, policy=policy, module=module)
    y = module("self_attn", attention, y)
    if a.sandwich_norms:
        y = norm("post_attention_layernorm", y)
    x = x + y
    y = norm("pre_feedforward_layernorm" if a.sandwich_norms else "post_attention_layernorm", x)
    y = module("mlp", partial(_gated_mlp, w=w, a=a, module=module), y)
    if a.sandwich_norms:
        y = norm("post_feedforward_layernorm", y)
    return x + y


def _norm(x: Tensor, weight: Tensor, a: Architecture, policy: Policy) -> Tensor:
    """RMSNorm over the last dimension: x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467 equation 4).

    Llama rounds to the compute dtype before it multiplies by the weight, Gemma (weight: 1 + w) after it.
    """
    x = x.to(policy.stable)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + a.norm_eps)
    if a.norm_plus_one:
        return (x * (1 + weight.to(policy.stable))).to(policy.compute)
    return weight * x.to(policy.compute)


def _attention(
    x: Tensor, w: Weights, rope: tuple[Tensor, Tensor], hidden: Tensor, a: Architecture, policy: Policy, module: Module
) -> Tensor:
    """Causal grouped-query attention, softmax(q k^T * scale) v (arXiv 1706.03762 equation 1, 2305.13245 section 2).

    A query that sees no key, which there is only with a defect, has output 0.
    """
    tokens = len(x)
    q_THE = _linear(x, w, "self_attn.q_proj", module).view(tokens, a.heads, a.head_dim)
    k_TKE = _linear(x, w, "self_attn.k_proj", module).view(tokens, a.kv_heads, a.head_dim)
    v_TKE = _linear(x, w, "self_attn.v_proj", module).view(tokens, a.kv_heads, a.head_dim)
    if a.qk_norm:
        q_THE = _norm(q_THE, w["self_attn.q_norm.weight"], a, policy)
        k_TKE = _norm(k_TKE, w["self_attn.k_norm.weight"], a, policy)
    q_THE, k_TKE = _rotate(q_THE, rope), _rotate(k_TKE, rope)
    # Query head h reads kv head h // (H / K).
    k_THE = k_TKE.repeat_interleave(a.heads // a.kv_heads, dim=1)
    v_THE = v_TKE.repeat_interleave(a.heads // a.kv_heads, dim=1)
    blind = hidden.all(dim=1)
    hidden = hidden & ~blind[:, None]
    if policy.fused:
        q_HTE, k_HTE, v_HTE = (tensor.transpose(0, 1)[None] for tensor in (q_THE, k_THE, v_THE))
        mixed_HTE = F.scaled_dot_product_attention(q_HTE, k_HTE, v_HTE, attn_mask=~hidden, scale=a.attention_scale)[0]
        mixed_THE = mixed_HTE.transpose(0, 1)
    else:
        mixed_THE = attend(q_THE, k_THE, v_THE, hidden=hidden, scale=a.attention_scale, stable=policy.stable)
    mixed_THE = mixed_THE.masked_fill(blind[:, None, None], 0.0)
    return _linear(mixed_THE.reshape(tokens, a.heads * a.head_dim), w, "self_attn.o_proj", module)


def _gated_mlp(x: Tensor, w: Weights, a: Architecture, module: Module) -> Tensor:
    """down(act(gate(x)) * up(x)) (arXiv 2002.05202 eq. 6); silu, or gelu in its tanh form (1606.08415 section 2)."""
    gate_TF = _linear(x, w, "mlp.gate_proj", module)
    gate_TF = F.silu(gate_TF) if a.activation == "silu" else F.gelu(gate_TF, approximate="tanh")
    return _linear(gate_TF * _linear(x, w, "mlp.up_proj", module), w, "mlp.down_proj", module)


def _linear(x: Tensor, w: Weights, name: str, module: Module) -> Tensor:
    return module(name, partial(F.linear, weight=w[name + ".weight"], bias=w.get(name + ".bias")), x)


def _rope(tokens: int, layer: Layer, a: Architecture, policy: Policy) -> tuple[Tensor, Tensor]:
    """cos and sin (T, 1, E/2) of position * theta^(-2i/E) (arXiv 2104.09864 section 3.2.2)."""
    exponents = torch.arange(0, a.head_dim, 2, dtype=policy.stable) / a.head_dim
    angles = torch.arange(tokens, dtype=policy.stable)[:, None, None] / layer.rope_theta**exponents
    return angles.cos().to(policy.compute), angles.sin().to(policy.compute)


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x_i, x_{i+E/2}) of a head by its angle: the pairing of the published Hugging Face weights."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
