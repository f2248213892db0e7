"""Attention in plain PyTorch for flash-attn's interface: log-sum-exp as a result, and an explicit backward function.

For devices and dtypes that flash-attn has no kernel for: the CPU, and float32 and float64 on CUDA. Formulas from
FlashAttention-2 (arXiv 2307.08691): forward section 3.1.1, backward algorithm 2. Half precision is computed in float32
and rounded at the end. The scores of all documents are in memory at once: (documents, heads, longest, longest).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Window:
    """Which keys a query sees. ``left``, ``right``: how many before and after its own position; -1 is no limit.

    Positions are aligned at the ends of queries and keys (bottom right), as in flash-attn since 2.1.
    """

    causal: bool
    left: int = -1
    right: int = -1


def forward(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: Window) -> tuple[Tensor, Tensor]:
    """Attention of ``q`` (N, Q, heads, E) over ``k``, ``v`` (N, K, kv_heads, E), all N of full length.

    Returns out (N, Q, heads, E) in the dtype of ``q``, and the log-sum-exp of scores (N, heads, Q), float32 or wider.
    A query that sees no key has out 0 and log-sum-exp +inf.
    """
    visible = _visible(q.shape[1], k.shape[1], window, q.device)
    return _forward(q, k, v, scale=scale, visible=visible)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, window: Window
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of ``forward``; ``out`` and ``lse`` may be those of attention over more keys than ``k`` has."""
    visible = _visible(q.shape[1], k.shape[1], window, q.device)
    return _backward(dout, q, k, v, out, lse, scale=scale, visible=visible)


def forward_varlen(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, *, scale: float, window: Window
) -> tuple[Tensor, Tensor]:
    """As ``forward``, for documents laid end to end: ``q`` (Q, heads, E), ``k``, ``v`` (K, kv_heads, E).

    ``starts_q``, ``starts_k``: int (documents + 1,), where documents begin, and the total length. Returns out
    (Q, heads, E) and log-sum-exp (heads, Q).
    """
    at_q, at_k = _Padding(starts_q), _Padding(starts_k)
    visible = _visible_varlen(at_q, at_k, window)
    out, lse = _forward(at_q.pad(q), at_k.pad(k), at_k.pad(v), scale=scale, visible=visible)
    return at_q.unpad(out), at_q.unpad(lse.transpose(1, 2)).T


def backward_varlen(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    *,
    scale: float,
    window: Window,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``backward``, for documents laid end to end; shapes as in ``forward_varlen``."""
    at_q, at_k = _Padding(starts_q), _Padding(starts_k)
    visible = _visible_varlen(at_q, at_k, window)
    lse = at_q.pad(lse.T).transpose(1, 2)  # (documents, heads, longest)
    padded = (at_q.pad(dout), at_q.pad(q), at_k.pad(k), at_k.pad(v), at_q.pad(out), lse)
    dq, dk, dv = _backward(*padded, scale=scale, visible=visible)
    return at_q.unpad(dq), at_k.unpad(dk), at_k.unpad(dv)


def _forward(q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor) -> tuple[Tensor, Tensor]:
    s = _scores(q, k, scale=scale, visible=visible)
    lse = torch.logsumexp(s, dim=-1)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    p = torch.exp(s - lse[..., None])
    out = p @ _heads(v, q.shape[2])
    return out.transpose(1, 2).to(q.dtype), lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, visible: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    heads = q.shape[2]
    dout, out = _heads(dout, heads), _heads(out, heads)
    p = torch.exp(_scores(q, k, scale=scale, visible=visible) - lse[..., None])
    dp = dout @ _heads(v, heads).transpose(-1, -2)
    ds = p * (dp - (dout * out).sum(-1, keepdim=True)) * scale
    dq = (ds @ _heads(k, heads)).transpose(1, 2)
    dk = _kv_heads(ds.transpose(-1, -2) @ _heads(q, heads), k.shape[2])
    dv = _kv_heads(p.transpose(-1, -2) @ dout, k.shape[2])
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, *, scale: float, visible: Tensor) -> Tensor:
    """(N, heads, Q, K), -inf where a query must not see a key."""
    heads = q.shape[2]
    s = (_heads(q, heads) * scale) @ _heads(k, heads).transpose(-1, -2)
    return s.masked_fill(~visible, -torch.inf)


def _heads(x: Tensor, heads: int) -> Tensor:
    """(N, length, kv_heads or heads, E) -> (N, heads, length, E), in float32 or wider; heads of a group are equal."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).transpose(1, 2)
    return wide.repeat_interleave(heads // x.shape[2], dim=1)


def _kv_heads(x: Tensor, kv_heads: int) -> Tensor:
    """(N, heads, length, E) -> (N, length, kv_heads, E): the heads of a group are summed."""
    rows, _, length, width = x.shape
    return x.reshape(rows, kv_heads, -1, length, width).sum(2).transpose(1, 2)


def _visible(queries: int, keys: int, window: Window, device: torch.device) -> Tensor:
    """Which keys a query sees: bool (1, 1, Q, K)."""
    at_query = torch.arange(queries, device=device)[:, None] + keys - queries
    return _within(torch.arange(keys, device=device) - at_query, window)[None, None]


def _visible_varlen(at_q: "_Padding", at_k: "_Padding", window: Window) -> Tensor:
    """Which keys a query sees, in each document: bool (documents, 1, Q, K)."""
    at_query = at_q.position[None, :, None] + (at_k.lengths - at_q.lengths)[:, None, None]  # (documents, Q, 1)
    visible = _within(at_k.position[None, None, :] - at_query, window)
    return (visible & at_q.real[:, :, None] & at_k.real[:, None, :])[:, None]


def _within(distance: Tensor, window: Window) -> Tensor:
    """Whether a query sees a key. ``distance``: the key's position minus the query's."""
    right = 0 if window.causal else window.right
    visible = torch.ones_like(distance, dtype=torch.bool)
    if right >= 0:
        visible &= distance <= right
    if window.left >= 0:
        visible &= distance >= -window.left
    return visible


class _Padding:
    """Documents laid end to end (total, ...) <-> one row for each (documents, longest, ...)."""

    def __init__(self, starts: Tensor) -> None:
        self.lengths = starts[1:] - starts[:-1]
        self.position = torch.arange(int(self.lengths.max()), device=starts.device)
        self.real = self.position < self.lengths[:, None]  # (documents, longest)

    def pad(self, x: Tensor) -> Tensor:
        padded = x.new_zeros(*self.real.shape, *x.shape[1:])
        padded[self.real] = x
        return padded

    def unpad(self, x: Tensor) -> Tensor:
        return x[self.real]
