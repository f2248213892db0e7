"""Multi-head latent attention: queries, keys and values of low rank, and positions in a part that all keys share.

DeepSeek-V2, arXiv 2405.04434 section 2.1.2 and 2.1.3 (equations 9 to 19); DeepSeek-V3, arXiv 2412.19437 section 2.1.1.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from conformance.oracle.attention import attend
from conformance.oracle.linear import linear
from conformance.oracle.norm import rms_norm
from conformance.oracle.parts import LatentAttention
from conformance.oracle.policy import Policy
from conformance.oracle.positions import Table, rotate
from conformance.oracle.tap import Module
from conformance.oracle.variant import Weights


def latent_shapes(a: LatentAttention, hidden: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters; a Linear's weight is (out, in)."""
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


def latent_attention(
    x: Tensor, w: Weights, a: LatentAttention, *, table: Table, hidden: Tensor, policy: Policy, module: Module
) -> Tensor:
    """Causal attention of one document, ``x`` (T, D). R: the numbers of a head that positions turn."""

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
    if policy.fused:
        q_HTE, k_HTE, v_HTE = (tensor.transpose(0, 1)[None] for tensor in (q_THE, k_THE, v_THE))
        mixed_HTE = F.scaled_dot_product_attention(q_HTE, k_HTE, v_HTE, attn_mask=~hidden, scale=a.scale)[0]
        mixed_THE = mixed_HTE.transpose(0, 1)
    else:
        mixed_THE = attend(q_THE, k_THE, v_THE, hidden=hidden, scale=a.scale, stable=policy.stable)
    return linear(mixed_THE.reshape(len(x), a.heads * a.value_dim), w, "self_attn.o_proj", module)


def _halves(x: Tensor) -> Tensor:
    """Pairs (x_0, x_1), (x_2, x_3), ... as (x_0, x_2, ..., x_1, x_3, ...), which ``rotate`` turns; q and k alike."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
