"""Attention with sinks over the default ring: a learned score per head, without a value, in each softmax.

flash-attn's kernels have none. A sink s only adds exp(s) to the denominator, so attention without it, times
sigmoid(log-sum-exp - s), is attention with it (arXiv 2508.10925 section 2.2). Backward the kernels get the output and
the log-sum-exp with the sink, from which they make the probabilities of keys (FlashAttention-2, arXiv 2307.08691,
algorithm 2), and the gradient of s is -p (dout . out), with p the probability of the sink.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    documents: tuple[Any, ...],
    group: dist.ProcessGroup,
    scale: float,
    window: tuple[int, int],
) -> Tensor:
    """Causal attention of ``q`` (Q, heads, E) over all ranks' ``k``, ``v`` (K, kv_heads, E), in the dtype of ``q``.

    ``sinks``: (heads,). ``documents``: where they begin, as the package's function has it. ``window``: as in Ring.
    """
    out: Tensor = _WithSinks.apply(q, k, v, sinks, documents, group, scale, window)  # type: ignore[no-untyped-call]
    return out


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        documents: tuple[Any, ...],
        group: dist.ProcessGroup,
        scale: float,
        window: tuple[int, int],
    ) -> Tensor:
        from impl.ring import package  # needs ring_flash_attn, which not everybody has

        ctx.options = {"softmax_scale": scale, "causal": True, "window_size": window}
        ctx.documents, ctx.group = documents, group
        alone, lse_HQ = package.llama3.llama3_flash_attn_varlen_forward(
            group, q, k.contiguous(), v.contiguous(), *documents, **ctx.options
        )
        score_H1 = sinks[:, None].to(lse_HQ.dtype)
        # Shares are not exp(lse - whole) and exp(score - whole): the rounding of whole would be one of both.
        out: Tensor = (alone * torch.sigmoid(lse_HQ - score_H1).T[..., None]).to(q.dtype)
        share_HQ = torch.sigmoid(score_H1 - lse_HQ)
        ctx.save_for_backward(q, k, v, out, torch.logaddexp(lse_HQ, score_H1), share_HQ)
        ctx.dtype = sinks.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        from impl.ring import package

        q, k, v, out, whole_HQ, share_HQ = ctx.saved_tensors
        dq, dk, dv = package.llama3.llama3_flash_attn_varlen_backward(
            ctx.group, dout, q, k.contiguous(), v.contiguous(), out, whole_HQ, *ctx.documents, **ctx.options
        )
        wide = whole_HQ.dtype
        dsinks = -(share_HQ * (dout.to(wide) * out.to(wide)).sum(dim=-1).T).sum(dim=-1)
        return dq, dk, dv, dsinks.to(ctx.dtype), None, None, None, None
