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


def attend(
    q_THE: Tensor, k_THE: Tensor, v_THE: Tensor, *, hidden_TT: Tensor, scale: float, stable: torch.dtype
) -> Tensor:
    """softmax(q k^T * scale) v per head, (T, H, E) (arXiv 1706.03762 equation 1); ``stable`` is the softmax's dtype."""
    scores_HTT = (q_THE.transpose(0, 1) @ k_THE.permute(1, 2, 0)) * scale
    scores_HTT = scores_HTT.masked_fill(hidden_TT, -torch.inf)
    probabilities_HTT = torch.softmax(scores_HTT, dim=-1, dtype=stable).to(v_THE.dtype)
    return (probabilities_HTT @ v_THE.transpose(0, 1)).transpose(0, 1)


def packed_attention(
    q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, *, lengths: Sequence[int], scale: float, window: int | None = None
) -> Tensor:
    """Each document by itself, grouped-query (arXiv 2305.13245 section 2): (T, H, E), differentiable.

    ``lengths`` of the documents add up to T. Give float64 to get a reference.
    """
    group = q_THE.shape[1] // k_TKE.shape[1]
    k_THE, v_THE = (x.repeat_interleave(group, dim=1) for x in (k_TKE, v_TKE))
    documents = zip(*(x.split(list(lengths)) for x in (q_THE, k_THE, v_THE)), strict=True)
    return torch.cat(
        [attend(q, k, v, hidden_TT=hidden_keys(len(q), window), scale=scale, stable=q.dtype) for q, k, v in documents]
    )
