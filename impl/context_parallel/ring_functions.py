"""Provides the autograd functions of ring attention: ring_flash_attn's, corrected, and PyTorch's own.

In version 0.1.8 of ring_flash_attn, the backward passes of ring and zigzag widen a block's gradients with
``x.to(torch.float32)`` and treat the result as a copy. In float32 it is the buffer itself, which the next block
overwrites, even while it is being sent. Two of the functions also end with ``dq.to(torch.bfloat16)``, whatever the
dtype of the inputs. See docs/findings/ring-attention-gradients.md. ``corrected`` changes these two conversions and
nothing else.

PyTorch's ``context_parallel()`` (torch.distributed.tensor.experimental) replaces scaled_dot_product_attention. That
fails on the CPU: "aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy
registered" (torch 2.13); float64 has no fused kernel anywhere. But PyTorch's communication and merging accept any
kernel. Here they use the kernels of impl.context_parallel.flash_attn_shim, for whole rows without a window (PyTorch's
load balancing is zigzag).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.overrides import TorchFunctionMode

from impl.context_parallel.flash_attn_shim import _flash_attn_backward, _flash_attn_forward, import_ring_flash_attn

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


ring = import_ring_flash_attn("ring_flash_attn")
ring_varlen = import_ring_flash_attn("ring_flash_attn_varlen")
zigzag = import_ring_flash_attn("zigzag_ring_flash_attn")
zigzag_varlen = import_ring_flash_attn("zigzag_ring_flash_attn_varlen")
llama3 = import_ring_flash_attn("llama3_flash_attn_varlen")

Function = type[torch.autograd.Function]


class _Widening(TorchFunctionMode):
    """Makes ``x.to(torch.float32)`` copy and never narrow, and ``x.to(torch.bfloat16)`` give the inputs' dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and args[1:] == (torch.float32,):
            return args[0].to(torch.promote_types(args[0].dtype, torch.float32), copy=True)
        if func is Tensor.to and args[1:] == (torch.bfloat16,):
            return args[0].to(self._dtype)
        return func(*args, **(kwargs or {}))


def corrected(function: Function) -> Function:
    """Returns a subclass that is right in float32 and float64 and does not round dq to bfloat16."""

    class Corrected(function):  # type: ignore[valid-type, misc]
        @staticmethod
        def forward(ctx: Any, q: Tensor, *arguments: Any) -> Any:
            with _Widening(q.dtype):
                return function.forward(ctx, q, *arguments)

        @staticmethod
        def backward(ctx: Any, dout: Tensor, *arguments: Any) -> Any:
            with _Widening(dout.dtype):
                return function.backward(ctx, dout, *arguments)

    return Corrected
