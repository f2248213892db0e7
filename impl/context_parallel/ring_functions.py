"""Imports ring_flash_attn's autograd functions, and corrects them for float32 and float64.

In version 0.1.8, the backward passes of ring and zigzag widen a block's gradients with ``x.to(torch.float32)`` and
treat the result as a copy. In float32 it is the buffer itself, which the next block overwrites, even while it is being
sent. Two of the functions also end with ``dq.to(torch.bfloat16)``, whatever the dtype of the inputs. See
docs/findings/ring-attention-gradients.md. ``corrected`` changes these two conversions and nothing else.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from impl.context_parallel.flash_attn_shim import import_ring_flash_attn

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
