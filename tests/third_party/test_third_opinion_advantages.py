"""A third opinion on advantages: rewards of tokens, estimators and returns agree with verl, TRL and OpenRLHF on random
cases.

Where a library has another formula of the same name, the test puts the difference in by hand and says so;
docs/explanations/objectives.md lists them, tests/judge/test_rl_differences.py measures.
"""

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from rl_agreement import KINDS, agree, coefficients, discounts, of_groups, of_tokens
from rl_calls import (
    first,
    openrlhf_estimate,
    trl_score,
    verl_estimate,
    verl_evicted,
    verl_rewards,
)
from rl_cases import Padded, Rollout, cases, responses, rollouts
from rl_libraries import trl
from rl_sides import SIDES, Side, rows_of

from conformance.spec.batch import Batch
from conformance.spec.objectives import Grpo, KlEstimator, Ppo

pytestmark = pytest.mark.parametrize("side", SIDES, ids=lambda side: side.name)


# verl


@cases(300, case=rollouts(), kind=st.sampled_from(KINDS), coefficient=coefficients, holes=st.booleans())
def test_token_rewards_of_verl(side: Side, case: Rollout, kind: KlEstimator, coefficient: float, holes: bool) -> None:
    padded = Padded.of(case, holes=holes)
    theirs = padded.back(verl_rewards(case, padded, kl_coef=coefficient, kl_penalty=kind))
    agree([side.token_rewards(each, kl_coef=coefficient, kl_penalty=kind) for each in responses(case)], theirs)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "rloo_vectorized"])
@cases(300, case=rollouts(), kind=st.sampled_from(KINDS), coefficient=coefficients, holes=st.booleans())
def test_group_estimators_of_verl(
    side: Side, name: str, case: Rollout, kind: KlEstimator, coefficient: float, holes: bool
) -> None:
    by_std = name == "grpo"
    objective = Grpo(
        adv_estimator="rloo" if "rloo" in name else "grpo",
        norm_adv_by_std_in_grpo=by_std,
        kl_coef=coefficient,
        kl_penalty=kind,
    )
    # Its vectorized form drops a response that is alone in its group, the other one keeps its score.
    vectorized = name == "rloo_vectorized" and all(case.groups.count(group) > 1 for group in case.groups)
    theirs = verl_estimate(case, objective, holes=holes, name=name if vectorized else None)
    padded = Padded.of(case)
    scores = verl_rewards(case, padded, kl_coef=coefficient, kl_penalty=kind).sum(-1)
    condition = of_groups(case, scores) if by_std else 1 + float(scores.abs().max())
    advantages, returns = side.estimate(responses(case), objective)
    agree(advantages, theirs[0], condition=condition)
    if returns is not None:
        agree(returns, theirs[1], condition=condition)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"])
@cases(
    300,
    case=rollouts(),
    kind=st.sampled_from(KINDS),
    coefficient=coefficients,
    gamma=discounts,
    lam=discounts,
    holes=st.booleans(),
)
def test_whitened_estimators_of_verl(
    side: Side, name: Any, case: Rollout, kind: KlEstimator, coefficient: float, gamma: float, lam: float, holes: bool
) -> None:
    shared: dict[str, Any] = {"kl_coef": coefficient, "kl_penalty": kind, "gamma": gamma}
    objective = Ppo(lam=lam, **shared) if name == "gae" else Grpo(adv_estimator=name, **shared)
    advantages, returns = side.estimate(responses(case), objective)
    theirs = verl_estimate(case, objective, holes=holes)
    raw = theirs[1]
    if name == "gae":
        raw = [r - v for r, v in zip(raw, case.old_values, strict=True)]
    elif name == "reinforce_plus_plus_baseline":
        centered = Grpo(norm_adv_by_std_in_grpo=False, kl_coef=coefficient, kl_penalty=kind)
        raw = side.estimate(responses(case), centered)[0]
    condition = of_tokens(raw) * (1 + max(abs(reward) for reward in case.rewards))
    agree(advantages, theirs[0], condition=condition)
    if returns is not None:
        agree(returns, theirs[1], condition=condition)


# OpenRLHF


