"""A third opinion: advantages, losses, KL estimates and weights agree with verl, TRL and OpenRLHF on random cases.

Agreement is that of float64: differences are below 1e-12 of (1 + the number), times the condition of the case where
something is divided by a spread that may be next to nothing. Where a library has another formula of the same name, the
test puts the difference in by hand and says so; docs/objectives.md lists them, tests/test_rl_differences.py measures.
"""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import strategies as st
from rl_calls import (
    first,
    openrlhf_actor_loss,
    openrlhf_estimate,
    openrlhf_policy,
    trl_loss,
    trl_score,
    verl_actor_loss,
    verl_estimate,
    verl_policy,
    verl_rewards,
)
from rl_cases import Documents, Padded, Rollout, cases, gap, gradients, responses, rollouts, total, with_gradient
from rl_libraries import NoFloat32, openrlhf, trl, verl
from rl_sides import SIDES, Side, weights_of
from torch import Tensor

from conformance.rl import Grpo, KlEstimator, LossAggMode, PolicyGradient, Ppo

TOLERANCE = 1e-12
KINDS: tuple[KlEstimator, ...] = get_args(KlEstimator)
MODES: tuple[LossAggMode, ...] = get_args(LossAggMode)
pytestmark = pytest.mark.parametrize("side", SIDES, ids=lambda side: side.name)


discounts = st.sampled_from([0.0, 0.9, 1.0])
coefficients = st.sampled_from([0.0, 0.05, 1.0])


@st.composite
def objectives(draw: st.DrawFn, /, modes: tuple[LossAggMode, ...] = MODES, **fixed: Any) -> PolicyGradient:
    """Clips on both sides, unequal; dual clip beyond them, within them or none."""
    mode = draw(st.sampled_from(modes))
    chosen: dict[str, Any] = {
        "clip_ratio_low": draw(st.sampled_from([0.05, 0.2, 0.7])),
        "clip_ratio_high": draw(st.sampled_from([0.05, 0.28, 0.9])),
        "clip_ratio_c": draw(st.sampled_from([None, 1.5, 2.0, 3.0])),
        "loss_mode": draw(st.sampled_from(["vanilla", "gspo"])),
        "loss_agg_mode": mode,
        "loss_scale_factor": 11.0 if mode == "seq-mean-token-sum-norm" else None,
    }
    return PolicyGradient(**(chosen | fixed))


def agree(got: Documents, wanted: Documents, *, condition: float = 1.0) -> None:
    assert [len(each) for each in got] == [len(each) for each in wanted]
    assert gap(got, wanted) < TOLERANCE * condition


def same_loss(mine: Tensor, theirs: Tensor, inputs: Documents) -> None:
    """The same number, and the same gradient at each token."""
    agree([mine.reshape(1)], [theirs.reshape(1)])
    agree(gradients(mine, inputs), gradients(theirs, inputs))


def of_groups(case: Rollout, scores: Tensor) -> float:
    """How much larger scores are than the spread of the group that has the smallest one."""
    groups = torch.tensor(case.groups)
    spreads = [float(scores[groups == g].std()) for g in set(case.groups) if case.groups.count(g) > 1]
    return 1 + float(scores.abs().max()) / (min(spreads, default=1.0) + 1e-6)


def of_tokens(numbers: Documents) -> float:
    """How much larger numbers are than their spread."""
    together = torch.cat(numbers)
    return 1 + float(together.abs().max() / (together.var() + 1e-8).sqrt())


def policy_total(
    side: Side, case: Rollout, new: Documents, objective: PolicyGradient, weights: Documents | None = None
) -> Tensor:
    losses, _, _ = side.policy_losses(new, case.old, case.advantages, objective=objective)
    if weights is not None:
        losses = [loss * weight for loss, weight in zip(losses, weights, strict=True)]
    return total(losses, token_weights(side, case, objective))


def token_weights(side: Side, case: Rollout, objective: PolicyGradient) -> Documents:
    return weights_of(side, case.lengths, objective.loss_agg_mode, scale_factor=objective.loss_scale_factor)


