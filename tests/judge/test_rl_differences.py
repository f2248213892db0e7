"""The differences listed in docs/explanations/objectives.md: the numbers of each line, measured on libraries and impl.

A measurement gives our number and theirs on the smallest case in which they differ. The table has both to nine digits.
"""

import ast
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_calls import (
    openrlhf_actor_loss,
    openrlhf_estimate,
    openrlhf_policy,
    trl_kto,
    trl_loss,
    trl_score,
    verl_estimate,
    verl_overlong,
)
from rl_cases import Documents, Rollout, gradients, responses, total, with_gradient
from rl_libraries import openrlhf, root, trl, verl
from rl_sides import IMPL, weights_of
from torch import Tensor

from conformance.spec.objectives import Grpo, PolicyGradient, Ppo
from conformance.spec.offline import Kto
from impl.objectives.preferences import answer_losses, kl_of

TABLE = Path(__file__).resolve().parents[2] / "docs" / "explanations" / "objectives.md"
Measurement = Callable[[], tuple[float, float]]
MEASUREMENTS: dict[str, Measurement] = {}


def measures(line: str) -> Callable[[Measurement], Measurement]:
    def add(function: Measurement) -> Measurement:
        MEASUREMENTS[line] = function
        return function

    return add


def rows() -> dict[str, list[str]]:
    """The last two columns by the first one, of the table of differences."""
    lines = TABLE.read_text(encoding="utf-8").partition("| no. |")[2].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {row[0]: row[-2:] for row in cells}


