"""Sums over the vocabulary and computes the gradient of logits in one pass each, as Triton kernels for outputs.py.

They serve logits in half precision on GPUs, where PyTorch's own operations need six passes in float32. Triton comes
only with PyTorch's CUDA wheels, so only ``impl.models.outputs`` imports this module, and only if Triton is installed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits of a row that a program has in its registers


def sums(z: Tensor, highest: Tensor, *, temperature: float, entropy: bool) -> Tensor:
    """Computes (sum exp(s), sum s exp(s)) of s = z / temperature - highest over the vocabulary, float32 (2, tokens).

    ``z`` (tokens, V), ``highest`` float32 (tokens,). Without ``entropy``, there is no second row.
    """
    result = highest.new_empty(2 if entropy else 1, len(z))
    if len(z):
        _sums[len(z),](
            *(z, highest, result, z.stride(0), z.shape[1], len(z), temperature),
            **{"ENTROPY": entropy, "BLOCK": BLOCK, "num_warps": 8},
        )
    return result


def gradient(
    z: Tensor,
    *,
    highest: Tensor,
    total: Tensor,
    mean: Tensor | None,
    of_logprob: Tensor,
    of_entropy: Tensor | None,
    label: Tensor,
    temperature: float,
    width: int,
) -> Tensor:
    """Computes the gradient of the logits in their dtype, (tokens, width); it is 0 beyond the V columns of z.

    See impl/models/outputs.py for the formula. ``z``: (tokens, V). ``highest``, ``total``, ``mean``, ``of_logprob``,
    ``of_entropy``: float32 (tokens,). ``label`` int64 (tokens,): the label's index in the shard, negative if it is not
    there.
    """
    result = torch.empty(len(z), width, dtype=z.dtype, device=z.device)
    blocks = -(-width // BLOCK)
    if len(z) and blocks:
        _gradient[len(z), blocks](
            *(z, highest, total, mean, of_logprob, of_entropy, label, result),
            *(z.stride(0), z.shape[1], width, temperature),
            **{"ENTROPY": of_entropy is not None, "BLOCK": BLOCK, "num_warps": 8},
        )
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    z, highest, result, stride, size, tokens, temperature, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    most = tl.load(highest + token)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        s = tl.load(z + token * stride + at, mask=at < size, other=-float("inf")).to(tl.float32)
        s = s / temperature - most
        e = tl.exp(s)
        total += e
        if ENTROPY:
            weighted += tl.where(e > 0, s * e, 0.0)  # -inf times 0 is NaN
    tl.store(result + token, tl.sum(total))
    if ENTROPY:
        tl.store(result + tokens + token, tl.sum(weighted))


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    z,
    highest,
    total,
    mean,
    of_logprob,
    of_entropy,
    label,
    result,
    stride,
    size,
    width,
    temperature,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    upstream = tl.load(of_logprob + token)
    s = tl.load(z + token * stride + at, mask=at < size, other=-float("inf")).to(tl.float32)
    s = s / temperature - tl.load(highest + token)
    p = tl.exp(s) / tl.load(total + token)
    g = -upstream * p
    if ENTROPY:
        weighted = tl.where(p > 0, (s - tl.load(mean + token)) * p, 0.0)
        g -= tl.load(of_entropy + token) * weighted
    g += tl.where(at == tl.load(label + token), upstream, 0.0)
    tl.store(result + token * width + at, (g / temperature).to(result.dtype.element_ty), mask=at < width)