def random_weights(case: Rollout) -> Documents:
    return [torch.rand(length, generator=case.generator, dtype=torch.float64) for length in case.lengths]


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


@cases(700, case=rollouts(), objective=objectives(), holes=st.booleans())
def test_policy_losses_of_verl(side: Side, case: Rollout, objective: PolicyGradient, holes: bool) -> None:
    new, weights = with_gradient(case.new), random_weights(case)
    theirs, metrics = verl_policy(case, new, objective, holes=holes, weights=weights)
    same_loss(policy_total(side, case, new, objective, weights), theirs, new)
    found = side.policy(case, new, case.old, replace(objective, rollout_is_threshold=1.0), weights)[1]
    assert set(metrics) <= {f"actor/{key}" for key in found}
    for name, value in metrics.items():
        assert found[name.removeprefix("actor/")] == pytest.approx(value, rel=1e-7, abs=1e-7), name
    _, clipped, lower = side.policy_losses(new, case.old, case.advantages, objective=objective)
    for mine, name in ((clipped, "actor/pg_clipfrac"), (lower, "actor/pg_clipfrac_lower")):
        assert int(sum(each.sum() for each in mine)) == pytest.approx(metrics[name] * case.tokens, abs=1e-3)


@cases(
    400,
    case=rollouts(),
    objective=objectives(entropy_coeff=0.03, kl_loss_coef=0.2),
    kind=st.sampled_from(KINDS),
    threshold=st.sampled_from([0.5, 2.0, 1e6]),
)
def test_the_actors_loss_of_verl(
    side: Side, case: Rollout, objective: PolicyGradient, kind: KlEstimator, threshold: float
) -> None:
    """Policy, entropy and KL together, in micro-batches with the denominators of the whole mini-batch."""
    objective = replace(objective, kl_loss_type=kind)
    new, entropy = with_gradient(case.new), with_gradient(random_weights(case))
    weights = [
        side.importance_weights(old, sampled, threshold=threshold)
        for old, sampled in zip(case.old, case.sampled, strict=True)
    ]
    padded = Padded.of(case)
    theirs, _ = verl().rollout.compute_rollout_correction_weights(
        padded(case.old) - padded(case.sampled), padded.mask, "token", threshold
    )
    agree(weights, padded.back(theirs))
    objective = replace(objective, rollout_is_threshold=threshold)
    mine, _ = side.policy(case, new, entropy, objective, weights)
    same_loss(mine, verl_actor_loss(case, new, entropy, objective, weights), new + entropy)


@pytest.mark.parametrize("kind", KINDS)
@cases(300, case=rollouts())
def test_kl_estimates_of_verl(side: Side, kind: KlEstimator, case: Rollout) -> None:
    new = with_gradient(case.new)
    mine = [side.kl_estimate(n, r, kind) for n, r in zip(new, case.reference, strict=True)]
    theirs = [verl().core.kl_penalty(n, r, kind) for n, r in zip(new, case.reference, strict=True)]
    agree(mine, theirs)
    agree(gradients(total(mine, [1.0] * case.count), new), gradients(total(theirs, [1.0] * case.count), new))


@cases(400, case=rollouts(), mode=st.sampled_from(MODES), cliprange=st.sampled_from([0.05, 0.5]), holes=st.booleans())
def test_value_losses_of_verl(side: Side, case: Rollout, mode: LossAggMode, cliprange: float, holes: bool) -> None:
    padded = Padded.of(case, holes=holes)
    factor = 5.0 if mode == "seq-mean-token-sum-norm" else None
    values = with_gradient(case.values)

    def loss_of_verl() -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = verl().core.compute_value_loss(
            padded(values),
            padded(case.advantages),
            padded(case.old_values),
            padded.mask,
            cliprange,
            loss_agg_mode=mode,
            loss_scale_factor=factor,
        )
        return found

    theirs, fraction = loss_of_verl()
    found = [
        side.value_losses(v, o, r, cliprange=cliprange)
        for v, o, r in zip(values, case.old_values, case.advantages, strict=True)
    ]
    weights = weights_of(side, case.lengths, mode, scale_factor=factor)
    same_loss(total([loss for loss, _ in found], weights), theirs, values)
    clipped = int(sum(each.sum() for _, each in found))
    assert clipped == pytest.approx(float(fraction) * case.tokens, abs=1e-3)
    loss, numbers = side.critic(
        case, values, Ppo(cliprange_value=cliprange, loss_agg_mode=mode, loss_scale_factor=factor)
    )
    same_loss(loss, loss_of_verl()[0], values)
    assert numbers["critic.clipfrac"] * case.tokens == pytest.approx(clipped)


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


