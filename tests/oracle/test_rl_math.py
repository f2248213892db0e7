"""What no library says of advantages and losses: packing, what stands in padding, dtypes, and edges of a roll-out."""

from typing import get_args

import pytest
import torch
from hypothesis import strategies as st
from rl_cases import Rollout, cases, gap, gradients, rollouts, total, with_gradient
from rl_sides import IMPL, ORACLE, each_document
from torch import Tensor

from conformance.core.errors import UsageError
from conformance.oracle import policy_gradient as oracle
from conformance.spec.objectives import Grpo, LossAggMode, LossMode, PolicyGradient, Ppo
from impl.objectives import losses as impl_losses
from impl.objectives.advantages import Response, estimate, gae
from impl.objectives.losses import importance_weights, policy_losses, sequence_mean, token_weights

NAN = float("nan")
OF_EACH_LOSS_MODE = [PolicyGradient(loss_mode=mode) for mode in get_args(LossMode)]


def response(length: int, *, group: int = 0, reward: float = 1.0, dtype: torch.dtype = torch.float64) -> Response:
    numbers = torch.arange(length, dtype=dtype)
    return Response(group=group, reward=reward, old_logprobs=-numbers, reference_logprobs=-numbers / 2, values=numbers)


def test_both_sides_implement_every_loss_mode() -> None:
    assert set(impl_losses.LOSS_MODES) == set(oracle.LOSS_MODES) == set(get_args(LossMode))


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


@pytest.mark.parametrize("mask", [(1, 1, 0, 0, 1, 1), (1, 0, 1, 0, 1, 0), (0, 1, 1, 1, 0, 1)])
def test_advantages_pass_over_masked_tokens_as_in_verl(mask: tuple[int, ...]) -> None:
    """verl's loop goes through all tokens; both sides get the numbers of the sampled ones."""
    objective, generator = Ppo(gamma=0.9, lam=0.8, kl_coef=0.0), torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, len(mask), generator=generator, dtype=torch.float64)
    following, advantage = 0.0, 0.0
    expected: list[float] = []
    for t in reversed(range(len(mask))):
        if mask[t]:
            delta = rewards[t].item() + objective.gamma * following - values[t].item()
            advantage, following = delta + objective.gamma * objective.lam * advantage, values[t].item()
            expected.insert(0, advantage + values[t].item())
    at = torch.tensor(mask, dtype=torch.bool)
    ours = gae(rewards[at], values[at], gamma=objective.gamma, lam=objective.lam).returns
    found = oracle.PpoFunctions(objective).advantages([], [rewards[at]], [], [values[at]], torch.float64)
    for returns in (ours, found["return"][0]):
        torch.testing.assert_close(returns, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
