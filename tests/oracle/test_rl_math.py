"""What no library says of advantages and losses: packing, what stands in padding, dtypes, and edges of a roll-out."""

from typing import Any, get_args

import pytest
import torch
from hypothesis import strategies as st
from rl_cases import Rollout, cases, gap, gradients, rollouts, total, with_gradient
from rl_sides import IMPL, ORACLE, each_document
from torch import Tensor

from conformance.core.errors import UsageError
from conformance.oracle import loss_terms
from conformance.oracle import policy_gradient as oracle
from conformance.spec.batch import Document
from conformance.spec.objectives import DiscountOver, Grpo, LossAggMode, LossMode, PolicyGradient, Ppo
from impl.objectives import losses as impl_losses
from impl.objectives.advantages import Response, estimate
from impl.objectives.losses import importance_weights, policy_losses, sequence_mean, token_weights
from impl.objectives.policy_gradient import gaps_of

NAN = float("nan")
OF_EACH_LOSS_MODE = [PolicyGradient(loss_mode=mode) for mode in get_args(LossMode)]


def response(length: int, *, group: int = 0, reward: float = 1.0, dtype: torch.dtype = torch.float64) -> Response:
    numbers = torch.arange(length, dtype=dtype)
    return Response(group=group, reward=reward, old_logprobs=-numbers, reference_logprobs=-numbers / 2, values=numbers)


def test_both_sides_implement_every_loss_mode() -> None:
    assert set(impl_losses.LOSS_MODES) == set(loss_terms.LOSS_MODES) == set(get_args(LossMode))


@pytest.mark.parametrize("objective", OF_EACH_LOSS_MODE, ids=get_args(LossMode))
def test_what_stands_outside_of_the_mask_reaches_neither_losses_nor_gradients(objective: PolicyGradient) -> None:
    mask = torch.tensor([[False, True, True, False]])
    documents = torch.zeros(1, 4, dtype=torch.int64)
    found = []
    for garbage in (0.0, NAN, float("inf")):
        logprobs = torch.tensor([[garbage, -1.0, -2.0, garbage]], requires_grad=True)
        old = torch.tensor([[garbage, -1.5, -1.0, garbage]])
        advantages = torch.tensor([[garbage, 1.0, -1.0, garbage]])
        terms = policy_losses(logprobs, old, advantages, mask=mask, documents=documents, objective=objective)
        (gradient,) = torch.autograd.grad(terms.losses.sum(), logprobs)
        found.append((terms.losses.tolist(), terms.clipped.tolist(), terms.clipped_lower.tolist(), gradient.tolist()))
    assert found[0] == found[1] == found[2]


def alone(new: Tensor, old: Tensor, advantages: Tensor, *, objective: PolicyGradient) -> tuple[Tensor, Tensor, Tensor]:
    """One document, in a row of its own."""
    mask = torch.ones(1, len(new), dtype=torch.bool)
    terms = policy_losses(new[None], old[None], advantages[None], mask=mask, documents=mask * 0, objective=objective)
    return terms.losses[0], terms.clipped[0], terms.clipped_lower[0]


@cases(300, case=rollouts(), objective=st.sampled_from(OF_EACH_LOSS_MODE))
def test_packed_rows_have_the_losses_and_gradients_of_rows_of_their_own(
    case: Rollout, objective: PolicyGradient
) -> None:
    found = []
    for function in (IMPL.policy_losses, each_document(alone)):
        new = with_gradient(case.new)
        losses, clipped, lower = function(new, case.old, case.advantages, objective=objective)
        slopes = gradients(total(losses, [1.0] * case.count), new)
        found.append([losses, slopes, [each.double() for each in clipped + lower]])
    assert all(gap(packed, single) < 1e-13 for packed, single in zip(*found, strict=True))


@cases(300, case=rollouts(), objective=st.sampled_from(OF_EACH_LOSS_MODE))
def test_both_sides_have_the_same_metrics(case: Rollout, objective: PolicyGradient) -> None:
    """Those that no library prints, too."""
    found = [side.policy(case, case.new, case.old, objective, case.old)[1] for side in (IMPL, ORACLE)]
    found += [side.critic(case, case.values, Ppo())[1] for side in (IMPL, ORACLE)]
    for mine, oracles in (found[:2], found[2:]):
        assert oracles == pytest.approx({key: mine[key] for key in oracles}, rel=1e-12, abs=1e-12)


def test_the_mean_of_a_sequence_is_that_of_its_document_in_a_packed_row() -> None:
    numbers = torch.tensor([[1.0, 2.0, 4.0, 8.0, NAN], [3.0, 5.0, 7.0, NAN, NAN]], requires_grad=True)
    mask = torch.tensor([[True, True, True, False, False], [True, True, True, False, False]])
    documents = torch.tensor([[0, 0, 1, 1, 2], [0, 0, 0, 0, 0]])
    means = sequence_mean(numbers, mask=mask, documents=documents)
    assert means.tolist() == [[1.5, 1.5, 4.0, 4.0, 0.0], [5.0] * 5]
    (gradient,) = torch.autograd.grad(means[0, 0], numbers)
    assert gradient.tolist() == [[0.5, 0.5, 0.0, 0.0, 0.0], [0.0] * 5]