@cases(
    400,
    case=rollouts(),
    objective=objectives(("token-mean", "seq-mean-token-mean"), loss_mode="vanilla"),
    threshold=st.sampled_from([None, 0.5, 5.0]),
)
def test_policy_losses_of_openrlhf(
    side: Side, case: Rollout, objective: PolicyGradient, threshold: float | None
) -> None:
    case = within(case, 20.0)
    new = with_gradient(case.new)
    weights = None
    if threshold is not None:
        weights = [
            side.importance_weights(old, sampled, threshold=threshold)
            for old, sampled in zip(case.old, case.sampled, strict=True)
        ]
    theirs = openrlhf_policy(case, new, objective, threshold=threshold)
    same_loss(policy_total(side, case, new, objective, weights), theirs, new)


@cases(
    300,
    case=rollouts(one_advantage=True),
    objective=objectives(("seq-mean-token-mean",), loss_mode="gspo", clip_ratio_c=None),
)
def test_gspo_of_openrlhf(side: Side, case: Rollout, objective: PolicyGradient) -> None:
    """The ratio of the sequence, where ours has the gradient of the token: the same for one advantage a response."""
    case = within(case, 10.0)
    new = with_gradient(case.new)
    same_loss(policy_total(side, case, new, objective), openrlhf_policy(case, new, objective), new)


