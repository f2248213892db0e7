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
        whole_HQ = torch.logaddexp(lse_HQ, score_H1)
        out: Tensor = (alone * (lse_HQ - whole_HQ).exp().T[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, whole_HQ, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        from impl.ring import package

        q, k, v, out, whole_HQ, sinks = ctx.saved_tensors
        dq, dk, dv = package.llama3.llama3_flash_attn_varlen_backward(
            ctx.group, dout, q, k.contiguous(), v.contiguous(), out, whole_HQ, *ctx.documents, **ctx.options
        )
        wide = whole_HQ.dtype
        share_HQ = (sinks[:, None].to(wide) - whole_HQ).exp()
        dsinks = -(share_HQ * (dout.to(wide) * out.to(wide)).sum(dim=-1).T).sum(dim=-1)
        return dq, dk, dv, dsinks.to(sinks.dtype), None, None, None, None
