"""Compares ring attention in ranks with full attention in float64, for test_ring_attention.py."""

import contextlib
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.numerics.float64_tier import exact_tier
from conformance.oracle.attention import attend, hidden_keys
from conformance.runtime import RankContext
from impl.context_parallel.ring_attention import RingAttention, RingConfig, RingKind
from impl.context_parallel.sequence_sharding import restore
from impl.interface.micro_batches import NO_TARGET, MicroBatch

HEADS, KV_HEADS, E = 4, 2, 8
SCALE = 0.3


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: Sequence[int],
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attends within each document, grouped-query (arXiv 2305.13245 section 2), in the dtype of the inputs.
    ``q`` and the result: (T, H, E); ``k``, ``v``: (T, K, E). ``lengths`` of the documents add up to T. ``sinks``: (H,).
    """
    group = q.shape[1] // k.shape[1]
    k_THE, v_THE = (x.repeat_interleave(group, dim=1) for x in (k, v))
    documents = zip(*(x.split(list(lengths)) for x in (q, k_THE, v_THE)), strict=True)
    run = partial(attend, scale=scale, stable=q.dtype, sinks=sinks)
    return torch.cat([run(*qkv, hidden=hidden_keys(len(qkv[0]), window)) for qkv in documents])


def errors(
    context: RankContext,
    *,
    kind: RingKind,
    documents: list[list[int]],
    dtype: str,
    window: int | None = None,
    shipped: bool = False,
    head_stride: int = 1,
    sinks: bool = False,
    seed: int = 7,
) -> dict[str, float]:
    """Relative errors of out, dq, dk, dv, and with ``sinks`` of the gradient of theirs.

    ``documents``: lengths, row by row; rows may differ in length. Errors are relative to the norm of the reference;
    that of the sinks' gradient, which has one number per head, to ``_gathered``.
    """
    packed = any(len(row) > 1 for row in documents)
    config = RingConfig(kind=kind, packed=packed, shipped=shipped, head_stride=head_stride, multiple=1)
    ring_attention = RingAttention(dist.distributed_c10d._get_default_group(), config)
    type_ = getattr(torch, dtype)
    positions, lengths = _positions(documents)
    rows, length = positions.shape
    random = torch.Generator().manual_seed(seed)
    q, k, v, dout = (
        torch.randn(rows * length, heads, E, generator=random, dtype=torch.float64).to(type_).double()
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    scores = torch.linspace(-2, 3, HEADS, dtype=torch.float64).requires_grad_() if sinks else None
    out = packed_attention(q, k, v, lengths=lengths, scale=SCALE, window=window, sinks=scores)
    # What lies in padding does not count: nothing depends on it.
    real = torch.arange(length).expand(rows, -1) < torch.tensor([sum(row) for row in documents])[:, None]
    dout = dout * real.flatten()[:, None, None]
    expected = [out.detach(), *torch.autograd.grad(out, leaves, dout, retain_graph=True)]

    nothing = torch.full_like(positions, NO_TARGET)
    inputs = MicroBatch(tokens=nothing, labels=nothing, positions=positions, real=real, columns={}).to(context.device)
    with exact_tier() if type_ == torch.float64 else contextlib.nullcontext():
        _, ring = ring_attention.shard(inputs)
        sources = ring.source.cpu()
        source = sources[context.rank]
        own = [_own(x.detach().to(type_), source, padding=1.0).to(context.device).requires_grad_() for x in leaves]
        own_dout = _own(dout.to(type_), source, padding=0.0).to(context.device)
        own_scores = None if scores is None else scores.detach().to(type_).to(context.device).requires_grad_()
        own_out = ring(*own, scale=SCALE, window=(-1, -1) if window is None else (window - 1, 0), sinks=own_scores)
        found = [own_out.detach(), *torch.autograd.grad(own_out, own, own_dout, retain_graph=True)]
        assert all(x.dtype == type_ for x in found)
        whole = [_whole(x, sources, rows, real.flatten()) for x in found]
    expected = [x * real.flatten()[:, None, None] for x in expected]
    names, sizes = ["out", "dq", "dk", "dv"], [x.norm() for x in expected]
    if scores is not None:
        assert own_scores is not None
        (own_dsinks,) = torch.autograd.grad(own_out, [own_scores], own_dout)
        own_dsinks = own_dsinks.double()
        dist.all_reduce(own_dsinks)  # each rank has that of its own queries
        names.append("dsinks")
        whole.append(own_dsinks.cpu())
        sizes.append(_gathered(out, scores, dout))
        expected += torch.autograd.grad(out, [scores], dout)
    found_and_expected = zip(names, whole, expected, sizes, strict=True)
    return {name: ((x - ref).norm() / size).item() for name, x, ref, size in found_and_expected}


def _gathered(out: Tensor, scores: Tensor, dout: Tensor) -> Tensor:
    """The gradient of ``scores`` (heads,) is a sum of a term of each token: the sum of their magnitudes, as a norm over
    heads.

    Whoever computes terms to a relative error u each has their sum to u times the sum of their magnitudes (Higham,
    Accuracy and Stability of Numerical Algorithms, section 4.2). The terms have both signs, and the sum of a few dozen
    may be ten times smaller than their magnitudes together: relative to the sum, the error would tell how much has
    cancelled by chance, in the reference as much as on the ring. The other gradients are a thousand such sums each, and
    the norm of so many is not small by chance.
    """
    of_each = torch.diag_embed(dout.permute(1, 2, 0)).permute(2, 3, 0, 1)  # (tokens, tokens, heads, E)
    (terms,) = torch.autograd.grad(out, [scores], of_each, retain_graph=True, is_grads_batched=True)
    size: Tensor = terms.abs().sum(dim=0).norm()
    return size


def _positions(documents: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
    """(rows, length) and the lengths of all documents; padding is a document of its own."""
    longest = max(sum(row) for row in documents)
    lengths = [[*row, *([longest - sum(row)] if sum(row) < longest else [])] for row in documents]
    rows = [torch.cat([torch.arange(n) for n in row]) for row in lengths]
    return torch.stack(rows), [n for row in lengths for n in row]


def _own(x: Tensor, source: Tensor, *, padding: float) -> Tensor:
    """(tokens, heads, E) -> this rank's (rows, length, heads, E); ``padding`` must not matter to what is real."""
    return x[source.clamp(min=0)].masked_fill((source < 0)[..., None, None], padding)


def _whole(own: Tensor, source: Tensor, rows: int, real: Tensor) -> Tensor:
    """All ranks' (rows, length, heads, E) -> (tokens, heads, E) float64 on the CPU, zero in padding."""
    parts = [torch.empty_like(own) for _ in range(len(source))]
    dist.all_gather(parts, own.contiguous())
    together = torch.stack(parts).cpu().double().flatten(3)
    columns = [restore(column, source, rows=rows, length=len(real) // rows).flatten() for column in together.unbind(-1)]
    return (torch.stack(columns, dim=-1) * real[:, None]).view(-1, *own.shape[-2:])
