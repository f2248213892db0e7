"""Outputs of a forward pass: log-prob, entropy and value of every token, from whole logits or vocabulary shards.

The same code serves both: without a process group, the only shard is the whole vocabulary. To save memory, the logits
are the only tensor of their size that is kept for the backward pass, which computes the softmax again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from conformance.role import Head
from impl.collate import MicroBatch

OutputName = Literal["logprobs", "entropy", "values", "targets"]
Wanted = frozenset[OutputName]


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The requested outputs of a micro-batch, each (rows, length) in float32 or wider; None if not requested.

    All ranks that share the micro-batch have the same numbers.

    logprobs: log p of the label of each position, at the requested temperature; 0 where there is no target.
    entropy: -sum p log p of the distribution at each position, in nats; temperature and zeros as for logprobs.
    values: the value head's number at each position; 0 in padding.
    targets: 1 at each label that is trained on, else 0. It is taken from the tokens that went through the model, after
        padding and sharding, so its sum is the number of targets that the loss really covers.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    targets: Tensor | None = None

    def each(self, function: Callable[[Tensor], Tensor]) -> "Outputs":
        """A copy with ``function`` applied to each output that is not None."""
        return Outputs(**{name: None if tensor is None else function(tensor) for name, tensor in vars(self).items()})

    def detach(self) -> "Outputs":
        return self.each(Tensor.detach)


def outputs_of(
    result: Tensor,
    inputs: MicroBatch,
    *,
    head: Head,
    want: Wanted,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
) -> Outputs:
    """The outputs that ``want`` names, from a model's ``result`` for the tokens of ``inputs``.

    ``result``: a language model's logits (rows, length, V), or a vocabulary shard of them as in ``token_statistics``;
    or a value model's values (rows, length, 1).
    """
    if head == "value":
        assert want <= {"values"}, "a value model has no vocabulary"
        values = result[..., 0].to(torch.promote_types(result.dtype, torch.float32))
        return Outputs(values=values.where(inputs.real, 0) if want else None)
    assert "values" not in want, "a language model has no values"
    logprobs, entropy = token_statistics(
        result,
        inputs.labels,
        temperature=temperature,
        group=group,
        vocab_start=vocab_start,
        entropy="entropy" in want,
    )
    targets = inputs.targets.to(logprobs.dtype) if "targets" in want else None
    return Outputs(logprobs=logprobs if "logprobs" in want else None, entropy=entropy, targets=targets)


def token_statistics(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """(log p of the labels, entropy) of softmax(logits / temperature), each (...,), differentiable.

    ``logits`` (..., V): the whole vocabulary; or with ``group`` this rank's shard of it, which begins at token
    ``vocab_start`` and may be empty. The ranks of the group hold all shards; they all get the same result and must all
    compute the same loss from it. ``labels`` (...,) int64: tokens of the whole vocabulary; a negative label gives 0
    without a gradient. Logits may be -inf. The computation is in float32, or in float64 if the logits are. Without
    ``entropy``, the second result is None and half the memory is needed.

    With s = logits / temperature - their maximum and p = softmax(s): log p_y = s_y - log sum exp(s), with the gradient
    (1[j = y] - p_j) / temperature; entropy H = log sum exp(s) - sum p s, with -p_j (s_j - sum p s) / temperature.
    """
    statistics: tuple[Tensor, Tensor | None] = _TokenStatistics.apply(  # type: ignore[no-untyped-call]
        logits, labels, temperature, group, vocab_start, entropy
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
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)  # None, not zeros, for an output that the loss does not use
        s = _scaled(logits, temperature)
        highest = s.amax(dim=-1)
        if group is not None:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        s.sub_(highest[..., None])
        index, held = _shard_index(labels, start, logits.shape[-1])
        of_label = s.gather(-1, index[..., None])[..., 0].where(held, 0)
        weights = s.exp() if entropy else s.exp_()
        sums = [of_label, weights.sum(-1)]
        if entropy:
            sums.append(weights.mul_(_finite_(s)).sum(-1))
        together = torch.stack(sums)
        if group is not None:
            dist.all_reduce(together, group=group)
        of_label, log_total = together[0], together[1].log()
        mean = together[2] / together[1] if entropy else None  # sum p s
        ctx.save_for_backward(logits, labels, highest, log_total, mean)
        ctx.temperature, ctx.start = temperature, start
        target = labels >= 0
        return (of_label - log_total).where(target, 0), None if mean is None else (log_total - mean).where(target, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprob: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, labels, highest, log_total, mean = ctx.saved_tensors
        target = labels >= 0
        of_logprob = torch.zeros_like(highest) if of_logprob is None else of_logprob.where(target, 0)
        s = _scaled(logits, ctx.temperature).sub_(highest[..., None])
        of_entropy = None if of_entropy is None else of_entropy.where(target, 0)
        gradient = through_softmax_(s, log_total, mean, of_logprob, of_entropy)
        index, held = _shard_index(labels, ctx.start, logits.shape[-1])
        through_label_(gradient, of_logprob, index=index, held=held)
        return gradient[..., : logits.shape[-1]].div_(ctx.temperature).to(logits.dtype), *(None,) * 5


def through_softmax_(
    s: Tensor, log_total: Tensor, mean: Tensor | None, of_logprob: Tensor, of_entropy: Tensor | None
) -> Tensor:
    """The part of the gradient of ``s`` that goes through the softmax over the whole vocabulary; overwrites ``s``.

    ``s`` (..., V): this rank's logits / temperature, minus their maximum over the whole vocabulary. ``log_total`` and
    ``mean`` (...,): log sum exp(s) and sum p s over the whole vocabulary. ``of_logprob``, ``of_entropy`` (...,): the
    gradients of the loss with respect to log-probs and entropy.
    """
    if of_entropy is None:
        return s.sub_(log_total[..., None]).exp_().mul_(-of_logprob[..., None])
    assert mean is not None
    p = (s - log_total[..., None]).exp_()
    weighted = _finite_(s).sub_(mean[..., None]).mul_(p)  # first by p, which is 0 where s is far below
    return p.mul_(-of_logprob[..., None]).sub_(weighted.mul_(of_entropy[..., None]))


def through_label_(gradient: Tensor, of_logprob: Tensor, *, index: Tensor, held: Tensor) -> None:
    """Add the part of the gradient that reaches each label's own logit to ``gradient`` (..., V), in place.

    ``index`` (...,): index of the label in this rank's shard. ``held`` (...,) bool: whether the label is in the shard.
    """
    gradient.scatter_add_(-1, index[..., None], of_logprob.where(held, 0)[..., None])


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature as a new tensor in float32 or wider; an empty shard gets a single logit of -inf."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True).div_(temperature)
    return z if z.shape[-1] else torch.nn.functional.pad(z, (0, 1), value=-torch.inf)


def _finite_(s: Tensor) -> Tensor:
    """Replace -inf by the lowest finite number, in place, so that its product with a probability of 0 is 0, not NaN."""
    return s.clamp_(min=torch.finfo(s.dtype).min)


def _shard_index(labels: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """(index of each label in this rank's vocabulary shard, or 0; whether the label is in the shard)."""
    index = labels - start
    held = (labels >= 0) & (index >= 0) & (index < size)
    return index.where(held, 0), held
