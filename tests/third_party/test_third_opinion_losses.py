"""A third opinion on losses: policy, critic, KL estimates, weights and the whole loss of the actor agree with verl, TRL
and OpenRLHF on random cases.

Where a library has another formula of the same name, the test puts the difference in by hand and says so;
docs/explanations/objectives.md lists them, tests/judge/test_rl_differences.py measures.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from rl_agreement import (
    KINDS,
    MODES,
    agree,
    beyond,
    near,
    objectives,
    policy_total,
    random_weights,
    same_loss,
    token_weights,
    within,
)
from rl_calls import (
    openrlhf_actor_loss,
    openrlhf_policy,
    trl_loss,
    trl_score,
    verl_actor_loss,
    verl_policy,
)
from rl_cases import Padded, Rollout, cases, gradients, rollouts, total, with_gradient
from rl_libraries import NoFloat32, openrlhf, taken_out, trl, verl
from rl_sides import SIDES, Side, weights_of
from torch import Tensor

from conformance.spec.objectives import KlEstimator, LossAggMode, LossMode, PolicyGradient, Ppo

pytestmark = pytest.mark.parametrize("side", SIDES, ids=lambda side: side.name)


# verl


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


@cases(
    150,
    case=rollouts(one_advantage=True, empty=False),
    objective=objectives(("seq-mean-token-mean",), ("sapo", "geo_mean"), tau_pos=0.8, tau_neg=1.3),
)
def test_means_over_responses_of_verl(side: Side, case: Rollout, objective: PolicyGradient) -> None:
    """Modes that are means over responses however the loss is aggregated."""
    case = within(case, 20.0)
    new = with_gradient(case.new)
    theirs, metrics = verl_policy(case, new, objective, holes=False)
    same_loss(policy_total(side, case, new, objective), theirs, new)
    _, clipped, _ = side.policy_losses(new, case.old, case.advantages, objective=objective)
    if objective.loss_mode == "sapo":
        assert not any(each.any() for each in clipped)
    assert metrics["actor/pg_clipfrac"] <= 1


@cases(100, case=rollouts(), threshold=st.sampled_from([0.5, 2.0]))
def test_importance_weights_of_sequences_of_verl(side: Side, case: Rollout, threshold: float) -> None:
    padded = Padded.of(case)
    theirs, _ = verl().rollout.compute_rollout_correction_weights(
        padded(case.old) - padded(case.sampled), padded.mask, "sequence", threshold
    )
    pairs = zip(case.old, case.sampled, strict=True)
    agree([side.importance_weights(*one, threshold=threshold, level="sequence") for one in pairs], padded.back(theirs))


# OpenRLHF


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


@cases(
    150,
    case=rollouts(equal_groups=True, empty=False, wild=False),
    threshold=st.sampled_from([0.5, 3.0]),
    level=st.sampled_from(["token", "sequence"]),
    mask=st.booleans(),
)
def test_importance_weights_of_trl(side: Side, case: Rollout, threshold: float, level: str, mask: bool) -> None:
    """Its default are masked weights of sequences."""
    case = within(case, 20.0)
    scored = trl_score(
        case,
        trl().score,
        scale_rewards="group",
        use_vllm=True,
        vllm_importance_sampling_mode=f"{level}_{'mask' if mask else 'truncate'}",
        vllm_importance_sampling_clip_max=threshold,
    )
    ratios = scored["importance_sampling_ratio"]
    theirs = [
        (row[:1].expand(length) if level == "sequence" else row[:length])
        for row, length in zip(ratios, case.lengths, strict=True)
    ]
    mine = [
        side.importance_weights(old, sampled, threshold=threshold, level=level, mask=mask)
        for old, sampled in zip(case.old, case.sampled, strict=True)
    ]
    agree(mine, theirs)


@cases(
    150,
    case=rollouts(one_advantage=True, empty=False),
    objective=objectives(("seq-mean-token-mean",), ("sapo",), tau_pos=0.8, tau_neg=1.3),
)
def test_sapo_of_trl(side: Side, case: Rollout, objective: PolicyGradient) -> None:
    case = within(case, 10.0)
    new = with_gradient(case.new)
    same_loss(policy_total(side, case, new, objective), trl_loss(case, new, loss_type="sapo", objective=objective), new)


@pytest.mark.parametrize("length", [3, 6, 7, 9, 10, 12])
def test_overlong_penalty_of_trl(side: Side, length: int) -> None:
    method = taken_out("trl", "trl/rewards/other_rewards.py", "_SoftOverlongPunishment.__call__")
    (theirs,) = method(SimpleNamespace(max_completion_len=10, soft_punish_cache=4), [[0] * length])
    assert side.penalty(length, PolicyGradient(overlong_length=10, overlong_buffer=4)) == pytest.approx(theirs)


LOSS_MODES_OF_TRL: tuple[LossMode, ...] = ("vanilla", "gspo")
LOSS_TYPES: dict[str, LossAggMode] = {
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
}


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@cases(
    200,
    case=rollouts(one_advantage=True, empty=False),
    objective=objectives(loss_modes=LOSS_MODES_OF_TRL),
    corrected=st.booleans(),
)
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


@cases(
    150,
    case=rollouts(one_advantage=True, empty=False),
    objective=objectives(("token-mean",), LOSS_MODES_OF_TRL, entropy_coeff=0.03),
)
def test_entropy_of_trl(side: Side, case: Rollout, objective: PolicyGradient) -> None:
    """The mean over tokens, whatever the aggregation of the loss."""
    case, objective = within(case, 10.0), beyond(objective)
    new, entropy = with_gradient(case.new), with_gradient(random_weights(case))
    theirs = trl_loss(case, new, loss_type="dapo", objective=objective, entropy=entropy)
    mine = policy_total(side, case, new, objective)
    mine = mine - objective.entropy_coeff * total(entropy, token_weights(side, case, objective))
    same_loss(mine, theirs, new + entropy)
