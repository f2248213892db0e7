"""Computes log-prob, entropy and value of every token, from whole logits or vocabulary shards.

The same code serves both: without a process group, the only shard is the whole vocabulary. To save memory, the logits
are the only tensor of their size that is kept for the backward pass, which recomputes the softmax. Only a part of them
exists in float32 at a time.

The divergence of a student from its teacher is computed at each token likewise. The teacher's logits stay where they
were computed: each rank has the same part of both models' vocabularies.
"""

import functools
import importlib.util
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from conformance.spec.batch import KEPT
from conformance.spec.observables import Head
from conformance.spec.offline import Distillation
from impl.interface.micro_batches import MicroBatch, Outputs, Wanted

WIDENED_AT_ONCE = 2**25  # logits, 128 MiB in float32


def outputs_of(
    result: Tensor,
    inputs: MicroBatch,
    *,
    head: Head,
    want: Wanted,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> Outputs:
    """Computes the outputs that ``want`` names, from a model's ``result`` for the tokens of ``inputs``.

    ``result``: a language model's logits (rows, length, V), or a vocabulary shard of them with or without padding, as
        in ``token_statistics``; or a value model's values (rows, length, 1).
    """
    if head == "value":
        assert want <= {"values"}, "a value model has no vocabulary"
        values = result[..., 0].to(torch.promote_types(result.dtype, torch.float32))
        return Outputs(values=values.where(inputs.real, 0) if want else None)
    assert "values" not in want, "a language model has no values"
    result = kept_logits(result, inputs, start=vocab_start)
    logprobs, entropy = token_statistics(
        result,
        inputs.labels,
        temperature=temperature,
        group=group,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        entropy="entropy" in want,
    )
    targets = inputs.targets.to(logprobs.dtype) if "targets" in want else None
    found = Outputs(logprobs=logprobs if "logprobs" in want else None, entropy=entropy, targets=targets)
    own = result if vocab_size is None else result[..., :vocab_size]
    if "distribution" in want:
        inputs.kept["distribution"] = own.detach()
    for objective in (one for one in want if isinstance(one, Distillation)):
        found = replace(found, divergence=divergence_of(own, inputs, objective, group))
    return found


def kept_logits(logits: Tensor, inputs: MicroBatch, *, start: int) -> Tensor:
    """Returns the logits with -inf for tokens that the sampler did not keep, where the micro-batch has its masks.

    ``logits``: (rows, length, V), a part of the vocabulary that begins at token ``start``.
    """
    slots = [column for name, column in inputs.columns.items() if name.startswith(KEPT)]
    if not slots:
        return logits
    tokens = torch.stack(slots, dim=-1).long() - 1  # -1: none
    index, held = _shard_index(tokens, start, logits.shape[-1])
    kept = logits.new_zeros(*logits.shape[:-1], logits.shape[-1] + 1, dtype=torch.bool)
    kept.scatter_(-1, index.where(held, logits.shape[-1]), value=True)  # the last column is for those of other parts
    known = (tokens >= 0).any(dim=-1, keepdim=True)
    return logits.where(kept[..., :-1] | ~known, -torch.inf)


def divergence_of(
    logits: Tensor, inputs: MicroBatch, objective: Distillation, group: dist.ProcessGroup | None
) -> Tensor:
    """Computes Outputs.divergence, (rows, length), from this rank's logits (rows, length, V)."""
    targets = inputs.targets
    own, known = (_tokens(z, z.shape[-1])[targets.flatten()] for z in (logits, inputs.kept["distribution"]))
    found = divergences(own, known, objective, group)
    return found.new_zeros(targets.shape).masked_scatter(targets, found)


def token_statistics(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Computes (log p of the labels, entropy) of softmax(logits / temperature), each (...,), differentiable.

    ``logits`` (..., V): the whole vocabulary; or with ``group`` this rank's shard of it, which begins at token
    ``vocab_start`` and may be empty. The ranks of the group hold all shards; they all get the same result and must all
    compute the same loss from it. ``vocab_size``: logits from this index on are padding and are ignored; by default
    there is no padding. ``labels`` (...,) int64: tokens of the whole vocabulary; a negative label gives 0 without a
    gradient. Logits may be -inf. The computation is in float32, or in float64 if the logits are. Without ``entropy``,
    the second result is None.

    With s = logits / temperature - their maximum and p = softmax(s): log p_y = s_y - log sum exp(s), with the gradient
    (1[j = y] - p_j) / temperature; entropy H = log sum exp(s) - sum p s, with -p_j (s_j - sum p s) / temperature.
    """
    size = logits.shape[-1] if vocab_size is None else vocab_size
    statistics: tuple[Tensor, Tensor | None] = _TokenStatistics.apply(  # type: ignore[no-untyped-call]
        logits, labels, temperature, group, vocab_start, size, entropy
    )
    return statistics


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        start: int,
        size: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)  # None, not zeros, for an output that the loss does not use
        z, tokens = _tokens(logits, size), labels.flatten()
        highest = _scaled(z.amax(dim=-1), temperature)
        if group is not None:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        index, held = _shard_index(tokens, start, size)
        of_label = (_scaled(z.gather(-1, index[:, None])[:, 0], temperature) - highest).where(held, 0)
        kernels = _kernels(z)
        over_vocabulary = kernels.sums if kernels else _sums
        sums = torch.cat([of_label[None], over_vocabulary(z, highest, temperature=temperature, entropy=entropy)])
        if group is not None:
            dist.all_reduce(sums, group=group)
        total, log_total = sums[1], sums[1].log()
        mean = sums[2] / total if entropy else None  # sum p s
        ctx.save_for_backward(logits, labels, highest, total, mean)
        ctx.temperature, ctx.start, ctx.size = temperature, start, size
        target = tokens >= 0
        logprobs = (sums[0] - log_total).where(target, 0).view(labels.shape)
        return logprobs, None if mean is None else (log_total - mean).where(target, 0).view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprob: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, labels, highest, total, mean = ctx.saved_tensors
        z, tokens = _tokens(logits, ctx.size), labels.flatten()
        target = tokens >= 0
        of_logprob = torch.zeros_like(highest) if of_logprob is None else of_logprob.flatten().where(target, 0)
        of_entropy = None if of_entropy is None else of_entropy.flatten().where(target, 0)
        index, held = _shard_index(tokens, ctx.start, ctx.size)
        if kernels := _kernels(z):
            fused = kernels.gradient(
                z,
                highest=highest,
                total=total,
                mean=mean,
                of_logprob=of_logprob,
                of_entropy=of_entropy,
                label=index.where(held, -1),
                temperature=ctx.temperature,
                width=logits.shape[-1],
            )
            return fused.view(logits.shape), *(None,) * 6
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
        gradient[..., ctx.size :] = 0
        own = _tokens(gradient, ctx.size)  # a view, except for an empty shard, which has no gradient
        for part in _parts(z):
            s = _shifted(z[part], highest[part], ctx.temperature)
            upstream = of_logprob[part], None if of_entropy is None else of_entropy[part]
            g = through_softmax_(s, total[part], None if mean is None else mean[part], *upstream)
            through_label_(g, upstream[0], index=index[part], held=held[part])
            own[part] = g if ctx.temperature == 1 else g.div_(ctx.temperature)
        return gradient, *(None,) * 6


def _kernels(z: Tensor) -> Any:
    """Returns impl.models.triton_kernels for logits in half precision on a GPU with Triton; else None."""
    half = z.dtype in (torch.bfloat16, torch.float16)
    if not (half and z.is_cuda and z.stride(-1) == 1 and _has_triton()):
        return None
    from impl.models import triton_kernels

    return triton_kernels


@functools.cache
def _has_triton() -> bool:
    """Returns whether Triton is installed and finds a C compiler."""
    compiler = os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc")
    return compiler is not None and importlib.util.find_spec("triton") is not None


def _sums(z: Tensor, highest: Tensor, *, temperature: float, entropy: bool) -> Tensor:
    """Computes (sum exp(s), sum s exp(s)) over the vocabulary of s = z / temperature - highest, (2 or 1, tokens)."""
    sums = highest.new_empty(2 if entropy else 1, len(z))
    for part in _parts(z):
        s = _shifted(z[part], highest[part], temperature)
        weights = s.exp() if entropy else s.exp_()
        sums[0, part] = weights.sum(-1)
        if entropy:
            sums[1, part] = weights.mul_(_finite_(s)).sum(-1)
    return sums


def through_softmax_(
    s: Tensor, total: Tensor, mean: Tensor | None, of_logprob: Tensor, of_entropy: Tensor | None
) -> Tensor:
    """Computes the gradient of ``s`` through the softmax over the whole vocabulary; overwrites ``s``.

    ``s`` (..., V): this rank's logits / temperature, minus their maximum over the whole vocabulary. ``total`` and
    ``mean`` (...,): sum exp(s) and sum p s over the whole vocabulary. ``of_logprob``, ``of_entropy`` (...,): the
    gradients of the loss with respect to log-probs and entropy.
    """
    if of_entropy is None:
        return s.exp_().mul_((-of_logprob / total)[..., None])
    assert mean is not None
    p = s.exp().div_(total[..., None])
    weighted = _finite_(s).sub_(mean[..., None]).mul_(p)  # first by p, which is 0 where s is far below
    return p.mul_(-of_logprob[..., None]).sub_(weighted.mul_(of_entropy[..., None]))


def through_label_(gradient: Tensor, of_logprob: Tensor, *, index: Tensor, held: Tensor) -> None:
    """Adds the part of the gradient that reaches each label's own logit to ``gradient`` (..., V), in place.

    ``index`` (...,): index of the label in this rank's shard. ``held`` (...,) bool: whether the label is in the shard.
    """
    gradient.scatter_add_(-1, index[..., None], of_logprob.where(held, 0)[..., None])


def _tokens(logits: Tensor, size: int) -> Tensor:
    """Returns logits as (tokens, V) without padding: a view, or a single column of -inf for an empty shard."""
    if not size:
        return logits.new_full((math.prod(logits.shape[:-1]), 1), -torch.inf)
    return logits[..., :size].flatten(0, -2)


def _parts(z: Tensor) -> Iterator[slice]:
    """Yields slices of the tokens of ``z`` (tokens, V), each with at most WIDENED_AT_ONCE logits or one token."""
    step = max(1, WIDENED_AT_ONCE // z.shape[1])
    return (slice(first, first + step) for first in range(0, len(z), step))


def _shifted(z: Tensor, highest: Tensor, temperature: float) -> Tensor:
    """Returns z / temperature - highest (tokens,), as a new tensor in float32 or wider."""
    if temperature == 1:
        return z - highest[:, None]  # in the dtype of ``highest``, in one pass
    return _scaled(z, temperature).sub_(highest[:, None])


def _scaled(z: Tensor, temperature: float) -> Tensor:
    """Returns z / temperature, as a new tensor in float32 or wider."""
    return z.to(torch.promote_types(z.dtype, torch.float32), copy=True).div_(temperature)


def _finite_(s: Tensor) -> Tensor:
    """Replaces -inf by the lowest finite number, in place, so that its product with a probability of 0 is not NaN."""
    return s.clamp_(min=torch.finfo(s.dtype).min)


def _shard_index(labels: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns (index of each label in this rank's vocabulary shard, or 0; whether the label is in the shard)."""
    index = labels - start
    held = (labels >= 0) & (index >= 0) & (index < size)
    return index.where(held, 0), held


def from_last_stage(
    outputs: Outputs | None, inputs: MicroBatch, want: Wanted, stages: dist.ProcessGroup | None
) -> Outputs:
    """Broadcasts the ``outputs`` of the last pipeline stage to all ``stages``; collective."""
    if not want:
        return Outputs()
    names = sorted("divergence" if isinstance(one, Distillation) else one for one in want - {"distribution"})
    if outputs is None:
        numbers = inputs.labels.new_empty((len(names), *inputs.labels.shape), dtype=torch.get_default_dtype())
    else:
        numbers = torch.stack([getattr(outputs, name) for name in names])
    dist.broadcast(numbers, group=stages, group_src=dist.get_world_size(stages) - 1)
    return Outputs(**dict(zip(names, numbers, strict=True)))


Group = dist.ProcessGroup | None  # of the ranks with the other parts of the vocabulary; None: the logits are whole


def divergences(student: Tensor, teacher: Tensor, objective: Distillation, group: Group) -> Tensor:
    """Returns the divergence of each token, (tokens,), differentiable with respect to ``student``.

    ``student``, ``teacher``: logits (tokens, V) of this rank's part of the vocabulary, which may be a single column of
    -inf. All ranks of the group get the same result and must compute the same loss from it.
    """
    taken = teacher.isfinite()
    if objective.top_k is not None:
        least, equals = least_of_top_k(teacher, objective.top_k, group)
        is_equal = teacher == least[:, None]
        taken &= (teacher > least[:, None]) | (is_equal & (is_equal.cumsum(-1, dtype=torch.int32) <= equals[:, None]))
    known_in = taken if objective.renormalise_top_k else teacher.isfinite()
    temperature = objective.temperature
    log_q, log_p = (log_softmax(scaled(z, temperature), known_in, group) for z in (student, teacher))
    terms = divergence_terms(log_q.where(taken, 0), log_p.where(taken, 0), objective.beta)
    return _Sum.apply(terms.where(taken, 0).sum(-1), group, False)  # type: ignore[no-untyped-call,no-any-return]


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Returns logits / temperature in float32 or wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


def least_of_top_k(logits: Tensor, count: int, group: Group) -> tuple[Tensor, Tensor]:
    """Returns the smallest of the ``count`` largest logits of each token in the whole vocabulary, (tokens,), and how
    many logits of this part that are equal to it belong to them, (tokens,): the first ones of the vocabulary do."""
    own = logits.topk(min(count, logits.shape[1]), dim=-1).values
    if group is None:
        least = own.amin(-1)
        return least, (own == least[:, None]).sum(-1)
    own = torch.nn.functional.pad(own, (0, count - own.shape[1]), value=-torch.inf).contiguous()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    largest = torch.cat(parts, dim=-1).topk(count, dim=-1).values
    least = largest.amin(-1)
    equals = [(part == least[:, None]).sum(-1) for part in (largest, *parts[: dist.get_rank(group)])]
    return least, equals[0] - sum(equals[1:])


def log_softmax(logits: Tensor, known_in: Tensor, group: Group) -> Tensor:
    """Returns the log-probs (tokens, V) of the part ``known_in`` of the whole vocabulary; 0 elsewhere."""
    own = logits.where(known_in, -torch.inf)
    highest = own.detach().amax(-1)
    if group is not None:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    shifted = own - highest[:, None]
    total = sum_over_shards(shifted.exp().sum(-1), group)
    return (shifted - total.log()[:, None]).where(known_in, 0)


def sum_over_shards(own: Tensor, group: Group) -> Tensor:
    """Sums over the parts of the vocabulary. Each rank uses the sum for its own part, so gradients are summed, too."""
    return _Sum.apply(own, group, True)  # type: ignore[no-untyped-call,no-any-return]


def divergence_terms(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    """Returns what each token of the vocabulary adds to the divergence, any shape."""
    if beta == 0:
        return log_p.exp() * (log_p - log_q)
    if beta == 1:
        return log_q.exp() * (log_q - log_p)
    # log(M / P) by the distance of log-probs: the divergence of near distributions is far smaller than log-probs are.
    distance = log_q - log_p
    below = torch.log1p((1 - beta) * torch.expm1(distance.clamp(max=0)))
    above = distance + torch.log1p(beta * torch.expm1(-distance.clamp(min=0)))
    mixture = torch.where(distance < 0, below, above)
    return (1 - beta) * log_q.exp() * (distance - mixture) - beta * log_p.exp() * mixture


class _Sum(torch.autograd.Function):
    """Sums over the ranks of a group. ``used_apart``: each rank uses the sum otherwise, so gradients are summed."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Group, used_apart: bool) -> Tensor:
        ctx.group, ctx.used_apart = group, used_apart
        total = own.clone()
        if group is not None:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.group is not None and ctx.used_apart:
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None
