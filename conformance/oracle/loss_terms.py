"""Defines what one document adds to a loss, who computes it, and the loss modes of a policy, from the papers.

A function sees one document at a time, so this code knows nothing of rows, padding, packing, micro-batches or ranks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from conformance.spec.batch import KEPT, Batch, Document
from conformance.spec.objectives import LossMode, PolicyGradient
from conformance.spec.observables import distance_of

Totals = Mapping[str, float]  # sums over the optimizer step, such as the denominators of losses
Earlier = Mapping[str, Tensor]  # the detached outputs of the models before this one, by role
TINY = 1e-30  # a lower clip of 0 is no clip


@dataclass(frozen=True, kw_only=True)
class Term:
    """Holds what one document adds to the loss of one model.

    loss: scalar with a gradient; the model's loss of the step is the sum over documents. None for a frozen model.
    values: numbers by the key of an observable, summed over documents.
    highest: numbers by the key of an observable, whose maximum over documents is recorded.
    rows: (targets,) numbers by the key of an observable, one for each target of the document in order.
    clips: by a quantity of conformance.judge.clips, how far it is from a clip (to_nearest), (targets,).
    """

    loss: Tensor | None
    values: dict[str, float] = field(default_factory=dict)
    highest: dict[str, float] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    clips: dict[str, Tensor] = field(default_factory=dict)

    @property
    def recorded(self) -> dict[str, Tensor]:
        """Returns the rows, and the distances to clips under their own keys."""
        return {**self.rows, **{distance_of(name): distances for name, distances in self.clips.items()}}


def to_nearest(x: Tensor, *clips: tuple[Tensor | float, Tensor | bool]) -> Tensor:
    """Returns how far each number of ``x`` is from the nearest of its clips, negative below it; infinite without one.

    ``clips``: where the loss or a gradient jumps, and for which numbers it does.
    """
    x = x.detach()
    nearest = torch.full_like(x, torch.inf)
    for clip, applies in clips:
        distance = (x - clip).where(torch.as_tensor(applies), torch.inf)
        nearest = torch.where(distance.abs() < nearest.abs(), distance, nearest)
    return nearest


class OracleFunctions(Protocol):
    """Computes the loss of an objective, document by document.

    ``output`` is what ``forward`` returns for a model: logits (T, V), or values (T, 1), in the compute dtype.
    ``earlier`` holds the detached outputs of the models before it. ``stable`` is the dtype of softmax and losses.
    """

    def totals(self, batch: Batch) -> dict[str, float]:
        """Returns sums over the whole optimizer step, such as the denominators of the losses; they are recorded."""
        ...

    def term(
        self, model: str, output: Tensor, document: Document, *, totals: Totals, earlier: Earlier, stable: torch.dtype
    ) -> Term: ...


@runtime_checkable
class PairedFunctions(OracleFunctions, Protocol):
    """Computes losses that need numbers of other documents of the same step."""

    def see(self, document: Document, outputs: Mapping[str, Tensor], *, stable: torch.dtype) -> None:
        """Keeps what terms of other documents need of one. It is called for every document with targets, before any
        term. ``outputs``: by model, without gradients."""
        ...


@runtime_checkable
class ScoringFunctions(OracleFunctions, Protocol):
    """Computes losses of values at other positions than those that predict targets."""

    def value_positions(self, document: Document) -> Tensor:
        """Returns the positions of the values that have a loss, int64."""
        ...


class RolloutFunctions(OracleFunctions, Protocol):
    """Also computes what an objective needs of a rollout before its first update."""

    def needs_rollout_pass(self, model: str) -> bool:
        """Tells whether a forward pass of this model over the rollout is needed."""
        ...

    def rollout_numbers(self, model: str, output: Tensor, document: Document, *, stable: torch.dtype) -> Tensor:
        """Returns the numbers that are kept of that forward pass, (targets,)."""
        ...

    def annotate(
        self, batches: Sequence[Batch], found: Mapping[str, list[list[Tensor]]], *, stable: torch.dtype
    ) -> list[Batch]:
        """Returns mini-batches with all columns that updates read. ``found[model][b][d]``: of document d of batch b."""
        ...


def target_logprobs(logits: Tensor, document: Document, *, stable: torch.dtype, temperature: float = 1.0) -> Tensor:
    """Returns log p of the document's target tokens, (targets,) in ``stable``, under softmax(logits / temperature).

    ``logits`` is (T, V); token i is predicted by the logits at i - 1.
    """
    tokens = torch.tensor(document.tokens)[target_positions(document)]
    logprobs_NV = target_distributions(logits, document, stable=stable, temperature=temperature)
    return logprobs_NV[torch.arange(len(tokens)), tokens]


def target_distributions(logits: Tensor, document: Document, *, stable: torch.dtype, temperature: float) -> Tensor:
    """Returns log p of all tokens where targets are predicted, (targets, V); -inf where p is 0.

    If the document says which tokens the sampler kept for a target, p is 0 for others and sums to 1 over the kept ones.
    """
    positions = target_positions(document)
    scaled_NV = logits[positions - 1].to(stable) / temperature
    if slots := [name for name in document.columns if name.startswith(KEPT)]:
        one_more = torch.tensor([document.columns[name] for name in slots]).T[positions].long()  # 0: none
        kept = torch.zeros(len(positions), scaled_NV.shape[1] + 1, dtype=torch.bool).scatter(1, one_more, value=True)
        scaled_NV = scaled_NV.where(kept[:, 1:], -torch.inf)
    return torch.log_softmax(scaled_NV, dim=-1)


def target_positions(document: Document) -> Tensor:
    """Returns positions of the target tokens, (targets,) int64; each is predicted at the position before it."""
    return torch.tensor([i for i, target in enumerate(document.targets) if target], dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class PolicyTerms:
    """Holds the policy loss of one response before aggregation; every tensor is (targets,).

    losses: to be minimised. ratio: new to old policy, before clipping. approx_kl: log p_old - log p, an estimate of the
    KL to the old policy. clipped: whether the clip changed the gain. clipped_lower: whether dual clip raised it.
    to_clip: of the logarithm of the ratio, to a clip at which the gradient jumps (to_nearest).
    """

    losses: Tensor
    ratio: Tensor
    approx_kl: Tensor
    clipped: Tensor
    clipped_lower: Tensor
    to_clip: Tensor


def vanilla(logprobs: Tensor, old: Tensor, advantage: Tensor, objective: PolicyGradient) -> PolicyTerms:
    """Clips the ratio of each token: arXiv 1707.06347, equation 7; dual clip: arXiv 1912.09729, equation 5."""
    log_ratio = (logprobs - old).clamp(-20, 20)
    ratio = log_ratio.exp()
    gain, clipped = _clipped_gain(ratio, advantage, objective)
    lower = torch.zeros_like(clipped)
    if objective.clip_ratio_c is not None:
        least = objective.clip_ratio_c * advantage
        lower = (advantage < 0) & (gain < least)
        gain = torch.where(advantage < 0, torch.maximum(gain, least), gain)
    (low, _), (high, _) = bounds_of_log_ratio(objective)
    lost = (20.0 if objective.clip_ratio_c is None else math.log(objective.clip_ratio_c), advantage < 0)
    return PolicyTerms(
        losses=-gain,
        ratio=ratio,
        approx_kl=-log_ratio,
        clipped=clipped,
        clipped_lower=lower,
        to_clip=to_nearest(log_ratio, (low, advantage < 0), (high, advantage > 0), lost),
    )


def gspo(logprobs: Tensor, old: Tensor, advantage: Tensor, objective: PolicyGradient) -> PolicyTerms:
    """Clips the ratio of the sequence, with the gradient of each token's own: arXiv 2507.18071, equation 14."""
    log_ratio = logprobs - old
    of_sequence = log_ratio.mean().detach()
    ratio = (of_sequence + logprobs - logprobs.detach()).clamp(max=10).exp()
    gain, clipped = _clipped_gain(ratio, advantage, objective)
    (low, _), (high, _) = bounds_of_log_ratio(objective)
    clips = (low, advantage < 0), (high, advantage > 0), (10.0, advantage < 0)
    return PolicyTerms(
        losses=-gain,
        ratio=ratio,
        approx_kl=-log_ratio,
        clipped=clipped,
        clipped_lower=torch.zeros_like(clipped),
        to_clip=to_nearest(of_sequence.expand_as(log_ratio), *clips),
    )


