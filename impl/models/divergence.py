"""Computes how far a student is from its teacher at each token, from whole logits or vocabulary shards.

The teacher's logits stay where they were computed: each rank has the same part of both models' vocabularies.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.spec.supervised import Distillation

Group = dist.ProcessGroup | None  # of the ranks with the other parts of the vocabulary; None: the logits are whole


def divergences(student: Tensor, teacher: Tensor, objective: Distillation, group: Group) -> Tensor:
    """Returns the divergence of each token, (tokens,), differentiable with respect to ``student``.

    ``student``, ``teacher``: logits (tokens, V) of this rank's part of the vocabulary, which may be a single column of
    -inf. All ranks of the group get the same result and must compute the same loss from it.
    """
    taken = teacher.isfinite()
    if objective.top_k is not None:
        taken &= teacher >= least_of_top_k(teacher, objective.top_k, group)[:, None]
    known_in = taken if objective.renormalise_top_k else teacher.isfinite()
    temperature = objective.temperature
    log_q, log_p = (log_softmax(scaled(z, temperature), known_in, group) for z in (student, teacher))
    terms = divergence_terms(log_q.where(taken, 0), log_p.where(taken, 0), objective.beta)
    return _Sum.apply(terms.where(taken, 0).sum(-1), group, False)  # type: ignore[no-untyped-call,no-any-return]


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Returns logits / temperature in float32 or wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


def least_of_top_k(logits: Tensor, count: int, group: Group) -> Tensor:
    """Returns the smallest of the ``count`` largest logits of each token in the whole vocabulary, (tokens,)."""
    own = logits.topk(min(count, logits.shape[1]), dim=-1).values
    if group is not None:
        own = torch.nn.functional.pad(own, (0, count - own.shape[1]), value=-torch.inf).contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own, group=group)
        own = torch.cat(parts, dim=-1)
        own = own.topk(count, dim=-1).values
    return own.amin(-1)


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
