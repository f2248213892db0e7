"""Provides flash-attn's interface to ring_flash_attn on every device, and imports that package without flash-attn.

The package calls four private functions of flash-attn 2.8, and inspects their parameter names. The functions of the
same names in this module choose by dtype and device: flash-attn if it is installed, PyTorch's own copy of its kernels
(``aten::_flash_attention_forward/_backward``), or plain PyTorch (impl.context_parallel.reference_kernel).
"""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import transformers.modeling_flash_attention_utils
from torch import Tensor

from impl.context_parallel import reference_kernel
from impl.context_parallel.support import INSTALL, available

HEAD_SIZES = 8  # the kernels of flash-attn and of PyTorch need a multiple of it as head size


def kernel(device: torch.device, dtype: torch.dtype) -> str:
    """Names the implementation for this device and dtype: ``flash-attn``, ``aten`` or ``plain``."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return "plain"
    return "flash-attn" if _flash_attn() else "aten"


def _flash_attn() -> Any:
    """Returns flash-attn's interface if it is installed, else None."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    return importlib.import_module("flash_attn.flash_attn_interface")


def _flash_attn_forward(
    q: Tensor,  # (rows, Q, heads, E)
    k: Tensor,  # (rows, K, kv_heads, E)
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, None, Tensor | None]:
    """Returns out (rows, Q, heads, E), log-sum-exp (rows, heads, Q), None, state of the dropout's random numbers."""
    arguments = dict(locals())
    _check(dropout_p, softcap, alibi_slopes)
    match kernel(q.device, q.dtype):
        case "flash-attn":
            result: tuple[Tensor, Tensor, None, Tensor | None] = _flash_attn()._flash_attn_forward(**arguments)
            return result
        case "aten":
            limits = {"window_size_left": window_size_left, "window_size_right": window_size_right}
            out, lse, rng_state, _, _ = torch.ops.aten._flash_attention_forward(
                q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=softmax_scale, **limits
            )
            return out, lse, None, rng_state
    window = reference_kernel.Window(causal=causal, left=window_size_left, right=window_size_right)
    return *reference_kernel.forward(q, k, v, scale=softmax_scale, window=window), None, None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> None:
    """Writes dq, dk, dv; shapes as in ``_flash_attn_forward``."""
    arguments = dict(locals())
    _check(dropout_p, softcap, alibi_slopes)
    match kernel(q.device, q.dtype):
        case "flash-attn":
            _flash_attn()._flash_attn_backward(**arguments)
            return
        case "aten":
            limits = {"window_size_left": window_size_left, "window_size_right": window_size_right}
            gradients = torch.ops.aten._flash_attention_backward(
                *(dout.contiguous(), q, k, v, out, softmax_lse.contiguous(), None, None, q.shape[1], k.shape[1]),
                *(0.0, causal, *_no_dropout(q)),
                **{"scale": softmax_scale, **limits},
            )
        case _:
            window = reference_kernel.Window(causal=causal, left=window_size_left, right=window_size_right)
            gradients = reference_kernel.backward(dout, q, k, v, out, softmax_lse, scale=softmax_scale, window=window)
    _write((dq, dk, dv), gradients)


def _flash_attn_varlen_forward(
    q: Tensor,  # (Q, heads, E)
    k: Tensor,  # (K, kv_heads, E)
    v: Tensor,
    cu_seqlens_q: Tensor,  # int32 (documents + 1,)
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, Tensor | None]:
    """Returns out (Q, heads, E), log-sum-exp (heads, Q), None, state of the dropout's random numbers."""
    arguments = dict(locals())
    _check(dropout_p, softcap, alibi_slopes)
    match kernel(q.device, q.dtype):
        case "flash-attn":
            result: tuple[Tensor, Tensor, None, Tensor | None] = _flash_attn()._flash_attn_varlen_forward(**arguments)
            return result
        case "aten":
            limits = {"window_size_left": window_size_left, "window_size_right": window_size_right}
            out, lse, rng_state, _, _ = torch.ops.aten._flash_attention_forward(
                *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal, False),
                **{"scale": softmax_scale, **limits},
            )
            return out, lse, None, rng_state
    window = reference_kernel.Window(causal=causal, left=window_size_left, right=window_size_right)
    out, lse = reference_kernel.forward_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, scale=softmax_scale, window=window)
    return out, lse, None, None


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> None:
    """Writes dq, dk, dv; shapes as in ``_flash_attn_varlen_forward``."""
    arguments = dict(locals())
    _check(dropout_p, softcap, alibi_slopes)
    starts = (cu_seqlens_q, cu_seqlens_k)
    match kernel(q.device, q.dtype):
        case "flash-attn":
            _flash_attn()._flash_attn_varlen_backward(**arguments)
            return
        case "aten":
            limits = {"window_size_left": window_size_left, "window_size_right": window_size_right}
            gradients = torch.ops.aten._flash_attention_backward(
                *(dout.contiguous(), q, k, v, out, softmax_lse.contiguous(), *starts, max_seqlen_q, max_seqlen_k),
                *(0.0, causal, *_no_dropout(q)),
                **{"scale": softmax_scale, **limits},
            )
        case _:
            window = reference_kernel.Window(causal=causal, left=window_size_left, right=window_size_right)
            gradients = reference_kernel.backward_varlen(
                dout, q, k, v, out, softmax_lse, *starts, scale=softmax_scale, window=window
            )
    _write((dq, dk, dv), gradients)


def _check(dropout: float, softcap: float, slopes: Tensor | None) -> None:
    if dropout or softcap or slopes is not None:
        raise ValueError("ring attention supports no dropout, softcap or ALiBi; switch them off in the model's config")


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a placeholder for the state of dropout's random numbers, which a kernel without dropout does not read."""
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return state, state.new_empty(())


def _write(buffers: tuple[Tensor, Tensor, Tensor], gradients: tuple[Tensor, Tensor, Tensor]) -> None:
    # The package passes slices of larger buffers and reads them afterwards; aten returns new tensors.
    for buffer, gradient in zip(buffers, gradients, strict=True):
        buffer.copy_(gradient)


_NAMES = ("_flash_attn_forward", "_flash_attn_backward", "_flash_attn_varlen_forward", "_flash_attn_varlen_backward")


@contextlib.contextmanager
def _as_flash_attn() -> Iterator[None]:
    """Lets modules of ring_flash_attn import flash-attn from here, and a name that transformers has removed."""
    interface = ModuleType("flash_attn.flash_attn_interface")
    for name in _NAMES:
        setattr(interface, name, globals()[name])
    stand_in = {"flash_attn": ModuleType("flash_attn"), "flash_attn.flash_attn_interface": interface}
    before = {name: sys.modules.get(name) for name in stand_in}
    sys.modules.update(stand_in)
    utilities, removed = transformers.modeling_flash_attention_utils, "is_flash_attn_greater_or_equal_2_10"
    absent = not hasattr(utilities, removed)
    if absent:
        setattr(utilities, removed, True)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
        if absent:
            delattr(utilities, removed)


def import_ring_flash_attn(name: str) -> ModuleType:
    """Imports a module of ring_flash_attn with the kernels of this module.

    Raises ValueError if the package is missing.
    """
    if not available():
        raise ValueError(f"ring attention needs the package ring-flash-attn; run: {INSTALL}")
    with _as_flash_attn():
        return importlib.import_module(f"ring_flash_attn.{name}")