def cispo(logprobs: Tensor, old: Tensor, advantage: Tensor, objective: PolicyGradient) -> PolicyTerms:
    """Weights the policy gradient of each token by its clipped ratio: arXiv 2506.13585, equations 4 and 5."""
    log_ratio = (logprobs - old).clamp(-20, 20)
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - objective.clip_ratio_low, 1 + objective.clip_ratio_high)
    gain = weight.detach() * advantage * logprobs
    return PolicyTerms(
        losses=-gain,
        ratio=ratio,
        approx_kl=-log_ratio,
        clipped=weight != ratio,
        clipped_lower=torch.zeros_like(gain, dtype=torch.bool),
        to_clip=to_nearest(log_ratio),  # the weight of the gradient bends at a clip, and does not jump
    )


def sapo(logprobs: Tensor, old: Tensor, advantage: Tensor, objective: PolicyGradient) -> PolicyTerms:
    """Weights the advantage by a sigmoid of the ratio that has slope 1 at ratio 1: arXiv 2511.20347, equation 6."""
    log_ratio = (logprobs - old).clamp(-20, 20)
    ratio = log_ratio.exp()
    tau = torch.full_like(ratio, objective.tau_neg)
    tau[advantage > 0] = objective.tau_pos
    gain = 4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage
    never = torch.zeros_like(gain, dtype=torch.bool)
    return PolicyTerms(
        losses=-gain,
        ratio=ratio,
        approx_kl=-log_ratio,
        clipped=never,
        clipped_lower=never,
        to_clip=to_nearest(log_ratio),
    )