@pytest.mark.parametrize("estimator", ["rloo", "dr_grpo", "group_norm"])
@cases(200, case=rollouts(equal_groups=True, empty=False))
def test_group_estimators_of_openrlhf(side: Side, estimator: str, case: Rollout) -> None:
    objective = Grpo(
        adv_estimator="rloo" if estimator == "rloo" else "grpo", norm_adv_by_std_in_grpo=estimator == "group_norm"
    )
    theirs = openrlhf_estimate(case, estimator)[0]
    condition = 1 + max(abs(reward) for reward in case.rewards)
    if estimator == "group_norm":  # 1e-9 instead of 1e-6 beside the standard deviation
        rewards = torch.tensor(case.rewards, dtype=torch.float64)
        groups = torch.tensor(case.groups)
        spreads = [rewards[groups == group].std() for group in case.groups]
        theirs = [each * (s + 1e-9) / (s + 1e-6) for each, s in zip(theirs, spreads, strict=True)]
        condition = of_groups(case, rewards)
    agree(side.estimate(responses(case), objective)[0], theirs, condition=condition)


@pytest.mark.parametrize("estimator", ["reinforce", "reinforce_baseline", "gae"])
@cases(200, case=rollouts(equal_groups=True, empty=False, wild=False), gamma=discounts, lam=discounts)
def test_whitened_estimators_of_openrlhf(side: Side, estimator: str, case: Rollout, gamma: float, lam: float) -> None:
    """Before they are whitened; the variance there is of n, and is clamped at 1e-8 instead of added to."""
    baseline = estimator == "reinforce_baseline"
    kl_coef = 0.0 if baseline else 0.1  # with a baseline, theirs comes before the penalty
    name: Any = "reinforce_plus_plus_baseline" if baseline else "reinforce_plus_plus"
    objective = (
        Ppo(gamma=gamma, lam=lam, kl_coef=kl_coef)
        if estimator == "gae"
        else Grpo(adv_estimator=name, gamma=gamma, kl_coef=kl_coef)
    )
    advantages, returns = side.estimate(responses(case), objective)
    gamma = 1.0 if baseline else gamma
    theirs = openrlhf_estimate(case, estimator, gamma=gamma, lam=lam, kl_coef=kl_coef)
    raw = theirs[1]
    if estimator == "gae":
        raw = [r - v for r, v in zip(raw, case.old_values, strict=True)]
    if returns is not None and not baseline:
        agree(returns, theirs[1])
    numbers = torch.cat(raw)
    factor = (numbers.var() + 1e-8).rsqrt() / numbers.var(correction=0).clamp(min=1e-8).rsqrt()
    condition = of_tokens(raw) * (1 + max(abs(reward) for reward in case.rewards))
    agree(advantages, [each * factor for each in theirs[0]], condition=condition)


@cases(100, case=rollouts(empty=False))
def test_dynamic_sampling_of_verl(side: Side, case: Rollout) -> None:
    """Groups that its replay buffer evicts have no targets."""
    evicted = verl_evicted(case.groups, case.rewards)
    columns: Any = {
        "group": [float(group) for group in case.groups],
        "reward": case.rewards,
        "rollout_logprob": case.old,
    }
    objective = Grpo(filter_groups=True, recompute_old_logprobs=False)
    (batch,) = side.annotated([Batch(0, 99, tuple(rows_of(case, **columns)))], objective)
    kept = [any(document.targets) for document in batch.documents]
    assert kept == [group not in evicted for group in case.groups]
    assert batch.target_count == sum(n for n, is_kept in zip(case.lengths, kept, strict=True) if is_kept)


# TRL


@pytest.mark.parametrize("scale", ["group", "none"])
@cases(150, case=rollouts(equal_groups=True, empty=False))
def test_group_advantages_of_trl(side: Side, scale: str, case: Rollout) -> None:
    theirs = trl_score(case, trl().score, scale_rewards=scale)["advantages"]
    rewards, groups = torch.tensor(case.rewards, dtype=torch.float64), torch.tensor(case.groups)
    if scale == "group":  # 1e-4 instead of 1e-6 beside the standard deviation
        spreads = torch.stack([rewards[groups == group].std() for group in case.groups])
        theirs = theirs * (spreads + 1e-4) / (spreads + 1e-6)
    mine = side.estimate(responses(case), Grpo(norm_adv_by_std_in_grpo=scale == "group"))[0]
    agree([first(mine)], [theirs], condition=of_groups(case, rewards) * 10)


@cases(150, case=rollouts(equal_groups=True, empty=False), coefficient=coefficients)
def test_rloo_of_trl(side: Side, case: Rollout, coefficient: float) -> None:
    theirs = trl_score(case, trl().rloo_score, beta=coefficient)["advantages"]
    mine = side.estimate(responses(case), Grpo(adv_estimator="rloo", kl_coef=coefficient))[0]
    agree([first(mine)], [theirs], condition=10 + max(abs(reward) for reward in case.rewards))
