"""Outputs of a forward pass by name: log-probs, entropy and values of every token, from logits or vocabulary shards.

Written once for whole logits and for shards of the vocabulary: a group of one rank is whole logits. Neither direction
keeps a second copy of the logits: the backward pass computes the softmax again from what autograd holds anyway.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

OutputName = Literal["logprobs", "entropy", "values"]
Wanted = frozenset[OutputName]


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What was asked for, each (rows, length) of a micro-batch in float32 or wider, the same on all ranks that share it.

    logprobs: log p of the label of each position. entropy: -sum p log p of its distribution, in nats. Both are at the
    temperature that was asked for, and 0 where there is no target. values: the value head's number at each position, 0
    in padding.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None

    def detach(self) -> "Outputs":
        return Outputs(**{name: None if t is None else t.detach() for name, t in vars(self).items()})


def token_statistics(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
) -> tuple[Tensor, Tensor]:
    """(log p of the labels, entropy) of softmax(logits / temperature), each (...,), differentiable.

    ``logits`` (..., V): the whole vocabulary, or with ``group`` the shard of it that begins at ``vocab_start`` on this
    rank; ranks of the group hold the rest, and all get the same result. ``labels`` (...,) int64: tokens of the whole
    vocabulary; for a negative one the result is 0, without a gradient. Computed in float32, or in float64 where the
    logits are. With z = logits / temperature and p = softmax(z): log p_y = z_y - logsumexp(z), with the gradient
    (1[j = y] - p_j) / temperature; entropy H = logsumexp(z) - sum p z, with -p_j (z_j - sum p z) / temperature.
    """
    statistics: tuple[Tensor, Tensor] = _TokenStatistics.apply(logits, labels, temperature, group, vocab_start)  # type: ignore[no-untyped-call]
    return statistics


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float, group: dist.ProcessGroup | None, start: int
    ) -> tuple[Tensor, Tensor]:
        z = logits.float() / temperature  # in the exact tier, float() leaves float64 as it is
        highest = z.amax(dim=-1)
        if group is not None:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        index, held = _own(labels, start, z.shape[-1])
        of_label = z.gather(-1, index[..., None])[..., 0].where(held, 0)
        weights = (z - highest[..., None]).exp_()
        # -inf is a logit that is masked out: it has no weight, and 0 * inf would be no number.
        sums = torch.stack([weights.sum(-1), (weights * z.masked_fill(z == -torch.inf, 0)).sum(-1), of_label])
        if group is not None:
            dist.all_reduce(sums, group=group)
        total, weighted, of_label = sums
        log_total, mean = highest + total.log(), weighted / total  # logsumexp(z), sum p z
        target = labels >= 0
        ctx.save_for_backward(logits, labels, log_total, mean)
        ctx.temperature, ctx.start = temperature, start
        return (of_label - log_total).where(target, 0), (log_total - mean).where(target, 0)

    @staticmethod
    def backward(ctx: Any, of_logprob: Tensor, of_entropy: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, log_total, mean = ctx.saved_tensors
        target = labels >= 0
        of_logprob, of_entropy = of_logprob.where(target, 0)[..., None], of_entropy.where(target, 0)[..., None]
        z = logits.float() / ctx.temperature
        p = (z - log_total[..., None]).exp()
        gradient = p * (-of_logprob - of_entropy * (z.masked_fill(z == -torch.inf, 0) - mean[..., None]))
        index, held = _own(labels, ctx.start, z.shape[-1])
        gradient.scatter_add_(-1, index[..., None], of_logprob.where(held[..., None], 0))
        return (gradient / ctx.temperature).to(logits.dtype), None, None, None, None


def _own(labels: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Place of each label in this rank's shard, and whether it is there."""
    index = labels - start
    held = (labels >= 0) & (index >= 0) & (index < size)
    return index.where(held, 0), held
