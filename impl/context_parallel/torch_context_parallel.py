"""Runs PyTorch's own ring attention (torch.distributed.tensor.experimental) on every device and in every dtype.

``context_parallel()`` itself replaces scaled_dot_product_attention. That fails on the CPU: "aten.
_scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy registered" (torch 2.13); float64
has no fused kernel anywhere. But PyTorch's communication and merging accept any kernel. Here they use the kernels of
impl.context_parallel.flash_attn_shim, for whole rows without a window (PyTorch's load balancing is zigzag).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention

from impl.context_parallel.flash_attn_shim import _flash_attn_backward, _flash_attn_forward

# torch types these for its own kernels; any kernel with the same arguments works.
_ring_forward: Any = _attention._templated_ring_attention
_ring_backward: Any = _attention._templated_ring_attention_backward
SEQUENCE = 2  # dimension of (rows, heads, length, E)


class ContextParallelAttention(torch.autograd.Function):
    """Computes zigzag attention with the arguments of ring_flash_attn's functions: q, k, v (rows, length, heads, E)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout: float,
        scale: float,
        causal: bool,
        window: tuple[int, int],
        alibi: None,
        deterministic: bool,
        return_softmax: bool,
        group: dist.ProcessGroup,
    ) -> Tensor:
        assert causal
        assert not dropout
        assert window == (-1, -1)
        assert _attention._cp_options.enable_load_balance
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))  # (rows, heads, length, E)
        out, lse, *_ = _ring_forward(group, SEQUENCE, _forward, q, k, v, is_causal=True, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.group = scale, group
        result: Tensor = out.transpose(1, 2)
        return result

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = _ring_backward(
            *(ctx.group, SEQUENCE, _backward, dout.transpose(1, 2).contiguous(), "grad_out"),
            *(q, k, v, out, lse),
            is_causal=True,
            scale=ctx.scale,
        )
        return *(gradient.transpose(1, 2) for gradient in gradients[:3]), *(None,) * 8


def _forward(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, ...]:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse, *_ = _flash_attn_forward(q, k, v, 0.0, scale, is_causal, -1, -1, 0.0, None, False)
    return out.transpose(1, 2), lse


def _backward(
    *,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    _flash_attn_backward(dout, q, k, v, o, logsumexp, dq, dk, dv, 0.0, scale, is_causal, -1, -1, 0.0, None, False)
    return tuple(x.transpose(1, 2) for x in (dq, dk, dv))
