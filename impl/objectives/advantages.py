"""Computes token rewards, advantages and returns of a whole rollout, before its first update.

The functions are pure and work on lists of responses without padding: float64 in, float64 out. Names and conventions
are verl's (conformance/spec/objectives.py); tests/third_party/test_third_opinion_advantages.py compares the functions
with verl, TRL and OpenRLHF.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from conformance.core.errors import UsageError
from conformance.spec.objectives import Grpo, KlEstimator, PolicyGradient, Ppo
from impl.objectives.losses import kl_estimate

STD_EPSILON = 1e-6  # added to a group's standard deviation
VARIANCE_EPSILON = 1e-8  # added to the variance when numbers are whitened


@dataclass(frozen=True, kw_only=True)
class Response:
    """Holds one response of n >= 0 tokens with its rollout data. Tensors are (n,) floats.

    group: the number of its prompt. reward: reward of the whole response. old_logprobs, reference_logprobs: log-probs
    of the sampled tokens under the old policy and the reference. values: the critic's value at the position that
    predicts token t. given: what token t earns besides, as the end of its turn or by itself. gaps: the distance from
    token t to the next one that is trained on, which exceeds 1 where answers of tools stand between them.
    """

    group: int
    reward: float
    old_logprobs: Tensor
    reference_logprobs: Tensor | None = None
    values: Tensor | None = None
    given: Tensor | None = None
    gaps: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Holds advantages and returns of one response, each (n,), without a gradient."""

    advantages: Tensor
    returns: Tensor


def overlong_penalty(length: int, objective: PolicyGradient) -> float:
    """Returns what a response of ``length`` tokens loses for its last tokens before the limit: from 0 to -1.

    Yu et al., arXiv 2503.14476, equation 13.
    """
    if objective.overlong_length is None or objective.overlong_buffer is None:
        return 0.0
    exceeding = length - (objective.overlong_length - objective.overlong_buffer)
    return -min(max(0, exceeding), objective.overlong_buffer) / objective.overlong_buffer


def kept_groups(groups: Sequence[float], rewards: Sequence[float]) -> set[float]:
    """Returns the groups whose responses have different rewards, or that have one response.

    Dynamic sampling, Yu et al., arXiv 2503.14476, equation 11: 0 < right answers < answers.
    """
    first = dict(zip(groups[::-1], rewards[::-1], strict=True))
    different = {group for group, reward in zip(groups, rewards, strict=True) if reward != first[group]}
    return different | {group for group in first if groups.count(group) == 1}


def token_rewards(response: Response, *, kl_coef: float, kl_penalty: KlEstimator) -> Tensor:
    """Computes r_t = given_t + reward [t = n - 1] - kl_coef KL_t: (n,), in the dtype of ``old_logprobs``.

    KL_t is the estimate of the old log-prob against the reference's (Ziegler et al., arXiv 1909.08593, section 2;
    Schulman, http://joschu.net/blog/kl-approx.html). Without ``kl_coef`` no reference is needed.
    """
    rewards = torch.zeros_like(response.old_logprobs)
    if len(rewards):
        rewards[-1] = response.reward
    if response.given is not None:
        rewards += response.given
    if kl_coef:
        assert response.reference_logprobs is not None, "a penalty needs a reference"
        rewards -= kl_coef * kl_estimate(response.old_logprobs, response.reference_logprobs, kl_penalty)
    return rewards