@pytest.mark.parametrize(("kind", "name"), [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3")])
@cases(300, case=rollouts(wild=False))
def test_kl_estimates_and_the_actors_loss_of_openrlhf(side: Side, kind: KlEstimator, name: str, case: Rollout) -> None:
    """All of its estimates are clamped to +-10, of ours k3 only; no case here comes near."""
    new, entropy = with_gradient(case.new), with_gradient(random_weights(case))
    with NoFloat32():
        theirs = [
            openrlhf().utils.compute_approx_kl(n, r, kl_estimator=name)
            for n, r in zip(new, case.reference, strict=True)
        ]
    mine = [side.kl_estimate(n, r, kind) for n, r in zip(new, case.reference, strict=True)]
    mine = [each.where(each.abs() < 10, each.detach().clamp(-10, 10)) for each in mine]
    agree(mine, theirs)
    objective = PolicyGradient(entropy_coeff=0.03, kl_loss_coef=0.2)
    weights = token_weights(side, case, objective)
    loss = policy_total(side, case, new, objective)
    loss = loss + objective.kl_loss_coef * total(mine, weights) - objective.entropy_coeff * total(entropy, weights)
    same_loss(loss, openrlhf_actor_loss(case, new, entropy, objective, estimator=name), new + entropy)


@cases(300, case=rollouts(), mode=st.sampled_from(MODES[:1] + MODES[2:3]), cliprange=st.sampled_from([0.05, 0.5]))
def test_value_losses_of_openrlhf(side: Side, case: Rollout, mode: LossAggMode, cliprange: float) -> None:
    padded = Padded.of(case)
    values = with_gradient(case.values)
    theirs = openrlhf().loss.ValueLoss(cliprange, token_level_loss=mode == "token-mean")(
        padded(values), padded(case.old_values), padded(case.advantages), action_mask=padded.mask
    )
    found = [
        side.value_losses(v, o, r, cliprange=cliprange)[0]
        for v, o, r in zip(values, case.old_values, case.advantages, strict=True)
    ]
    same_loss(total(found, weights_of(side, case.lengths, mode)), theirs, values)


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


@cases(150, case=rollouts(equal_groups=True, empty=False), threshold=st.sampled_from([0.5, 3.0]))
def test_importance_weights_of_trl(side: Side, case: Rollout, threshold: float) -> None:
    """Of each token and truncated, which is not its default."""
    case = within(case, 20.0)
    scored = trl_score(
        case, trl().score, scale_rewards="group", use_vllm=True, vllm_importance_sampling_clip_max=threshold
    )
    ratios = scored["importance_sampling_ratio"]
    theirs = [row[:length] for row, length in zip(ratios, case.lengths, strict=True)]
    mine = [
        side.importance_weights(old, sampled, threshold=threshold)
        for old, sampled in zip(case.old, case.sampled, strict=True)
    ]
    agree(mine, theirs)


LOSS_TYPES: dict[str, LossAggMode] = {
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
}


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@cases(200, case=rollouts(one_advantage=True, empty=False), objective=objectives(), corrected=st.booleans())
def test_policy_losses_of_trl(
    side: Side, loss_type: str, case: Rollout, objective: PolicyGradient, corrected: bool
) -> None:
    """KL without the factor that is its default, and delta for dual clip: the same beyond the upper clip. Weights of
    single tokens only with ratios of single tokens: the ratio of a sequence has its gradient in all of them."""
    mode = LOSS_TYPES[loss_type]
    factor = 9.0 if mode == "seq-mean-token-sum-norm" else None
    objective = replace(beyond(objective), loss_agg_mode=mode, loss_scale_factor=factor, kl_loss_coef=0.1)
    case = within(case, 10.0)  # of the sequence in gspo
    case = replace(case, reference=near(case.reference, case.new, 2.0))  # k3 is clamped in ours
    new, weights = (
        with_gradient(case.new),
        random_weights(case) if corrected and objective.loss_mode == "vanilla" else None,
    )
    theirs = trl_loss(
        case,
        new,
        loss_type=loss_type,
        objective=objective,
        weights=weights,
        max_completion_length=factor or 1.0,
    )
    mine = policy_total(side, case, new, objective, weights)
    estimates = [side.kl_estimate(n, r, "low_var_kl") for n, r in zip(new, case.reference, strict=True)]
    mine = mine + objective.kl_loss_coef * total(estimates, token_weights(side, case, objective))
    same_loss(mine, theirs, new)


@cases(150, case=rollouts(one_advantage=True, empty=False), objective=objectives(("token-mean",), entropy_coeff=0.03))
def test_entropy_of_trl(side: Side, case: Rollout, objective: PolicyGradient) -> None:
    """The mean over tokens, whatever the aggregation of the loss."""
    case, objective = within(case, 10.0), beyond(objective)
    new, entropy = with_gradient(case.new), with_gradient(random_weights(case))
    theirs = trl_loss(case, new, loss_type="dapo", objective=objective, entropy=entropy)
    mine = policy_total(side, case, new, objective)
    mine = mine - objective.entropy_coeff * total(entropy, token_weights(side, case, objective))
    same_loss(mine, theirs, new + entropy)


def beyond(objective: PolicyGradient) -> PolicyGradient:
    """Dual clip beyond the upper clip: within it, TRL's ``delta`` is something else."""
    bound = objective.clip_ratio_c
    return replace(objective, clip_ratio_c=None if bound is None else max(bound, 2.0))


def near(documents: Documents, others: Documents, distance: float) -> Documents:
    return [o + (d - o).clamp(-distance, distance) for d, o in zip(documents, others, strict=True)]


def within(case: Rollout, bound: float) -> Rollout:
    """No log-ratio beyond the bound of ours, where the library has none."""
    bound *= 0.999
    return replace(case, new=near(case.new, case.old, bound), sampled=near(case.sampled, case.old, bound))
