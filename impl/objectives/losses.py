"""Computes losses of policy and critic per token, and the weights that aggregate them to one number.

Tensors are (rows, length) of a micro-batch in which a row may hold several packed documents: ``documents`` (int64,
from 0) numbers them within the row, ``mask`` (bool) is True where a token of a response is predicted. The functions are
pure: float64 in, float64 out. Names and conventions are verl's (conformance/spec/objectives.py);
tests/third_party/test_third_opinion_losses.py compares the functions with verl, TRL and OpenRLHF.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conformance.spec.objectives import KlEstimator, LossAggMode, LossMode, PolicyGradient

LOG_RATIO_BOUND = 20.0  # verl's, for ratios of tokens and for importance weights
SEQUENCE_LOG_RATIO_BOUND = 10.0  # verl's upper bound for GSPO
LOW_VAR_KL_BOUNDS = (20.0, 10.0)  # verl's bounds of the log-ratio and of the estimate


@dataclass(frozen=True, kw_only=True)
class PolicyTokens:
    """Holds a loss mode's input; all (rows, length), with 0 for a log-prob outside of the mask.

    log_ratio: log p - log p of the old policy, differentiable like ``logprobs``.
    """

    logprobs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    mask: Tensor
    documents: Tensor


@dataclass(frozen=True, kw_only=True)
class PolicyTerms:
    """Holds a loss mode's result; all (rows, length).

    losses: differentiable. ratio: the ratio of the loss before it is clipped. approx_kl: the estimate of the KL to the
    old policy. clipped: bool, whether the loss is that of the clipped ratio. clipped_lower: bool, whether the dual clip
    lowered the loss to -A c.
    """

    losses: Tensor
    ratio: Tensor
    approx_kl: Tensor
    clipped: Tensor
    clipped_lower: Tensor


def policy_losses(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor,
    documents: Tensor,
    objective: PolicyGradient,
) -> PolicyTerms:
    """Computes the losses of the objective's loss mode: 0 outside of the mask, where flags are False.

    Gradients reach ``logprobs``, and nothing outside of the mask reaches losses or gradients.
    """
    tokens = PolicyTokens(
        logprobs=logprobs.where(mask, 0),
        log_ratio=(logprobs - old_logprobs).where(mask, 0),
        advantages=advantages,
        mask=mask,
        documents=documents,
    )
    terms = LOSS_MODES[objective.loss_mode](tokens, objective)
    return replace(
        terms,
        losses=terms.losses.where(mask, 0),
        clipped=terms.clipped & mask,
        clipped_lower=terms.clipped_lower & mask,
    )


def vanilla(tokens: PolicyTokens, objective: PolicyGradient) -> PolicyTerms:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) with the ratio r of each token, and for A < 0 at most -A c (dual clip).

    r = exp(log p - old log p), the exponent within +-20. Schulman et al., arXiv 1707.06347, equation 7; dual clip: Ye
    et al., arXiv 1912.09729, equation 5.
    """
    exponent = tokens.log_ratio.clamp(min=-LOG_RATIO_BOUND, max=LOG_RATIO_BOUND)
    terms = _clipped(exponent, tokens.advantages, objective)
    if objective.clip_ratio_c is not None:
        losses = dual_clipped(terms.losses, tokens.advantages, bound=objective.clip_ratio_c)
        terms = replace(terms, losses=losses, clipped_lower=losses < terms.losses)
    return terms