def geo_mean(logprobs: Tensor, old: Tensor, advantage: Tensor, objective: PolicyGradient) -> PolicyTerms:
    """Weights the advantage by the geometric mean of the clipped ratios of the tokens: arXiv 2507.20673, equation 4."""
    log_ratio = logprobs - old
    near = log_ratio.clamp(-objective.clip_ratio_low, objective.clip_ratio_high)
    sign = advantage.sign()
    clipped = sign * near < sign * log_ratio
    taken = torch.where(clipped, near, log_ratio).where(sign != 0, 0)
    gain = taken.mean().exp() * advantage
    return PolicyTerms(
        losses=-gain,
        ratio=log_ratio.clamp(-20, 20).exp(),
        approx_kl=-log_ratio,
        clipped=clipped,
        clipped_lower=torch.zeros_like(clipped),
        to_clip=to_nearest(log_ratio, (-objective.clip_ratio_low, sign < 0), (objective.clip_ratio_high, sign > 0)),
    )


def bounds_of_log_ratio(objective: PolicyGradient) -> tuple[tuple[float, bool], tuple[float, bool]]:
    """Returns the clips of the logarithm of a ratio for to_nearest, of every token."""
    return (math.log(max(1 - objective.clip_ratio_low, TINY)), True), (math.log1p(objective.clip_ratio_high), True)


def _clipped_gain(ratio: Tensor, advantage: Tensor, objective: PolicyGradient) -> tuple[Tensor, Tensor]:
    """Returns the smaller of the gains with the free and the clipped ratio, and whether it is the clipped one."""
    free = ratio * advantage
    bounded = ratio.clamp(1 - objective.clip_ratio_low, 1 + objective.clip_ratio_high) * advantage
    return torch.minimum(free, bounded), bounded < free


LOSS_MODES: dict[LossMode, Callable[[Tensor, Tensor, Tensor, PolicyGradient], PolicyTerms]] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "geo_mean": geo_mean,
}


