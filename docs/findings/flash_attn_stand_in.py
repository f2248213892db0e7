"""No finding, but a module for the ring_attention_* findings: flash-attn in plain PyTorch, so that no GPU is needed.

`install` puts the four private functions of flash-attn 2.8 that ring_flash_attn calls into `sys.modules`, with the
parameters that ring_flash_attn passes by name. As in flash-attn, causal masks and windows are aligned to the bottom
right, the backward functions use the lse and write into the buffers that they are given, and a query that sees no key
has output 0 and lse +inf. Unlike flash-attn, they accept float32 and float64 too; the lse of float64 is float64.
`own_error` compares them with `full_attention`, which shares no code with them; as a script, this module prints it.
"""

import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers.modeling_flash_attention_utils as transformers_flash

Tensor = torch.Tensor
NAMES = ("out", "dq", "dk", "dv")
LENGTHS = [16, 32, 16]


def scores(q: Tensor, k: Tensor, scale: float, causal: bool, left: int, right: int) -> Tensor:
    back = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))  # how far back the key lies
    visible = (back <= left) | (left < 0)
    visible &= (back >= 0) if causal else (back >= -right) | (right < 0)
    return (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~visible, float("-inf"))


def wide(q: Tensor, *others: Tensor) -> list[Tensor]:
    """q and the other tensors in float32 or wider, each with as many heads as q."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return [x.to(dtype).repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (q, *others)]


def one_forward(q: Tensor, k: Tensor, v: Tensor, *mask: Any) -> tuple[Tensor, Tensor]:
    wq, wk, wv = wide(q, k, v)
    s = scores(wq, wk, *mask)
    lse = s.logsumexp(-1)
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    return torch.einsum("hqk,khd->qhd", (s - lse[:, :, None]).exp(), wv).to(q.dtype), lse


def one_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *mask: Any) -> list[Tensor]:
    wq, wk, wv, wdo, wout = wide(q, k, v, do, out)
    p = (scores(wq, wk, *mask) - lse[:, :, None]).exp()
    ds = p * (torch.einsum("qhd,khd->hqk", wdo, wv) - (wdo * wout).sum(-1).T[:, :, None]) * mask[0]
    dk, dv = torch.einsum("hqk,qhd->khd", ds, wq), torch.einsum("hqk,qhd->khd", p, wdo)
    return [torch.einsum("hqk,khd->qhd", ds, wk), *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))]


def documents(cu_seqlens: Tensor, *streams: Tensor) -> list[Any]:
    return list(zip(*(x.split(cu_seqlens.diff().tolist()) for x in streams), strict=True))


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, **_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    mask, rows = (softmax_scale, causal, window_size_left, window_size_right), documents(cu_seqlens_k, k, v)
    done = [one_forward(*q_, *row, *mask) for q_, row in zip(documents(cu_seqlens_q, q), rows, strict=True)]
    return torch.cat([out for out, _ in done]), torch.cat([lse for _, lse in done], dim=1), None, None


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, **_: Any,
) -> None:  # fmt: skip
    mask, rows = (softmax_scale, causal, window_size_left, window_size_right), documents(cu_seqlens_k, k, v, dk, dv)
    for q_row, (k_, v_, *dkv) in zip(documents(cu_seqlens_q, dout, q, out, softmax_lse.T, dq), rows, strict=True):
        do, q_, out_, lse, dq_ = q_row
        for buffer, gradient in zip((dq_, *dkv), one_backward(do, q_, k_, v_, out_, lse.T, *mask), strict=True):
            buffer.copy_(gradient)


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor,
    softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, **_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    mask = (softmax_scale, causal, window_size_left, window_size_right)
    done = [one_forward(*row, *mask) for row in zip(q, k, v, strict=True)]
    return torch.stack([out for out, _ in done]), torch.stack([lse for _, lse in done]), None, None


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int, **_: Any,
) -> None:  # fmt: skip
    mask = (softmax_scale, causal, window_size_left, window_size_right)
    for *row, dq_, dk_, dv_ in zip(dout, q, k, v, out, softmax_lse, dq, dk, dv, strict=True):
        for buffer, gradient in zip((dq_, dk_, dv_), one_backward(*row, *mask), strict=True):
            buffer.copy_(gradient)


def install(transformers_name: bool = True) -> None:
    """Make `import flash_attn` find these functions.

    By default, also add the names that ring_flash_attn (0.1.8, and 0.1.0 to 0.1.7) imports from transformers and that
    transformers 5.23 lacks.
    """
    package, interface = (types.ModuleType(n) for n in ("flash_attn", "flash_attn.flash_attn_interface"))
    for function in (
        _flash_attn_forward, _flash_attn_backward, _flash_attn_varlen_forward, _flash_attn_varlen_backward,
    ):  # fmt: skip
        setattr(interface, function.__name__, function)
    for module in (package, interface):
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    if transformers_name:
        for name in ("is_flash_attn_greater_or_equal_2_10", "_flash_supports_window_size"):
            setattr(transformers_flash, name, True)
        setattr(transformers_flash, "is_flash_attn_greater_or_equal", lambda _: True)  # noqa: B010


def full_attention(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lengths: list[int], window: int | None = None
) -> dict[str, Tensor]:
    """Causal attention within packed documents of these lengths, in float64 and in this process: out, dq, dk, dv."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    of, at = torch.repeat_interleave(torch.tensor(lengths)), torch.arange(len(q))
    back = at[:, None] - at
    seen = (of[:, None] == of) & (back >= 0) & (back < (window or len(q)))
    hq, hk, hv = (x.transpose(0, 1)[None] for x in (q, k, v))
    attention = torch.nn.functional.scaled_dot_product_attention
    out = attention(hq, hk, hv, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)
    out.backward(dout.double())
    return {
        "out": out.detach(),
        **{f"d{n}": x.grad for n, x in zip("qkv", (q, k, v), strict=True) if x.grad is not None},
    }


