"""Computes causal attention as the papers write it, for the oracle's layers and as a reference for context parallelism.

Gradients come from autograd, so this module cannot share a mistake with an explicit backward pass. Multi-head latent
attention is that of DeepSeek-V2, arXiv 2405.04434 section 2.1.2 and 2.1.3 (equations 9 to 19), and DeepSeek-V3, arXiv
2412.19437 section 2.1.1. Gated DeltaNet is arXiv 2412.06464 (equation 10 and section 3.4), token by token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from conformance.models.components import Attention, GatedDeltaNet, LatentAttention, Norm
from conformance.oracle.primitives import Module, Policy, Table, Weights, linear, rms_norm, rotate

LONG = 2**18  # scores of a head; glibc takes blocks above 32 MiB from the kernel each time, and clears them


def hidden_keys(tokens: int, window: int | None) -> Tensor:
    """Returns the mask (T, T), True where a query (row) must not see a key (column).

    ``window`` counts the query's own position.
    """
    position = torch.arange(tokens)
    distance = position[:, None] - position
    hidden = distance < 0
    return hidden if window is None else hidden | (distance >= window)


@dataclass(frozen=True)
class Mask:
    """Says what the queries of one document of T tokens do not see.

    hidden: of ``hidden_keys``, (T, T). blind: (T,), True for queries that see no key, whose output is 0; None if each
    sees one. Only a defect makes a query blind.
    """

    hidden: Tensor
    blind: Tensor | None

    @classmethod
    def of(cls, hidden: Tensor) -> "Mask":
        blind = hidden.all(dim=1)
        return cls(hidden & ~blind[:, None], blind) if bool(blind.any()) else cls(hidden, None)

    def to(self, device: torch.device) -> "Mask":
        return Mask(self.hidden.to(device), None if self.blind is None else self.blind.to(device))


def by_document(run: Callable[..., Tensor], masks: Sequence[Mask], *tensors: Tensor) -> Tensor:
    """Runs attention within each document by itself. ``tensors``: queries, keys and values, each (T, H, E), of
    documents that lie end to end."""
    found = []
    for mask, *own in zip(masks, *(tensor.split([len(m.hidden) for m in masks]) for tensor in tensors), strict=True):
        mixed_THE = run(*own, hidden=mask.hidden)
        found.append(mixed_THE if mask.blind is None else mixed_THE.masked_fill(mask.blind[:, None, None], 0.0))
    return found[0] if len(found) == 1 else torch.cat(found)


def fused(q: Tensor, k: Tensor, v: Tensor, *, hidden: Tensor, scale: float) -> Tensor:
    """Computes ``attend`` with torch's kernel, which rounds in its own way."""
    q_HTE, k_HTE, v_HTE = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q_HTE, k_HTE, v_HTE, attn_mask=~hidden, scale=scale)[0].transpose(0, 1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    hidden: Tensor,
    scale: float,
    stable: torch.dtype,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes softmax(q k^T * scale) v per head (arXiv 1706.03762 equation 1).

    On CPUs, heads of long documents are computed one after another, which changes no bit.

    ``q``, ``k``, ``v`` and the result: (T, H, E). ``hidden``: (T, T) of ``hidden_keys``. ``stable``: dtype of the
    softmax. ``softcap``: scores s become softcap * tanh(s / softcap) (arXiv 2408.00118 section 2). ``sinks``: (H,), the
    score of every query for a key without a value, which only adds to the denominator (arXiv 2508.10925 section 2.2).
    """
    if q.is_cpu and len(q) ** 2 > LONG and q.shape[1] > 1:
        of_heads = zip(*(tensor.split(1, dim=1) for tensor in (q, k, v)), strict=True)
        sinks_of_heads = sinks.split(1) if sinks is not None else [None] * q.shape[1]
        run = partial(attend, hidden=hidden, scale=scale, stable=stable, softcap=softcap)
        return torch.cat([run(*own, sinks=s) for own, s in zip(of_heads, sinks_of_heads, strict=True)], dim=1)
    scores_HTT = (q.transpose(0, 1) @ k.permute(1, 2, 0)).mul_(scale)
    if softcap is not None:
        scores_HTT = torch.tanh(scores_HTT / softcap) * softcap
    scores_HTT = scores_HTT.masked_fill_(hidden, -torch.inf)
    if sinks is not None:
        scores_HTT = torch.cat([scores_HTT, sinks[:, None, None].expand(-1, len(q), 1)], dim=-1)
    probabilities_HTT = torch.softmax(scores_HTT, dim=-1, dtype=stable)[..., : len(k)].to(v.dtype)
    return (probabilities_HTT @ v.transpose(0, 1)).transpose(0, 1)


def attention(
    x: Tensor,
    w: Weights,
    a: Attention,
    norm: Norm,
    *,
    table: Table,
    masks: Sequence[Mask],
    policy: Policy,
    module: Module,
) -> Tensor:
    """Computes causal grouped-query attention within each document, ``x`` (T, D)."""
    q_THE, k_TKE, v_TKE, gate_THE = _projected(x, w, a, norm, policy, module)
    q_THE, k_TKE = rotate(q_THE, table), rotate(k_TKE, table)
    # Query head h reads kv head h // (H / K).
    k_THE = k_TKE.repeat_interleave(a.heads // a.kv_heads, dim=1)
    v_THE = v_TKE.repeat_interleave(a.heads // a.kv_heads, dim=1)
    sinks_H = w["self_attn.sinks"] if a.sinks else None
    if policy.fused and a.softcap is None and sinks_H is None:  # torch's kernel has neither
        run: Callable[..., Tensor] = partial(fused, scale=a.scale)
    else:
        run = partial(attend, scale=a.scale, stable=policy.stable, softcap=a.softcap, sinks=sinks_H)
    mixed_THE = by_document(run, masks, q_THE, k_THE, v_THE)
    if gate_THE is not None:
        mixed_THE = mixed_THE * torch.sigmoid(gate_THE)
    return linear(mixed_THE.reshape(len(x), a.heads * a.head_dim), w, "self_attn.o_proj", module)


def _projected(
    x: Tensor, w: Weights, a: Attention, norm: Norm, policy: Policy, module: Module
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns q (T, H, E), k and v (T, K, E), normalized where the model has norms for q and k, and a gate as q."""
    gate = None
    q_size, kv_size = a.heads * a.head_dim, a.kv_heads * a.head_dim
    if a.fused:
        q, k, v = linear(x, w, "self_attn.qkv_proj", module).split([q_size, kv_size, kv_size], dim=-1)
    else:
        q, k, v = (linear(x, w, f"self_attn.{name}_proj", module) for name in "qkv")
    if a.qk_norm == "width":
        q = rms_norm(q, w["self_attn.q_norm.weight"], norm, policy)
        k = rms_norm(k, w["self_attn.k_norm.weight"], norm, policy)
    if a.gated:
        q, gate = q.view(len(x), a.heads, 2 * a.head_dim).chunk(2, dim=-1)
    q, k, v = (y.reshape(len(x), -1, a.head_dim) for y in (q, k, v))
    if a.qk_norm == "head":
        q = rms_norm(q, w["self_attn.q_norm.weight"], norm, policy)
        k = rms_norm(k, w["self_attn.k_norm.weight"], norm, policy)
    return q, k, v, gate


def latent_attention(
    x: Tensor, w: Weights, a: LatentAttention, *, table: Table, masks: Sequence[Mask], policy: Policy, module: Module
) -> Tensor:
    """Computes causal latent attention within each document, ``x`` (T, D). R: the rotated dimensions of a head."""

    def normed(name: str, latent: Tensor) -> Tensor:
        return rms_norm(latent, w[f"self_attn.{name}.weight"], a.norm, policy)

    if a.q_rank is None:
        q = linear(x, w, "self_attn.q_proj", module)
    else:
        q = linear(normed("q_a_layernorm", linear(x, w, "self_attn.q_a_proj", module)), w, "self_attn.q_b_proj", module)
    latent, k_TR = linear(x, w, "self_attn.kv_a_proj_with_mqa", module).split([a.kv_rank, a.rotary.dims], dim=-1)
    kv = linear(normed("kv_a_layernorm", latent), w, "self_attn.kv_b_proj", module)
    q_plain, q_THR = q.view(len(x), a.heads, -1).split([a.plain_dim, a.rotary.dims], dim=-1)
    k_plain, v_THE = kv.view(len(x), a.heads, -1).split([a.plain_dim, a.value_dim], dim=-1)
    k_T1R = k_TR[:, None]
    if a.interleaved:
        q_THR, k_T1R = _halves(q_THR), _halves(k_T1R)
    q_THE = torch.cat([q_plain, rotate(q_THR, table)], dim=-1)
    k_THE = torch.cat([k_plain, rotate(k_T1R, table).expand(-1, a.heads, -1)], dim=-1)
    run = partial(fused, scale=a.scale) if policy.fused else partial(attend, scale=a.scale, stable=policy.stable)
    mixed_THE = by_document(run, masks, q_THE, k_THE, v_THE)
    return linear(mixed_THE.reshape(len(x), a.heads * a.value_dim), w, "self_attn.o_proj", module)


def gated_delta_net(
    x: Tensor, w: Weights, a: GatedDeltaNet, *, lengths: list[int], policy: Policy, module: Module
) -> Tensor:
    """Computes linear attention within each document, ``x`` (T, D). G: key heads, H: value heads.

    q, k and v go through a causal convolution of each channel and SiLU; q and k of a head have length 1, and q is
    divided by sqrt(key_dim). The decay of a step is exp(-exp(A_log) softplus(a + dt_bias)), as in Mamba 2 (arXiv
    2405.21060), and its writing strength sigmoid(b). The output is normalised, times SiLU of z.
    """
    tokens, shared = len(x), a.value_heads // a.heads
    qkvz_TGE = linear(x, w, "linear_attn.in_proj_qkvz", module).view(tokens, a.heads, -1)
    values = shared * a.value_dim
    *qkv, z = qkvz_TGE.split([a.key_dim, a.key_dim, values, values], dim=-1)
    b_TGE, a_TGE = linear(x, w, "linear_attn.in_proj_ba", module).view(tokens, a.heads, -1).split(shared, dim=-1)
    channels = torch.cat([part.flatten(1) for part in qkv], dim=-1)
    padded = (F.pad(document, (0, 0, a.kernel - 1, 0)) for document in channels.split(lengths))
    past = torch.cat([document.unfold(0, a.kernel, 1) for document in padded])  # (T, channels, kernel)
    mixed = F.silu((past * w["linear_attn.conv1d.weight"][:, 0]).sum(-1)).to(policy.stable)
    keys = a.heads * a.key_dim
    q, k, v = mixed.split([keys, keys, a.heads * values], dim=-1)
    units = (_unit(part.view(tokens, a.heads, a.key_dim)) for part in (q, k))
    q_THE, k_THE = (part.repeat_interleave(shared, dim=1) for part in units)
    rate_H = w["linear_attn.A_log"].to(policy.stable).exp()
    step_TH = F.softplus(a_TGE.reshape(tokens, -1).to(policy.stable) + w["linear_attn.dt_bias"])
    strength_TH = b_TGE.reshape(tokens, -1).sigmoid().to(policy.stable)
    v_THE = v.view(tokens, a.value_heads, a.value_dim)
    parts = (q_THE * a.key_dim**-0.5, k_THE, v_THE, (-rate_H * step_TH).exp(), strength_TH)
    documents = zip(*(part.split(lengths) for part in parts), strict=True)
    o_THE = torch.cat([delta_rule(*document) for document in documents]).to(policy.compute)
    normed = rms_norm(o_THE, w["linear_attn.norm.weight"], a.norm, policy)
    gated = normed * F.silu(z.reshape(o_THE.shape).to(policy.stable))
    return linear(gated.to(policy.compute).flatten(1), w, "linear_attn.out_proj", module)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
    """Computes S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T and S_t q_t, with S_0 = 0, for each head.

    ``q``, ``k``: (T, H, E). ``v`` and the result: (T, H, F). ``decay`` a and ``strength`` b: (T, H).
    """
    state_HFE = q.new_zeros(v.shape[1], v.shape[2], k.shape[2])
    outputs = []
    for q_HE, k_HE, v_HF, a_H, b_H in zip(q, k, v, decay, strength, strict=True):
        state_HFE = a_H[:, None, None] * state_HFE
        read_HF = (state_HFE @ k_HE[:, :, None])[..., 0]
        state_HFE = state_HFE + (b_H[:, None] * (v_HF - read_HF))[:, :, None] * k_HE[:, None]
        outputs.append((state_HFE @ q_HE[:, :, None])[..., 0])
    return torch.stack(outputs)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _halves(x: Tensor) -> Tensor:
    """Reorders pairs (x_0, x_1), (x_2, x_3), ... as (x_0, x_2, ..., x_1, x_3, ...), the order of ``rotate``."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
