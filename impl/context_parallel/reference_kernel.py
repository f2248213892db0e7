"""Computes attention in plain PyTorch, with flash-attn's interface: it returns the log-sum-exp and has a backward.

It serves devices and dtypes without a flash-attn kernel: the CPU, and float32 and float64 on CUDA. Formulas from
FlashAttention-2 (arXiv 2307.08691): forward section 3.1.1, backward algorithm 2. Half precision is computed in float32
and rounded at the end. The scores of documents of similar length are in memory at once: (documents, heads, longest,
longest).
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Window:
    """Limits the keys that a query sees. ``left``, ``right``: how many before and after its position; -1 is no limit.

    Positions are aligned at the ends of queries and keys (bottom right), as in flash-attn since 2.1.
    """

    causal: bool
    left: int = -1
    right: int = -1


def forward(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: Window) -> tuple[Tensor, Tensor]:
    """Computes attention of ``q`` (N, Q, heads, E) over ``k``, ``v`` (N, K, kv_heads, E), all N of full length.

    Returns out (N, Q, heads, E) in the dtype of ``q``, and the log-sum-exp of scores (N, heads, Q), float32 or wider.
    A query that sees no key has out 0 and log-sum-exp +inf.
    """
    visible = _visible(q.shape[1], k.shape[1], window, q.device)
    return _forward(q, k, v, scale=scale, visible=visible)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, window: Window
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk, dv of ``forward``; ``out`` and ``lse`` may come from attention over more keys than ``k`` has."""
    visible = _visible(q.shape[1], k.shape[1], window, q.device)
    return _backward(dout, q, k, v, out, lse, scale=scale, visible=visible)


def forward_varlen(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, *, scale: float, window: Window
) -> tuple[Tensor, Tensor]:
    """Computes ``forward`` for documents laid end to end: ``q`` (Q, heads, E), ``k``, ``v`` (K, kv_heads, E).

    ``starts_q``, ``starts_k``: int (documents + 1,), where documents begin, and the total length. Returns out
    (Q, heads, E) and log-sum-exp (heads, Q).
    """
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=_wide(q.dtype))  # lse: (Q, heads)
    for at_q, at_k, visible in _groups(starts_q, starts_k, queries=len(q), keys=len(k), window=window):
        some_out, some_lse = _forward(at_q.pad(q), at_k.pad(k), at_k.pad(v), scale=scale, visible=visible)
        at_q.put(some_out, out)
        at_q.put(some_lse.transpose(1, 2), lse)
    return out, lse.T


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
    """Computes ``backward`` for documents laid end to end; shapes as in ``forward_varlen``."""
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)  # a document may have keys only
    for at_q, at_k, visible in _groups(starts_q, starts_k, queries=len(q), keys=len(k), window=window):
        some_lse = at_q.pad(lse.T).transpose(1, 2)  # (documents, heads, longest)
        padded = (at_q.pad(dout), at_q.pad(q), at_k.pad(k), at_k.pad(v), at_q.pad(out), some_lse)
        some_dq, some_dk, some_dv = _backward(*padded, scale=scale, visible=visible)
        at_q.put(some_dq, dq)
        at_k.put(some_dk, dk)
        at_k.put(some_dv, dv)
    return dq, dk, dv


def _forward(q: Tensor, k: Tensor, v: Tensor, *, scale: float, visible: Tensor) -> tuple[Tensor, Tensor]:
    s = _scores(q, k, scale=scale, visible=visible)
    largest = s.amax(-1, keepdim=True)
    unseen = largest == -torch.inf  # queries that see no key
    p = (s - largest.masked_fill(unseen, 0.0)).exp_()
    total = p.sum(-1, keepdim=True)
    out = (p @ _heads(v, q.shape[2])) / total.masked_fill(unseen, 1.0)
    lse = (largest + total.log()).masked_fill(unseen, torch.inf)
    return out.transpose(1, 2).to(q.dtype), lse[..., 0]


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, visible: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    heads = q.shape[2]
    dout, out = _heads(dout, heads), _heads(out, heads)
    p = _scores(q, k, scale=scale, visible=visible).sub_(lse[..., None]).exp_()
    dp = dout @ _heads(v, heads).transpose(-1, -2)
    ds = dp.sub_((dout * out).sum(-1, keepdim=True)).mul_(p).mul_(scale)
    dq = (ds @ _heads(k, heads)).transpose(1, 2)
    dk = _kv_heads(ds.transpose(-1, -2) @ _heads(q, heads), k.shape[2])
    dv = _kv_heads(p.transpose(-1, -2) @ dout, k.shape[2])
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, *, scale: float, visible: Tensor) -> Tensor:
    """Returns the scores (N, heads, Q, K), -inf where a query must not see a key."""
    heads = q.shape[2]
    s = (_heads(q, heads) * scale) @ _heads(k, heads).transpose(-1, -2)
    return s.masked_fill_(~visible, -torch.inf)