def inputs(tokens: int) -> list[Tensor]:
    """q, k, v, dout (tokens, heads, 16), equal on every rank; q and dout have 4 heads, k and v have 2."""
    torch.manual_seed(0)
    return [torch.randn(tokens, heads, 16, dtype=torch.float64) for heads in (4, 2, 2, 4)]


def share(lengths: list[int], rank: int, zigzag: bool) -> Tensor:
    """The indices of the tokens on one rank of two: half of each document.

    With zigzag, rank 0 has the two outer quarters of each document, and rank 1 the two inner ones.
    """
    own = [d.chunk(4 if zigzag else 2) for d in torch.arange(sum(lengths)).split(lengths)]
    return torch.cat([torch.cat([d[rank], d[3 - rank]]) if zigzag else d[rank] for d in own])


def whole(local: Tensor, tokens: Tensor, total: int) -> Tensor:
    full = torch.zeros(total, *local.shape[1:], dtype=torch.float64)
    full[tokens] = local.double()
    dist.all_reduce(full)
    return full


def error(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


def distributed(
    kind: str, dtype: torch.dtype, rank: int, window: int | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Output and gradients of all 64 tokens, by `ring_flash_attn.{kind}_func` over two ranks and by `full_attention`.

    The varlen functions get three documents packed in one stream, the others one sequence.
    """
    import ring_flash_attn

    lengths = LENGTHS if "varlen" in kind else [sum(LENGTHS)]
    q, k, v, dout = (x.to(dtype) for x in inputs(sum(LENGTHS)))
    own = share([sum(LENGTHS)] if "llama3" in kind else lengths, rank, "zigzag" in kind)
    local = [x[own].requires_grad_() for x in (q, k, v)]
    function, cu = getattr(ring_flash_attn, f"{kind}_func"), torch.tensor([0, *lengths]).cumsum(0).int()
    mask = {"causal": True, "window_size": (window - 1, 0) if window else (-1, -1)}
    if "llama3" in kind:
        *cut, keys = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(cu, True, rank, 2)
        out = function(*local, *cut, heads_k_stride=2, local_k_slice=keys, **mask)
    elif "varlen" in kind:
        out = function(*local, cu // 2, max(lengths) // 2, **mask)
    else:
        out = function(*(x[None] for x in local), **mask)[0]
    out.backward(dout[own])
    pieces = zip(NAMES, (out.detach(), *(x.grad for x in local)), strict=True)
    found = {name: whole(piece, own, len(q)) for name, piece in pieces}
    return found, full_attention(q, k, v, dout, lengths, window)


def norm(gradients: dict[str, Tensor]) -> float:
    return float(torch.stack([g.norm() for g in gradients.values()]).norm())


def own_error() -> float:
    """The worst error of the stand-in in float64, in one process: packed documents, with and without a window."""
    worst, cu = 0.0, torch.tensor([0, *LENGTHS]).cumsum(0)
    q, k, v, dout = inputs(sum(LENGTHS))
    for window in (None, 8):
        mask = {"softmax_scale": 0.25, "causal": True, "window_size_left": (window or 0) - 1, "window_size_right": 0}
        out, lse, _, _ = _flash_attn_varlen_forward(q, k, v, cu, cu, **mask)  # type: ignore[arg-type]
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        _flash_attn_varlen_backward(dout, q, k, v, out, lse, dq, dk, dv, cu, cu, **mask)  # type: ignore[arg-type]
        right = full_attention(q, k, v, dout, LENGTHS, window)
        worst = max(worst, *(error(x, right[n]) for n, x in zip(NAMES, (out, dq, dk, dv), strict=True)))
    return worst


def rank_main(rank: int, store: str, verdict: Any, present: Callable[[int], bool]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    found = present(rank)
    if rank == 0:
        verdict.put(found)


def two_ranks(present: Callable[[int], bool]) -> NoReturn:
    """Print versions, call `present(rank)` on two gloo ranks, and exit with rank 0's answer: 0 if present, else 1."""
    warnings.simplefilter("ignore", FutureWarning)  # new names of collectives
    own, versions = own_error(), (f"{name} {version(name)}" for name in ("ring-flash-attn", "torch", "transformers"))
    print(*versions, sep=", ", end="; 2 ranks\n")
    print(f"stand-in for flash-attn against full attention, float64, one process: {own:.0e}", flush=True)
    verdict = mp.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (f"{folder}/store", verdict, present), 2, start_method="fork")
    there = verdict.get() and own < 1e-14
    print("defect present" if there else "defect not as described")
    sys.exit(0 if there else 1)


if __name__ == "__main__":
    print(f"stand-in for flash-attn against full attention, float64, one process: {own_error():.0e}")
