"""Compares vocabulary shards with plain autograd on the whole, as tasks for tests/engine/test_outputs.py."""

from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.runtime import RankContext
from conformance.spec.offline import Distillation
from impl.models.outputs import divergences, token_statistics


def plain_statistics(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(log p of the labels, entropy) by torch.log_softmax and autograd, for logits that are all finite."""
    logp = torch.log_softmax(logits / temperature, dim=-1)
    target = labels >= 0
    of_label = logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return of_label * target, -(logp.exp() * logp).sum(-1) * target


def example(vocabulary: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Logits (3, 7, V), labels with some that are no targets, and gradients of the two outputs."""
    random = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(3, 7, vocabulary, generator=random, dtype=torch.float64)
    labels = torch.randint(vocabulary, (3, 7), generator=random)
    labels[0, 2:5] = labels[2, -1] = -100
    upstream = torch.randn(2, 3, 7, generator=random, dtype=torch.float64)
    return {"logits": logits.to(dtype), "labels": labels, "upstream": upstream}


def shard_errors(
    context: RankContext, *, sizes: list[int], temperature: float, entropy: bool, masked: list[int]
) -> dict[str, Any]:
    """Errors of both outputs and of this rank's gradient, and the outputs; ``masked`` tokens have the logit -inf."""
    given = example(sum(sizes))
    labels = given["labels"].masked_fill(torch.isin(given["labels"], torch.tensor(masked)), -100)
    upstream = given["upstream"] if entropy else given["upstream"][:1]
    whole = given["logits"].requires_grad_()
    kept = torch.tensor([token for token in range(sum(sizes)) if token not in masked])
    place = torch.zeros(sum(sizes), dtype=torch.int64)
    place[kept] = torch.arange(len(kept))
    expected: tuple[Tensor, ...] = plain_statistics(
        whole[..., kept], place[labels.clamp(min=0)].where(labels >= 0, -100), temperature
    )
    expected = expected[: len(upstream)]
    (expected_gradient,) = torch.autograd.grad(expected, whole, tuple(upstream))

    start, end = (list(accumulate(sizes, initial=0))[context.rank + i] for i in (0, 1))
    logits = given["logits"].detach().clone()
    logits[..., torch.tensor(masked, dtype=torch.int64)] = -torch.inf
    own = logits[..., start:end].clone().requires_grad_()
    found = token_statistics(
        own, labels, temperature=temperature, group=dist.group.WORLD, vocab_start=start, entropy=entropy
    )
    outputs = [x for x in found if x is not None]
    (gradient,) = torch.autograd.grad(outputs, own, tuple(upstream))
    assert gradient.shape == own.shape
    errors = [((x - ref).norm() / ref.norm()).item() for x, ref in zip(outputs, expected, strict=True)]
    difference = gradient - expected_gradient[..., start:end]
    return {
        "errors": [*errors, (difference.norm() / expected_gradient.norm()).item()],
        "outputs": [x.tolist() for x in outputs],
    }


def with_ties(vocabulary: int) -> tuple[Tensor, Tensor]:
    """Logits of a student and of a teacher, (21, V), float32; those of the teacher have five different values."""
    logits = example(vocabulary, torch.float32)["logits"].flatten(0, 1)
    return logits.flip(0), (logits / 4).round().clamp(-2, 2)


def shards_with_ties(context: RankContext, *, sizes: list[int], top_k: int) -> list[float]:
    """The divergences of shards of the vocabulary."""
    start, end = (list(accumulate(sizes, initial=0))[context.rank + i] for i in (0, 1))
    student, teacher = (z[:, start:end].contiguous() for z in with_ties(sum(sizes)))
    found: list[float] = divergences(student, teacher, Distillation(top_k=top_k), dist.group.WORLD).tolist()
    return found