@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_weights_are_finite_where_a_document_has_no_token(mode: LossAggMode) -> None:
    """Padding stands there, and what is infinite times a mask of 0 would be no number."""
    factor = 2.0 if mode == "seq-mean-token-sum-norm" else None
    tokens, sequences = torch.tensor([4.0, 1.0])
    lengths = torch.tensor([[0.0, 4.0]])
    weights = token_weights(lengths, mode, tokens=tokens, sequences=sequences, scale_factor=factor)
    assert weights.tolist()[0][1] == {"seq-mean-token-sum": 1.0, "seq-mean-token-sum-norm": 0.5}.get(mode, 0.25)
    assert weights.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "objective", [Grpo(kl_coef=0.1), Grpo(adv_estimator="reinforce_plus_plus", gamma=0.9), Ppo(lam=0.9)]
)
def test_the_dtype_is_that_of_the_inputs(objective: Grpo | Ppo, dtype: torch.dtype) -> None:
    found = estimate([response(3, dtype=dtype), response(0, dtype=dtype)], objective)
    assert [len(each.advantages) for each in found] == [3, 0]
    assert {each.advantages.dtype for each in found} == {each.returns.dtype for each in found} == {dtype}


def test_a_response_without_tokens_counts_in_its_group() -> None:
    alone = estimate([response(2), response(2, reward=3.0)], Grpo(norm_adv_by_std_in_grpo=False))
    among = estimate(
        [response(2), response(0, reward=5.0), response(2, reward=3.0)], Grpo(norm_adv_by_std_in_grpo=False)
    )
    assert [float(each.advantages[0]) for each in alone] == [-1.0, 1.0]
    assert [each.advantages.tolist() for each in among] == [[-2.0, -2.0], [], [0.0, 0.0]]


@pytest.mark.parametrize("objective", [Ppo(), Grpo(adv_estimator="reinforce_plus_plus")], ids=["gae", "returns"])
@pytest.mark.parametrize("length", [0, 1])
def test_fewer_than_two_tokens_cannot_be_whitened(objective: Grpo | Ppo, length: int) -> None:
    with pytest.raises(UsageError, match=f"and this one has {length}"):
        estimate([response(length)], objective)


def test_importance_weights_have_no_gradient() -> None:
    old = torch.zeros(2, requires_grad=True)
    weights = importance_weights(old, torch.tensor([-1.0, 1.0]), threshold=2.0)
    assert not weights.requires_grad
    torch.testing.assert_close(weights, torch.tensor([2.0, 0.3678794]))


def returns_of_verl(
    rewards: list[float], values: list[float], mask: tuple[int, ...], gamma: float, lam: float
) -> list[float]:
    """compute_gae_advantage_return: observation tokens leave the next value and the advantage as they are."""
    following, advantage, found = 0.0, 0.0, list[float]()
    for reward, value, on in reversed(list(zip(rewards, values, mask, strict=True))):
        if on:
            advantage = reward + gamma * following - value + gamma * lam * advantage
            following = value
            found.insert(0, advantage + value)
    return found


def returns_of_openrlhf(
    rewards: list[float], values: list[float], mask: tuple[int, ...], gamma: float, lam: float
) -> list[float]:
    """get_advantages_and_returns: values and rewards of all tokens, those of observations multiplied by 0."""
    following, advantage, found = 0.0, 0.0, list[float]()
    for reward, value, on in reversed(list(zip(rewards, values, mask, strict=True))):
        advantage = reward * on + gamma * following - value * on + gamma * lam * advantage
        following = value * on
        if on:
            found.insert(0, advantage + value)
    return found


@pytest.mark.parametrize("mask", [(1, 1, 0, 0, 1, 1), (1, 0, 1, 0, 1, 0), (0, 1, 1, 1, 0, 1), (1, 1, 1, 1, 1, 1)])
@pytest.mark.parametrize(("rule", "loop"), [("trained-tokens", returns_of_verl), ("all-tokens", returns_of_openrlhf)])
def test_discounts_pass_observations_as_in_the_library(rule: DiscountOver, loop: Any, mask: tuple[int, ...]) -> None:
    """The libraries' loops go through all tokens; both sides get the numbers of those that are trained on."""
    objective, generator = Ppo(gamma=0.9, lam=0.8, discount_over=rule), torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, len(mask), generator=generator, dtype=torch.float64)
    expected = torch.tensor(loop(rewards.tolist(), values.tolist(), mask, 0.9, 0.8), dtype=torch.float64)
    at = torch.tensor(mask, dtype=torch.bool)
    targets = (False, *(bool(one) for one in mask))
    response = Response(
        group=0,
        reward=rewards[at][-1].item(),
        old_logprobs=torch.zeros(len(expected), dtype=torch.float64),
        values=values[at],
        given=torch.cat([rewards[at][:-1], torch.zeros(1, dtype=torch.float64)]),
        gaps=gaps_of(targets).double(),
    )
    document = Document((1,) * len(targets), targets)
    found = oracle.PpoFunctions(objective).advantages([document], [rewards[at]], [0], [values[at]], torch.float64)
    for returns in (estimate([response], objective)[0].returns, found["return"][0]):
        torch.testing.assert_close(returns, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("rule", "expected"), [("trained-tokens", [0.25, 0.5, 1]), ("all-tokens", [0.0625, 0.125, 1])])
def test_reward_reaches_the_turns_before_an_observation(rule: DiscountOver, expected: list[float]) -> None:
    """REINFORCE++ with a discount of 1/2; two observation tokens stand before the last token, which gets the reward."""
    objective = Grpo(adv_estimator="reinforce_plus_plus", gamma=0.5, discount_over=rule)
    targets = (False, True, True, False, False, True)
    zeros = torch.zeros(3, dtype=torch.float64)
    response = Response(group=0, reward=1.0, old_logprobs=zeros, gaps=gaps_of(targets).double())
    (ours,) = estimate([response], objective)
    rewards = torch.tensor([0, 0, 1.0], dtype=torch.float64)
    functions = oracle.GrpoFunctions(objective)
    theirs = functions.advantages([Document((1,) * 6, targets)], [rewards], [0], [], torch.float64)["advantage"][0]
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(ours.returns, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(theirs, functions.whitened([wanted])[0], rtol=0, atol=1e-12)