def _heads(x: Tensor, heads: int) -> Tensor:
    """Repeats (N, length, kv_heads or heads, E) per group to (N, heads, length, E), in float32 or wider."""
    wide, group = x.to(_wide(x.dtype)).transpose(1, 2), heads // x.shape[2]
    return wide.contiguous() if group == 1 else wide.repeat_interleave(group, dim=1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _kv_heads(x: Tensor, kv_heads: int) -> Tensor:
    """Sums the heads of each group: (N, heads, length, E) to (N, length, kv_heads, E)."""
    rows, _, length, width = x.shape
    return x.reshape(rows, kv_heads, -1, length, width).sum(2).transpose(1, 2)


def _visible(queries: int, keys: int, window: Window, device: torch.device) -> Tensor:
    """Returns the mask of the keys that a query sees: bool (1, 1, Q, K)."""
    at_query = torch.arange(queries, device=device)[:, None] + keys - queries
    return _within(torch.arange(keys, device=device) - at_query, window)[None, None]


def _visible_varlen(at_q: "_Rows", at_k: "_Rows", window: Window) -> Tensor:
    """Returns the mask of the keys that a query sees in each document: bool (documents, 1, Q, K)."""
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


def _groups(
    starts_q: Tensor, starts_k: Tensor, *, queries: int, keys: int, window: Window
) -> tuple[tuple["_Rows", "_Rows", Tensor], ...]:
    """Returns the documents in groups of similar length, and the mask of the keys that a query sees.

    All layers of a model, and their backward passes, ask for the same documents.
    """
    of_q, of_k = tuple(starts_q.tolist()), tuple(starts_k.tolist())
    assert (of_q[-1], of_k[-1]) == (queries, keys), "every token belongs to a document"
    return _groups_of(of_q, of_k, window, starts_q.device)


@lru_cache(maxsize=8)
def _groups_of(
    of_q: tuple[int, ...], of_k: tuple[int, ...], window: Window, device: torch.device
) -> tuple[tuple["_Rows", "_Rows", Tensor], ...]:
    pairs = ((_Rows(of_q, documents, device), _Rows(of_k, documents, device)) for documents in _by_length(of_q, of_k))
    return tuple((at_q, at_k, _visible_varlen(at_q, at_k, window)) for at_q, at_k in pairs)


def _by_length(of_q: tuple[int, ...], of_k: tuple[int, ...]) -> Iterator[list[int]]:
    """Groups the documents that have queries by the bit length of their numbers of keys.

    So a row of keys is never padded to twice its length or more.
    """
    groups: dict[int, list[int]] = {}
    for document, (begin, end) in enumerate(itertools.pairwise(of_q)):
        if begin < end:
            groups.setdefault((of_k[document + 1] - of_k[document]).bit_length(), []).append(document)
    yield from groups.values()


class _Rows:
    """Converts between documents laid end to end, (total, ...), and padded rows, (documents, longest, ...)."""

    def __init__(self, starts: tuple[int, ...], documents: list[int], device: torch.device) -> None:
        begins = torch.tensor([starts[i] for i in documents], device=device)
        self.lengths = torch.tensor([starts[i + 1] - starts[i] for i in documents], device=device)
        self.position = torch.arange(int(self.lengths.max()), device=device)
        self.real = self.position < self.lengths[:, None]  # (documents, longest)
        self._at = (begins[:, None] + self.position)[self.real]
        self._among = self.real.flatten().nonzero()[:, 0]  # the places of ``_at`` in all rows, one after another

    def pad(self, x: Tensor) -> Tensor:
        padded = x.new_zeros(self.real.numel(), *x.shape[1:])
        return padded.index_copy_(0, self._among, x.index_select(0, self._at)).view(*self.real.shape, *x.shape[1:])

    def put(self, rows: Tensor, x: Tensor) -> None:
        """Writes ``rows`` (documents, longest, ...) to their places in ``x`` (total, ...)."""
        x.index_copy_(0, self._at, rows.flatten(0, 1).index_select(0, self._among))