def estimate(responses: Sequence[Response], objective: Grpo | Ppo) -> list[Estimate]:
    """Computes advantages and returns of every response of a rollout, in the order of ``responses``.

    PPO whitens its advantages over all tokens of the rollout, and computes its returns from advantages before
    whitening. Raises UsageError if there are fewer than two tokens to whiten.
    """
    with torch.no_grad():
        rewards = [
            token_rewards(each, kl_coef=objective.kl_coef, kl_penalty=objective.kl_penalty) for each in responses
        ]
        gaps = [_gaps(each, objective) for each in responses]
        if isinstance(objective, Ppo):
            return _ppo(responses, rewards, gaps, objective)
        if objective.adv_estimator == "reinforce_plus_plus":
            return reinforce_plus_plus(rewards, gaps, gamma=objective.gamma)
        lengths = [len(each) for each in rewards]
        groups = [each.group for each in responses]
        scores = _scores(responses, rewards)
        if objective.adv_estimator == "rloo":
            return _spread(rloo(scores, groups), lengths)
        if objective.adv_estimator == "reinforce_plus_plus_baseline":
            return reinforce_plus_plus_baseline(scores, groups, lengths)
        return _spread(group_advantages(scores, groups, by_std=objective.norm_adv_by_std_in_grpo), lengths)


def group_advantages(scores: Tensor, groups: Sequence[int], *, by_std: bool) -> Tensor:
    """Computes A_i = (R_i - mean R) / (std R + 1e-6) over the group of i: (N,) to (N,).

    The standard deviation is the one with n - 1. A group of one has mean 0 and standard deviation 1. Without ``by_std``
    there is no division. GRPO: Shao et al., arXiv 2402.03300, section 4.1.2, whose formula has neither epsilon nor
    n - 1; both are verl's. Without the division: Dr. GRPO, Liu et al., arXiv 2503.20783, section 3.2.
    """

    def normalized(members: Tensor) -> Tensor:
        centered = members - members.mean() if len(members) > 1 else members
        return centered / (group_deviation(members) + STD_EPSILON) if by_std else centered

    return of_groups(scores, groups, normalized)


def group_deviation(members: Tensor) -> Tensor:
    """Returns the standard deviation with n - 1, or 1 for a group of one: (n,) to ()."""
    return members.std() if len(members) > 1 else members.new_ones(())


def rloo(scores: Tensor, groups: Sequence[int]) -> Tensor:
    """Computes A_i = R_i - mean of the other R in its group: (N,) to (N,). For a group of one, A_i = R_i.

    Ahmadian et al., arXiv 2402.14740, section 3 (RLOO).
    """

    def leave_one_out(members: Tensor) -> Tensor:
        count = max(len(members) - 1, 1)
        return members - (members.sum() - members) / count

    return of_groups(scores, groups, leave_one_out)


def _gaps(response: Response, objective: Grpo | Ppo) -> Tensor:
    """Returns how many steps of a discount lie between each token and the next one: (n,)."""
    counts = objective.discount_over == "all-tokens" and response.gaps is not None
    return response.gaps if counts and response.gaps is not None else torch.ones_like(response.old_logprobs)


def reinforce_plus_plus(rewards: Sequence[Tensor], gaps: Sequence[Tensor], *, gamma: float) -> list[Estimate]:
    """Computes G_t = r_t + gamma^gap G_(t+1), and A = G whitened over all tokens of the rollout. Lists of (n,).

    Hu, arXiv 2501.03262, section 3.
    """
    returns = [discounted(each, factors=gamma**gap) for each, gap in zip(rewards, gaps, strict=True)]
    return _estimates(whiten(returns), returns)


def reinforce_plus_plus_baseline(scores: Tensor, groups: Sequence[int], lengths: Sequence[int]) -> list[Estimate]:
    """Computes A = R - mean R of the group at each token, whitened over all tokens; the returns are equal to A.

    ``scores``: (N,). ``lengths``: the number n of tokens of each response. Results are (n,). A group of one has mean 0.
    Hu, arXiv 2501.03262, section 3.
    """
    centered = group_advantages(scores, groups, by_std=False)
    whitened = whiten([score.repeat(length) for score, length in zip(centered, lengths, strict=True)])
    return _estimates(whitened, whitened)


