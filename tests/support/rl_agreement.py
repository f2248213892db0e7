"""Makes random objectives and defines agreement, for tests against verl, TRL and OpenRLHF.

Agreement means float64 precision: differences below 1e-12 of (1 + the number), times the condition number of cases that
divide by a standard deviation near zero.
"""

from dataclasses import replace
from typing import Any, get_args

import torch
from hypothesis import strategies as st
from rl_cases import Documents, Rollout, gap, gradients, total
from rl_sides import Side, weights_of
from torch import Tensor

from conformance.spec.objectives import KlEstimator, LossAggMode, LossMode, PolicyGradient

TOLERANCE = 1e-12
KINDS: tuple[KlEstimator, ...] = get_args(KlEstimator)
MODES: tuple[LossAggMode, ...] = get_args(LossAggMode)
# Those of verl that aggregate as they are asked to; the others have the mean over responses.
LOSS_MODES: tuple[LossMode, ...] = tuple(mode for mode in get_args(LossMode) if mode not in ("sapo", "geo_mean"))
discounts = st.sampled_from([0.0, 0.9, 1.0])
coefficients = st.sampled_from([0.0, 0.05, 1.0])


@st.composite
def objectives(
    draw: st.DrawFn,
    /,
    modes: tuple[LossAggMode, ...] = MODES,
    loss_modes: tuple[LossMode, ...] = LOSS_MODES,
    **fixed: Any,
) -> PolicyGradient:
    """Clips on both sides, unequal; dual clip beyond them, within them or none."""
    mode = draw(st.sampled_from(modes))
    chosen: dict[str, Any] = {
        "clip_ratio_low": draw(st.sampled_from([0.05, 0.2, 0.7])),
        "clip_ratio_high": draw(st.sampled_from([0.05, 0.28, 0.9])),
        "clip_ratio_c": draw(st.sampled_from([None, 1.5, 2.0, 3.0])),
        "loss_mode": draw(st.sampled_from(loss_modes)),
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