def gspo(tokens: PolicyTokens, objective: PolicyGradient) -> PolicyTerms:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) with the ratio r of the sequence, and the gradient of each token.

    r = exp(log p - sg[log p] + sg[mean of log p - old log p over the document]), the exponent at most 10. Zheng et
    al., arXiv 2507.18071, section 4.3.
    """
    difference = tokens.log_ratio
    of_sequence = sequence_mean(difference.detach(), mask=tokens.mask, documents=tokens.documents)
    exponent = (difference - difference.detach() + of_sequence).clamp(max=SEQUENCE_LOG_RATIO_BOUND)
    return replace(_clipped(exponent, tokens.advantages, objective), approx_kl=-difference.detach())


def cispo(tokens: PolicyTokens, objective: PolicyGradient) -> PolicyTerms:
    """-A sg[clip(r, 1 - low, 1 + high)] log p with the ratio r of each token: clipped tokens keep their gradient.

    r is that of ``vanilla``, and there is no dual clip. MiniMax, arXiv 2506.13585, equation 4.
    """
    exponent = tokens.log_ratio.detach().clamp(min=-LOG_RATIO_BOUND, max=LOG_RATIO_BOUND)
    ratio = exponent.exp()
    bounded = torch.clamp(ratio, min=1 - objective.clip_ratio_low, max=1 + objective.clip_ratio_high)
    clipped = bounded.ne(ratio)
    return PolicyTerms(
        losses=-(tokens.advantages * bounded) * tokens.logprobs,
        ratio=ratio,
        approx_kl=-exponent,
        clipped=clipped,
        clipped_lower=torch.zeros_like(clipped),
    )


def sapo(tokens: PolicyTokens, objective: PolicyGradient) -> PolicyTerms:
    """-A sigmoid(tau (r - 1)) 4 / tau with the ratio r of each token; tau is tau_pos for A > 0, else tau_neg.

    r is that of ``vanilla``. Gao et al., arXiv 2511.20347, equation 6.
    """
    exponent = tokens.log_ratio.clamp(min=-LOG_RATIO_BOUND, max=LOG_RATIO_BOUND)
    ratio = exponent.exp()
    tau = torch.full_like(ratio, objective.tau_neg).masked_fill(tokens.advantages > 0, objective.tau_pos)
    gates = gate(ratio, tau)
    never = torch.zeros_like(tokens.mask)
    return PolicyTerms(
        losses=-tokens.advantages * gates,
        ratio=ratio.detach(),
        approx_kl=-exponent.detach(),
        clipped=never,
        clipped_lower=never,
    )


def gate(ratio: Tensor, tau: Tensor) -> Tensor:
    """Returns sigmoid(tau (r - 1)) 4 / tau, whose derivative at r = 1 is 1; any shape."""
    return (tau * (ratio - 1)).sigmoid() * (4 / tau)


def geo_mean(tokens: PolicyTokens, objective: PolicyGradient) -> PolicyTerms:
    """-A exp(mean of s min(s d, s clip(d, -low, high)) over the document), with d = log p - old log p, s = sign(A).

    GMPO, Zhao et al., arXiv 2507.20673, equation 4; the clip of the ratio lies in [exp(-low), exp(high)].
    """
    difference, sign = tokens.log_ratio, tokens.advantages.sign()
    near = difference.clamp(min=-objective.clip_ratio_low, max=objective.clip_ratio_high)
    taken = sign * torch.minimum(sign * difference, sign * near)
    clipped = (sign * near).lt(sign * difference)
    means = sequence_mean(taken, mask=tokens.mask, documents=tokens.documents)
    exponent = difference.detach().clamp(min=-LOG_RATIO_BOUND, max=LOG_RATIO_BOUND)
    return PolicyTerms(
        losses=-tokens.advantages * means.exp(),
        ratio=exponent.exp(),
        approx_kl=-difference.detach(),
        clipped=clipped,
        clipped_lower=torch.zeros_like(clipped),
    )


def _clipped(exponent: Tensor, advantages: Tensor, objective: PolicyGradient) -> PolicyTerms:
    """Returns the larger loss of the ratio exp(exponent) and of the clipped ratio, without dual clip."""
    ratio = exponent.exp()
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(min=1 - objective.clip_ratio_low, max=1 + objective.clip_ratio_high)
    return PolicyTerms(
        losses=torch.maximum(free, bounded),
        ratio=ratio.detach(),
        approx_kl=-exponent.detach(),
        clipped=bounded > free,
        clipped_lower=torch.zeros_like(free, dtype=torch.bool),
    )


LOSS_MODES: dict[LossMode, Callable[[PolicyTokens, PolicyGradient], PolicyTerms]] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "geo_mean": geo_mean,
}


def dual_clipped(losses: Tensor, advantages: Tensor, *, bound: float) -> Tensor:
    """Limits the loss to -A * bound where A < 0, so it is bounded even if the ratio is not. Any shape."""
    return torch.minimum(losses, -advantages * bound).where(advantages < 0, losses)


def importance_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, *, threshold: float, level: str = "token", mask: bool = False
) -> Tensor:
    """min(exp(old log p - sampled log p), threshold), the exponent within +-20, without a gradient: (targets,).

    Truncated importance sampling (Yao et al., https://fengyao.notion.site/off-policy-rl). At the ``level`` "sequence"
    the exponent is the sum over the response. With ``mask``, a weight above the threshold is 0.
    """
    with torch.no_grad():
        difference = old_logprobs - rollout_logprobs
        exponent = difference.sum().expand_as(difference) if level == "sequence" else difference
        weights = exponent.clamp(min=-LOG_RATIO_BOUND, max=LOG_RATIO_BOUND).exp()
        return weights.masked_fill(weights > threshold, 0) if mask else weights.clamp(max=threshold)


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: KlEstimator) -> Tensor:
    """With d = log p - reference log p: ``kl`` d, ``abs`` |d|, ``mse`` d^2 / 2, ``low_var_kl`` exp(-d) + d - 1.

    Any shape, differentiable. As in verl, ``low_var_kl`` has d within +-20 and is itself at most 10, so that its
    gradient is 0 beyond. Schulman, http://joschu.net/blog/kl-approx.html (k1, k2, k3).
    """
    difference = logprobs - reference
    if kind == "kl":
        return difference
    if kind == "abs":
        return difference.abs()
    if kind == "mse":
        return difference.square() / 2
    of_difference, of_estimate = LOW_VAR_KL_BOUNDS
    bounded = difference.clamp(min=-of_difference, max=of_difference)
    return ((-bounded).exp() + bounded - 1).clamp(max=of_estimate)


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange: float) -> tuple[Tensor, Tensor]:
    """(max((V - G)^2, (V' - G)^2) / 2, whether V' gave the maximum); V' is V within +-cliprange of the old value.

    Any shape. This is the value loss of OpenAI's baselines and of verl; see also arXiv 1707.06347, equation 9.
    """
    bounded = torch.minimum(torch.maximum(values, old_values - cliprange), old_values + cliprange)
    free, clipped = (values - returns).square(), (bounded - returns).square()
    return torch.maximum(free, clipped) / 2, clipped > free


def token_weights(
    lengths: Tensor, mode: LossAggMode, *, tokens: Tensor, sequences: Tensor, scale_factor: float | None = None
) -> Tensor:
    """Returns the weight of each token; the loss of a mini-batch is the sum of weight * loss over its tokens.

    ``lengths``: any shape, the number n of response tokens in the token's document. ``tokens``, ``sequences``:
    scalars, the T response tokens of the whole mini-batch and its N documents with at least one. ``token-mean`` 1 / T,
    ``seq-mean-token-sum`` 1 / N, ``seq-mean-token-mean`` 1 / (N n), ``seq-mean-token-sum-norm`` 1 / (N scale_factor).
    DAPO, arXiv 2503.14476, section 3.3; Dr. GRPO, arXiv 2503.20783, section 3.2; verl's ``agg_loss``.
    """
    assert (scale_factor is not None) == (mode == "seq-mean-token-sum-norm")
    if mode == "token-mean":
        return torch.ones_like(lengths) / tokens
    if mode == "seq-mean-token-mean":
        return 1 / (sequences * lengths.clamp(min=1))
    return torch.ones_like(lengths) / (sequences * (scale_factor or 1.0))


def sequence_mean(numbers: Tensor, *, mask: Tensor, documents: Tensor) -> Tensor:
    """Returns, at each token, the mean of ``numbers`` over the masked tokens of its document; 0 without such tokens.

    All (rows, length), differentiable. 1/|y| in arXiv 2507.18071, equation 7.
    """
    count = int(documents.max()) + 1 if documents.numel() else 0
    shape = (numbers.shape[0], count)
    sums = numbers.new_zeros(shape).scatter_add(1, documents, numbers.where(mask, 0))
    counts = numbers.new_zeros(shape).scatter_add(1, documents, mask.to(numbers.dtype))
    return (sums / counts.clamp(min=1)).gather(1, documents)