def gae(rewards: Tensor, values: Tensor, gaps: Tensor, *, gamma: float, lam: float) -> Estimate:
    """Computes A_t = delta_t + (gamma lam)^gap A_(t+1), delta_t = r_t + gamma (gamma lam)^(gap - 1) V_(t+1) - V_t.

    V_n = A_n = 0; returns are A + V. All (n,). Schulman et al., arXiv 1506.02438, equation 16, where tokens between two
    that are trained on (gap > 1) have no reward and the value 0.
    """
    decay = gamma * lam
    surprises = rewards + gamma * decay ** (gaps - 1) * next_values(values) - values
    advantages = discounted(surprises, factors=decay**gaps)
    return Estimate(advantages=advantages, returns=advantages + values)


def next_values(values: Tensor) -> Tensor:
    """Returns V_(t+1), and 0 after the last token: (n,) to (n,)."""
    return torch.cat([values[1:], values.new_zeros(min(len(values), 1))])


def discounted(numbers: Tensor, *, factors: Tensor) -> Tensor:
    """Computes S_t = x_t + factors_t S_(t+1): (n,) to (n,), in NumPy, because torch needs microseconds for a number."""
    x, by = numbers.numpy(), factors.numpy()
    sums = np.empty_like(x)
    following = x.dtype.type(0)
    for t in reversed(range(len(x))):
        following = x[t] + by[t] * following
        sums[t] = following
    return torch.from_numpy(sums)


def whiten(parts: Sequence[Tensor]) -> list[Tensor]:
    """Computes (x - mean) / sqrt(var + 1e-8), with mean and variance (with n - 1) over all parts; lists of (n,).

    This is verl's masked_whiten without the 1e-8 in its mean, which has no effect there for an integer mask.
    Raises UsageError for fewer than two numbers.
    """
    numbers = torch.cat(list(parts))
    if len(numbers) < 2:
        raise UsageError(
            f"advantages are whitened over all tokens of a rollout, and this one has {len(numbers)}; "
            "give it two response tokens or more"
        )
    scale = (numbers.var() + VARIANCE_EPSILON).rsqrt()
    return [(part - numbers.mean()) * scale for part in parts]


def of_responses(
    rewards: Sequence[Tensor], values: Sequence[Tensor], gaps: Sequence[Tensor], *, gamma: float, lam: float
) -> list[Estimate]:
    """Computes ``gae`` of each response separately. Lists of (n,)."""
    return [gae(r, v, g, gamma=gamma, lam=lam) for r, v, g in zip(rewards, values, gaps, strict=True)]


def _ppo(
    responses: Sequence[Response], rewards: Sequence[Tensor], gaps: Sequence[Tensor], objective: Ppo
) -> list[Estimate]:
    values = [response.values for response in responses if response.values is not None]
    assert len(values) == len(responses), "generalised advantage estimation needs a critic's values"
    raw = of_responses(rewards, values, gaps, gamma=objective.gamma, lam=objective.lam)
    return _estimates(whiten([each.advantages for each in raw]), [each.returns for each in raw])


def _scores(responses: Sequence[Response], rewards: Sequence[Tensor]) -> Tensor:
    """Sums each response's token rewards, (N,); takes the reward itself for a response without tokens."""
    sums = [
        each.sum() if len(each) else each.new_tensor(response.reward)
        for response, each in zip(responses, rewards, strict=True)
    ]
    return torch.stack(sums)


def of_groups(scores: Tensor, groups: Sequence[int], function: Callable[[Tensor], Tensor]) -> Tensor:
    """Applies ``function`` to the scores of each group, (n,) to (n,); the result has the order of ``scores``, (N,)."""
    numbers = torch.tensor(groups)
    result = torch.empty_like(scores)
    for group in sorted(set(groups)):
        members = numbers == group
        result[members] = function(scores[members])
    return result


def _spread(scores: Tensor, lengths: Sequence[int]) -> list[Estimate]:
    """Makes each response's score the advantage and the return at each of its tokens."""
    parts = [score.repeat(length) for score, length in zip(scores, lengths, strict=True)]
    return _estimates(parts, parts)


def _estimates(advantages: Sequence[Tensor], returns: Sequence[Tensor]) -> list[Estimate]:
    return [Estimate(advantages=a, returns=r) for a, r in zip(advantages, returns, strict=True)]
