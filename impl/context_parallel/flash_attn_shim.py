"""Provides flash-attn's interface to ring_flash_attn on every device, and imports that package without flash-attn.

The package calls four private functions of flash-attn 2.8, and inspects their parameter names. The functions of the
same names in this module choose by dtype and device: flash-attn if it is installed, PyTorch's own copy of its kernels
(``aten::_flash_attention_forward/_backward``), or plain PyTorch (impl.context_parallel.reference_kernel). Each of them
is one operator, so a dispatch mode is called once for it, and not for each of its products.
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
from impl.context_parallel.sequence_sharding import INSTALL, available

Forward = tuple[Tensor, Tensor, None, Tensor | None]
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
) -> Forward:
    """Returns out (rows, Q, heads, E), log-sum-exp (rows, heads, Q), None, state of the dropout's random numbers."""
    return _forward("_flash_attn_forward", locals())


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
    _backward("_flash_attn_backward", locals())


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
) -> Forward:
    """Returns out (Q, heads, E), log-sum-exp (heads, Q), None, state of the dropout's random numbers."""
    return _forward("_flash_attn_varlen_forward", locals())


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
    _backward("_flash_attn_varlen_backward", locals())


def _forward(function: str, arguments: dict[str, Any]) -> Forward:
    """Computes what flash-attn's ``function`` does, with the kernel for its tensors."""
    _check(**arguments)
    q, k, v = (arguments[name] for name in ("q", "k", "v"))
    starts = _starts(arguments)
    match kernel(q.device, q.dtype):
        case "flash-attn":
            result: Forward = getattr(_flash_attn(), function)(**arguments)
            return result
        case "aten":
            out, lse, rng_state, _, _ = torch.ops.aten._flash_attention_forward(
                *(q, k, v, *_aten_lengths(arguments), 0.0, arguments["causal"], False), **_aten_options(arguments)
            )
            return out, lse, None, rng_state
    with torch._C.DisableTorchFunction():  # no mode replaces anything here, and each costs more than a small kernel
        return *torch.ops.parity.attention(q, k, v, starts, *_plain_options(arguments)), None, None


def _backward(function: str, arguments: dict[str, Any]) -> None:
    """Writes dq, dk and dv as flash-attn's ``function`` does, with the kernel for its tensors."""
    _check(**arguments)
    dout, q, k, v, out, lse = (arguments[name] for name in ("dout", "q", "k", "v", "out", "softmax_lse"))
    starts = _starts(arguments)
    match kernel(q.device, q.dtype):
        case "flash-attn":
            getattr(_flash_attn(), function)(**arguments)
            return
        case "aten":
            # A placeholder for the state of dropout's random numbers, which a kernel without dropout does not read.
            state = torch.zeros(2, dtype=torch.uint64, device=q.device)
            gradients = torch.ops.aten._flash_attention_backward(
                *(dout.contiguous(), q, k, v, out, lse.contiguous(), *_aten_lengths(arguments)),
                *(0.0, arguments["causal"], state, state.new_empty(())),
                **_aten_options(arguments),
            )
        case _:
            with torch._C.DisableTorchFunction():
                gradients = torch.ops.parity.attention_backward(
                    dout, q, k, v, out, lse, starts, *_plain_options(arguments)
                )
    # The package passes slices of larger buffers and reads them afterwards; aten returns new tensors.
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        arguments[name].copy_(gradient)


def _check(*, dropout_p: float, softcap: float, alibi_slopes: Tensor | None, **_: Any) -> None:
    if dropout_p or softcap or alibi_slopes is not None:
        raise ValueError("ring attention supports no dropout, softcap or ALiBi; switch them off in the model's config")


def _starts(arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """Returns the starts of documents laid end to end, of queries and of keys; nothing for whole rows."""
    return tuple(arguments[name] for name in ("cu_seqlens_q", "cu_seqlens_k") if name in arguments)


def _plain_options(arguments: dict[str, Any]) -> tuple[float, bool, int, int]:
    """Returns the options of the operators in plain PyTorch: the scale, and the window that a query sees."""
    left, right = arguments["window_size_left"], arguments["window_size_right"]
    return arguments["softmax_scale"], arguments["causal"], left, right


_OPERATORS = torch.library.Library("parity", "FRAGMENT")
_OPTIONS = "Tensor[] starts, float scale, bool causal, int left, int right"
_OPERATORS.define(f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
_OPERATORS.define(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)


@torch.library.impl(_OPERATORS, "attention", "CompositeExplicitAutograd")
def _plain_forward(
    q: Tensor, k: Tensor, v: Tensor, starts: list[Tensor], scale: float, causal: bool, left: int, right: int
) -> tuple[Tensor, Tensor]:
    compute = reference_kernel.forward_varlen if starts else reference_kernel.forward
    window = reference_kernel.Window(causal=causal, left=left, right=right)
    return compute(q, k, v, *starts, scale=scale, window=window)


@torch.library.impl(_OPERATORS, "attention_backward", "CompositeExplicitAutograd")
def _plain_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: list[Tensor],
    scale: float,
    causal: bool,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    compute = reference_kernel.backward_varlen if starts else reference_kernel.backward
    window = reference_kernel.Window(causal=causal, left=left, right=right)
    return compute(dout, q, k, v, out, lse, *starts, scale=scale, window=window)


def _aten_lengths(arguments: dict[str, Any]) -> tuple[Tensor | int | None, ...]:
    """Returns aten's four arguments for the starts and the longest lengths of queries and keys."""
    if starts := _starts(arguments):
        return *starts, arguments["max_seqlen_q"], arguments["max_seqlen_k"]
    return None, None, arguments["q"].shape[1], arguments["k"].shape[1]


def _aten_options(arguments: dict[str, Any]) -> dict[str, Any]:
    window = {name: arguments[name] for name in ("window_size_left", "window_size_right")}
    return {"scale": arguments["softmax_scale"], **window}


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
