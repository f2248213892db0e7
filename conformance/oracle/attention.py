"""Causal attention as the papers write it: what the oracle's layers use, and an oracle of its own for rings.

Gradients come from autograd, so nothing here can share a mistake with an explicit backward pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def hidden_keys(tokens: int, window: int | None) -> Tensor:
    """Mask (T, T): True where a query (row) must not see a key (column). ``window`` counts the query's own position."""
    position = torch.arange(tokens)
    distance = position[:, None] - position
    hidden = distance < 0
    return hidden if window is None else hidden | (distance >= window)


def attend(q: Tensor, k: Tensor, v: Tensor, *, hidden: Tensor, scale: float, stable: torch.dtype) -> Tensor:
    """softmax(q k^T * scale) v per head (arXiv 1706.03762 equation 1).

    ``q``, ``k``, ``v`` and the result: (T, H, E). ``hidden``: (T, T) of ``hidden_keys``. ``stable``: softmax's dtype.
    """
    scores_HTT = (q.transpose(0, 1) @ k.permute(1, 2, 0)) * scale
    scores_HTT = scores_HTT.masked_fill(hidden, -torch.inf)
    probabilities_HTT = torch.softmax(scores_HTT, dim=-1, dtype=stable).to(v.dtype)
    return (probabilities_HTT @ v.transpose(0, 1)).transpose(0, 1)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, lengths: Sequence[int], scale: float, window: int | None = None
) -> Tensor:
    """Each document by itself, grouped-query (arXiv 2305.13245 section 2); differentiable, in the dtype of its inputs.

    ``q`` and the result: (T, H, E); ``k``, ``v``: (T, K, E). ``lengths`` of the documents add up to T.
    """
    group = q.shape[1] // k.shape[1]
    k_THE, v_THE = (x.repeat_interleave(group, dim=1) for x in (k, v))
    documents = zip(*(x.split(list(lengths)) for x in (q, k_THE, v_THE)), strict=True)
    return torch.cat(
        [attend(*qkv, hidden=hidden_keys(len(qkv[0]), window), scale=scale, stable=q.dtype) for qkv in documents]
    )