def d(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def case_of(lengths: list[int], *, groups: list[int] | None = None, **columns: Any) -> Rollout:
    """Responses of one group with all log-probs, values, advantages and rewards 0 where not given."""
    zeros = [torch.zeros(length, dtype=torch.float64) for length in lengths]
    names = ("old", "new", "reference", "sampled", "old_values", "values", "advantages")
    given: dict[str, Any] = dict.fromkeys(names, zeros) | {"rewards": [0.0] * len(lengths)} | columns
    return Rollout(groups=groups or [0] * len(lengths), lengths=lengths, generator=torch.Generator(), **given)


def estimated(case: Rollout, objective: Grpo | Ppo) -> Documents:
    return IMPL.estimate(responses(case), objective)[0]


def loss_of(case: Rollout, objective: PolicyGradient, new: Documents | None = None) -> Tensor:
    losses, _, _ = IMPL.policy_losses(new or case.new, case.old, case.advantages, objective=objective)
    weights = weights_of(IMPL, case.lengths, objective.loss_agg_mode, scale_factor=objective.loss_scale_factor)
    return total(losses, weights)


def one_token(log_ratio: float, advantage: float) -> Rollout:
    return case_of([1], new=[d(log_ratio)], advantages=[d(advantage)])


FREE = PolicyGradient(clip_ratio_c=None)
SEQUENCES = PolicyGradient(loss_agg_mode="seq-mean-token-mean", loss_mode="gspo", clip_ratio_c=None)
PAIR = case_of([1, 1], rewards=[0.0, 1.0])
SPREAD = case_of([1, 1, 1, 1], rewards=[0.0, 0.0, 1.0, 3.0])
EMPTY = case_of([1, 0], new=[d(0.0), d()], advantages=[d(-1.0), d()])


def last(documents: Documents) -> float:
    return float(documents[-1][-1])


def aggregated(case: Rollout, mode: str, mask: Tensor, **info: Any) -> float:
    """verl's aggregation of losses of 1."""
    return float(verl().core.agg_loss(torch.ones(mask.shape, dtype=torch.float64), mask, mode, **info))


@measures("V1")
def masked_mean_epsilon() -> tuple[float, float]:
    mask = torch.ones(1, 1, dtype=torch.float64)
    assert aggregated(EMPTY, "seq-mean-token-mean", mask.long()) == 1.0  # 1 + 1e-8 is 1 in float32
    return float(weights_of(IMPL, [1], "seq-mean-token-mean")[0]), aggregated(EMPTY, "seq-mean-token-mean", mask)


@measures("V2")
def whitening_in_float32() -> tuple[float, float]:
    objective = Grpo(adv_estimator="reinforce_plus_plus")
    case = SPREAD
    mask = torch.ones(4, 1, dtype=torch.int64)
    theirs = verl().core.verl_F.masked_whiten(d(*case.rewards)[:, None], mask)
    return last(estimated(case, objective)), float(theirs[-1, 0])


@measures("V3")
def a_group_of_one_in_float32() -> tuple[float, float]:
    case = case_of([1], rewards=[1.0])
    theirs, _ = verl().core.compute_grpo_outcome_advantage(d(1.0)[None], torch.ones(1, 1).long(), [0])
    return last(estimated(case, Grpo())), float(theirs[0, 0])


@measures("V4")
def empty_responses_in_verls_mini_batch() -> tuple[float, float]:
    mask = torch.tensor([[1], [0]])
    ours = float(weights_of(IMPL, [1, 0], "seq-mean-token-sum")[0])
    assert aggregated(EMPTY, "seq-mean-token-sum", mask) == ours  # where no size of the mini-batch is handed in
    return ours, aggregated(EMPTY, "seq-mean-token-sum", mask, global_batch_size=2)


@measures("V5")
def vectorized_rloo_of_one() -> tuple[float, float]:
    case = case_of([1], rewards=[1.0])
    objective = Grpo(adv_estimator="rloo")
    return last(estimated(case, objective)), last(
        verl_estimate(case, objective, holes=False, name="rloo_vectorized")[0]
    )


@measures("V6")
def vectorized_grpo_in_float32() -> tuple[float, float]:
    case = case_of([1, 1], rewards=[0.0, 0.1])
    return last(estimated(case, Grpo())), last(verl_estimate(case, Grpo(), holes=False, name="grpo_vectorized")[0])


@measures("V7")
def verl_without_a_scale_factor() -> tuple[float, float]:
    """Ours has to be given; it is 1 here. Theirs is the width of the padded batch, 4."""
    mask = torch.tensor([[1, 0, 0, 0]])
    ours = float(weights_of(IMPL, [1], "seq-mean-token-sum-norm", scale_factor=1.0)[0])
    return ours, aggregated(EMPTY, "seq-mean-token-sum-norm", mask)


@measures("V8")
def importance_weights_of_verls_default() -> tuple[float, float]:
    """Two tokens, of which the second one alone has a ratio other than 1; the weight of the first one."""
    case = case_of([2], sampled=[d(0.0, -0.5)])
    ratios, mask = (case.old[0] - case.sampled[0])[None], torch.ones(1, 2, dtype=torch.int64)
    level = defaults("verl")["rollout_is"]
    theirs, _ = verl().rollout.compute_rollout_correction_weights(ratios, mask, level, 2.0)
    return float(IMPL.importance_weights(case.old[0], case.sampled[0], threshold=2.0)[0]), float(theirs[0, 0])


@measures("V9")
def overlong_penalty_of_verl() -> tuple[float, float]:
    objective = PolicyGradient(overlong_length=10, overlong_buffer=4)
    return IMPL.penalty(12, objective), verl_overlong(12, limit=10, buffer=4)


@measures("T13")
def kl_of_kto_of_trl() -> tuple[float, float]:
    """Two desired answers of log-ratio 1 in two micro-batches, whose mismatched answers have 2 and -2."""
    parts = [([(d(1.0), d(0.0))], [(d(other), d(0.0))], [True]) for other in (2.0, -2.0)]
    theirs = torch.stack([trl_kto(*part, beta=1.0) for part in parts]).mean()
    kl = kl_of({"kl": d(2.0, -2.0).mean()})
    return float(answer_losses(d(1.0, 1.0) - kl, torch.tensor([True, True]), Kto(beta=1.0)).mean()), float(theirs)


@measures("T1")
def deviation_epsilon_of_trl() -> tuple[float, float]:
    return last(estimated(PAIR, Grpo())), float(trl_score(PAIR, trl().score, scale_rewards="group")["advantages"][-1])


@measures("T2")
def kl_times_ratio_of_trl() -> tuple[float, float]:
    objective = replace(FREE, kl_loss_coef=1.0)
    case = case_of([1], new=[d(0.5)], reference=[d(0.0)])
    ours = float(IMPL.kl_estimate(case.new[0], case.reference[0], "low_var_kl").sum())
    return ours, float(trl_loss(case, case.new, loss_type="dapo", objective=objective, use_bias_correction_kl=True))


@measures("T3")
def k3_of_trl() -> tuple[float, float]:
    objective = replace(FREE, kl_loss_coef=1.0)
    case = case_of([1], reference=[d(5.0)])
    ours = float(IMPL.kl_estimate(case.new[0], case.reference[0], "low_var_kl").sum())
    return ours, float(trl_loss(case, case.new, loss_type="dapo", objective=objective))


@measures("T4")
def log_ratio_of_trl() -> tuple[float, float]:
    case = one_token(21.0, -1.0)
    return float(loss_of(case, FREE)), float(trl_loss(case, case.new, loss_type="dapo", objective=FREE))


@measures("T5")
def empty_responses_of_trl() -> tuple[float, float]:
    objective = replace(FREE, loss_agg_mode="seq-mean-token-mean")
    types = ("grpo", "dr_grpo", "luspo")
    theirs = {float(trl_loss(EMPTY, EMPTY.new, loss_type=each, objective=objective)) for each in types}
    assert len(theirs) == 1
    return float(loss_of(EMPTY, objective)), theirs.pop()


@measures("T6")
def means_of_means_of_trl() -> tuple[float, float]:
    """Two micro-batches of one response: a token with the loss 1, and three with the loss 0."""
    micro = [case_of([1], advantages=[d(-1.0)]), case_of([3])]
    whole = case_of([1, 3], advantages=[d(-1.0), d(0.0, 0.0, 0.0)])
    call = partial(trl_loss, loss_type="bnpo", objective=FREE, accumulation=2)
    return float(loss_of(whole, FREE)), sum(float(call(each, each.new)) for each in micro)


@measures("T7")
def delta_below_the_clip_of_trl() -> tuple[float, float]:
    objective = PolicyGradient(clip_ratio_c=1.1)
    case = one_token(1.0, -1.0)
    return float(loss_of(case, objective)), float(trl_loss(case, case.new, loss_type="dapo", objective=objective))


@measures("T8")
def ratio_of_the_sequence_in_trls_rloo() -> tuple[float, float]:
    case = case_of([2], new=[d(0.05, 0.05)], advantages=[d(1.0, 1.0)])
    return float(loss_of(case, FREE)), float(trl_loss(case, case.new, loss_type="rloo", objective=FREE))


@measures("T9")
def entropy_of_trl() -> tuple[float, float]:
    """An entropy of 1 in a response of one token, of 0 in one of three."""
    case = case_of([1, 3])
    entropy = [d(1.0), d(0.0, 0.0, 0.0)]
    weights = weights_of(IMPL, case.lengths, "seq-mean-token-mean")
    objective = replace(FREE, entropy_coeff=1.0)
    theirs = trl_loss(case, case.new, loss_type="grpo", objective=objective, entropy=entropy)
    return float(-total(entropy, weights)), float(theirs)


@measures("T10")
def importance_weights_of_trl() -> tuple[float, float]:
    case = case_of([1, 1], sampled=[d(-2.0), d(-2.0)], groups=[0, 0])
    named: dict[str, Any] = {"use_vllm": True, "vllm_importance_sampling_clip_max": 3.0, "scale_rewards": "group"}
    theirs = trl_score(case, trl().score, **named, vllm_importance_sampling_mode="sequence_mask")
    ours = IMPL.importance_weights(case.old[0], case.sampled[0], threshold=3.0)
    return float(ours), float(theirs["importance_sampling_ratio"][0, 0])


@measures("T11")
def gspo_with_weights_in_trl() -> tuple[float, float]:
    """The gradient of the first of two tokens, whose weights are 1 and 0."""
    case = case_of([2], advantages=[d(-1.0, -1.0)])
    new, weights = with_gradient(case.new), [d(1.0, 0.0)]
    losses, _, _ = IMPL.policy_losses(new, case.old, case.advantages, objective=SEQUENCES)
    theirs = trl_loss(case, new, loss_type="grpo", objective=SEQUENCES, weights=weights)
    ours = (losses[0] * weights[0]).mean()
    return float(gradients(ours, new)[0][0]), float(gradients(theirs, new)[0][0])


@measures("T12")
def gspo_bound_of_trl() -> tuple[float, float]:
    case = one_token(11.0, -1.0)
    return float(loss_of(case, SEQUENCES)), float(trl_loss(case, case.new, loss_type="grpo", objective=SEQUENCES))


@measures("O1")
def deviation_epsilon_of_openrlhf() -> tuple[float, float]:
    return last(estimated(PAIR, Grpo())), last(openrlhf_estimate(PAIR, "group_norm")[0])


@measures("O2")
def whitening_of_openrlhf() -> tuple[float, float]:
    return last(estimated(SPREAD, Grpo(adv_estimator="reinforce_plus_plus"))), last(
        openrlhf_estimate(SPREAD, "reinforce")[0]
    )


@measures("O3")
def k1_of_openrlhf() -> tuple[float, float]:
    log_probs, reference = d(-15.0), d(0.0)
    return float(IMPL.kl_estimate(log_probs, reference, "kl")), float(
        openrlhf().utils.compute_approx_kl(log_probs, reference)
    )


@measures("O4")
def kl_in_float32_of_openrlhf() -> tuple[float, float]:
    log_probs, reference = d(-0.1), d(0.0)
    return float(IMPL.kl_estimate(log_probs, reference, "kl")), float(
        openrlhf().utils.compute_approx_kl(log_probs, reference)
    )


@measures("O5")
def penalty_after_the_baseline_in_openrlhf() -> tuple[float, float]:
    """A penalty of 1 in the first response, of 0 in the second: the second one's advantage."""
    case = case_of([1, 1], rewards=[0.0, 1.0], reference=[d(-1.0), d(0.0)])
    return last(estimated(case, Grpo(adv_estimator="rloo", kl_coef=1.0))), last(
        openrlhf_estimate(case, "rloo", kl_coef=1.0)[0]
    )


@measures("O6")
def reward_clip_of_openrlhf() -> tuple[float, float]:
    case = case_of([1, 1], rewards=[0.0, 30.0])
    return last(estimated(case, Grpo(adv_estimator="rloo"))), last(
        openrlhf_estimate(case, "rloo", clip=(-10.0, 10.0))[0]
    )


@measures("O7")
def values_between_responses_in_openrlhf() -> tuple[float, float]:
    """The advantage of the first of two tokens with another's, which is not the response's, between them; lam 0."""
    values, mask = d(0.0, 5.0, 1.0)[None], torch.tensor([[1, 0, 1]])
    case = case_of([2], old_values=[d(0.0, 1.0)])
    returns = IMPL.estimate(responses(case), Ppo(lam=0.0))[1]
    assert returns is not None
    raw = returns[0] - case.old_values[0]
    theirs, _ = openrlhf().maker.get_advantages_and_returns(None, values, torch.zeros_like(values), mask, 1.0, 0.0)
    return float(raw[0]), float(theirs[0, 0])


@measures("O8")
def gspo_with_dual_clip_in_openrlhf() -> tuple[float, float]:
    case, objective = one_token(2.0, -1.0), replace(SEQUENCES, clip_ratio_c=3.0)
    return float(loss_of(case, objective)), float(openrlhf_policy(case, case.new, objective))


@measures("O9")
def importance_weights_of_openrlhf() -> tuple[float, float]:
    """Weights are at least 0.5 by default, also where they are clipped and not masked: the loss of one token."""
    case = case_of([1], sampled=[d(math.log(10))], advantages=[d(-1.0)])
    ours = IMPL.importance_weights(case.old[0], case.sampled[0], threshold=5.0)
    return float(loss_of(case, FREE) * ours), float(openrlhf_policy(case, case.new, FREE, threshold=5.0, lowest=0.5))


@measures("O10")
def gspo_bound_of_openrlhf() -> tuple[float, float]:
    case = one_token(11.0, -1.0)
    return float(loss_of(case, SEQUENCES)), float(openrlhf_policy(case, case.new, SEQUENCES))


@measures("O11")
def entropy_of_openrlhf() -> tuple[float, float]:
    """An entropy of 1 in a response of one token, of 0 in one of three."""
    case = case_of([1, 3])
    entropy = [d(1.0), d(0.0, 0.0, 0.0)]
    objective = replace(FREE, entropy_coeff=1.0, loss_agg_mode="seq-mean-token-mean")
    theirs = openrlhf_actor_loss(case, case.new, entropy, objective, estimator="k3")
    return float(-total(entropy, weights_of(IMPL, case.lengths, "seq-mean-token-mean"))), float(theirs)


@measures("O12")
def count_epsilon_of_openrlhf() -> tuple[float, float]:
    one = torch.ones(1, 1, dtype=torch.float64)
    theirs = openrlhf().loss.aggregate_loss(one, one, token_level_loss=False, global_batch_size=1.0)
    return float(weights_of(IMPL, [1], "seq-mean-token-mean")[0]), float(theirs)


@pytest.mark.parametrize("line", MEASUREMENTS)
def test_the_table_has_what_is_measured(line: str) -> None:
    ours, theirs = MEASUREMENTS[line]()
    assert ours != theirs
    assert rows()[line] == [f"{ours:.9g}", f"{theirs:.9g}"]


def test_every_line_of_the_table_is_measured() -> None:
    assert set(rows()) == set(MEASUREMENTS)


def test_the_defaults_are_those_of_the_sources() -> None:
    """Each ``name`` = value in the table of options, against the class of a config or the parser that sets it."""
    text = TABLE.read_text(encoding="utf-8").partition("| no. |")[0]
    found = [re.findall(r"`([\w.]+)` = (\S+)", cell) for line in text.splitlines() for cell in line.split("|")[2:5]]
    assert sum(map(len, found)) > 30
    for index, cells in enumerate(found):
        for name, value in cells:
            assert defaults(("verl", "trl", "openrlhf")[index % 3])[name] == ast.literal_eval(value), name


@cache
def defaults(library: str) -> dict[str, Any]:
    """By the name of an option; of verl the actor's, the critic's and the algorithm's."""
    files = {
        "verl": ["workers/config/actor.py", "workers/config/critic.py", "trainer/config/algorithm.py"],
        "trl": ["trainer/rloo_config.py", "trainer/grpo_config.py"],
        "openrlhf": ["cli/train_ppo_ray.py"],
    }
    values: dict[str, Any] = {}
    for file in files[library]:
        for node in ast.walk(ast.parse((root(library) / library / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                named = {each.arg: each.value for each in getattr(node.value, "keywords", [])}
                name, value = node.target.id, named.get("default", node.value)
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                named = {each.arg: each.value for each in node.keywords}
                name, value = ast.unparse(node.args[0]).strip("'-"), named.get("default", node)
            else:
                continue
            with suppress(ValueError):  # what is computed
                values[name] = ast.literal_eval(value)
    return values