def value_losses(values: Tensor, old: Tensor, wanted: Tensor, *, cliprange: float) -> tuple[Tensor, Tensor]:
    """Returns, per token, half the larger squared error of free and clipped value, and whether it is the latter.

    ``wanted``: the returns. ``old``: the values before the update.
    """
    near = torch.minimum(torch.maximum(values, old - cliprange), old + cliprange)
    free, bounded = (values - wanted).square(), (near - wanted).square()
    return torch.maximum(free, bounded) / 2, bounded > free


def to_clips_of_value(values: Tensor, old: Tensor, wanted: Tensor, *, cliprange: float) -> dict[str, Tensor]:
    """Returns how far values are from where the gradient of their loss jumps.

    A value that leaves the range towards its return loses its gradient. Beyond the return it gets one again, where the
    unclipped loss becomes the larger one: at 2 return - old value -+ cliprange.
    """
    low, high = old - cliprange, old + cliprange
    leaves = to_nearest(values, (low, wanted < values), (high, wanted > values))
    again = to_nearest(values, (2 * wanted - low, wanted < low), (2 * wanted - high, wanted > high))
    return {"critic.value": leaves, "critic.value (unclipped loss)": again}


def importance(old: Tensor, sampled: Tensor, objective: PolicyGradient) -> Tensor:
    """Returns the bounded importance weights of a response's tokens that another policy sampled."""
    assert objective.rollout_is_threshold is not None
    cap, weights = objective.rollout_is_threshold, log_weight(old, sampled, objective).clamp(-20, 20).exp()
    return weights * (weights <= cap) if objective.rollout_is_mask else weights.clamp(max=cap)


def log_weight(old: Tensor, sampled: Tensor, objective: PolicyGradient) -> Tensor:
    """Returns the logarithms of unbounded importance weights."""
    log_ratio = old - sampled
    return log_ratio.sum().expand_as(log_ratio) if objective.rollout_is == "sequence" else log_ratio


def divergence(log_ratio: Tensor, kind: str) -> Tensor:
    """Estimates KL(policy, reference) from ``log_ratio`` = log p - log p_reference of sampled tokens.

    http://joschu.net/blog/kl-approx.html, with the bounds of verl on k3.
    """
    match kind:
        case "kl":
            return log_ratio
        case "abs":
            return log_ratio.abs()
        case "mse":
            return log_ratio.square() / 2
        case "low_var_kl":
            log_ratio = log_ratio.clamp(-20, 20)
            return ((-log_ratio).exp() + log_ratio - 1).clamp(-10, 10)
    raise AssertionError(kind)


def to_clip_of_kl(log_ratio: Tensor, kind: str) -> Tensor:
    """Returns how far log-ratios are from where the gradient of ``divergence`` jumps, by a step of Newton."""
    match kind:
        case "abs":
            return log_ratio.detach()
        case "low_var_kl":
            x = log_ratio.detach().clamp(-20, 20)
            return ((-x).exp() + x - 11) / (1 - (-x).exp())
    return to_nearest(log_ratio)


def values_of(output: Tensor, document: Document, *, stable: torch.dtype) -> Tensor:
    """Returns the critic's number at the position that predicts each target token, (targets,)."""
    return output[target_positions(document) - 1, 0].to(stable)


def entropies(logits: Tensor, document: Document, *, stable: torch.dtype, temperature: float) -> Tensor:
    """Returns -sum p log p of the distributions that the target tokens are drawn from, (targets,), in nats."""
    every = target_distributions(logits, document, stable=stable, temperature=temperature)
    return -(every.exp() * every.where(every.isfinite(), 0)).sum(-1)


def of_targets(document: Document, name: str, stable: torch.dtype) -> Tensor:
    """Returns a column's numbers for the target tokens, (targets,)."""
    column: Any = document.columns[name]
    return torch.tensor([x for x, target in zip(column, document.targets, strict=True) if target], dtype=stable)
