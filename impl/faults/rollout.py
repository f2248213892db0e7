"""Plants faults in the rollout pass, before the first update: log-probs, rewards, groups, advantages and returns."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from conformance.backends.faults import Function
from conformance.spec.batch import Batch
from conformance.spec.observables import POLICY, REFERENCE
from impl.engine.trainer import rollout_columns
from impl.faults.declaration import FULL, Faults, rl
from impl.objectives import advantages as estimators

ROLLOUT_FAULTS = Faults()


@ROLLOUT_FAULTS.add(
    summary="old log-probs are not at the temperature of sampling",
    source="https://github.com/OpenRLHF/OpenRLHF/pull/857",
    stage="old log-probs",
    cells=rl("grpo"),
    needs="a temperature other than 1 and old log-probs that are recomputed",
)
def temperature_not_in_looks(
    output_rows: Function, context: Any, trainable: Any, batch: Any, want: Any, temperature: float, *routing: Any
) -> Any:
    return output_rows(context, trainable, batch, want, 1.0, *routing)


@ROLLOUT_FAULTS.add(
    summary="the policy is used as the reference, so the KL divergence starts at 0",
    source="https://github.com/pytorch/rl/issues/1920",
    stage="reference log-probs",
    cells=rl("grpo"),
    blind=("loss and norm",),
    needs="a reference that is not the policy",
)
def policy_as_reference(rollout_columns: Function, context: Any, models: Any, objective: Any, batches: Any) -> Any:
    return rollout_columns(context, {**models, REFERENCE.name: models[POLICY.name]}, objective, batches)


@ROLLOUT_FAULTS.add(
    summary="advantages are relative to neighboring responses instead of to responses to the same prompt",
    source="https://github.com/PrimeIntellect-ai/prime-rl/issues/600",
    stage="advantages",
    cells=rl("grpo-off-policy"),
    needs="groups whose responses are not in consecutive rows",
)
def groups_by_position(of_groups: Function, scores: Tensor, groups: Any, function: Any) -> Any:
    (_, size), *_ = Counter(groups).most_common(1)
    return of_groups(scores, [place // size for place in range(len(groups))], function)


@ROLLOUT_FAULTS.add(
    summary="the standard deviation of a group divides by n, as in numpy",
    source="https://numpy.org/doc/stable/reference/generated/numpy.std.html; verl, TRL, OpenRLHF divide by n - 1",
    stage="advantages",
    cells=rl("grpo"),
    needs="grpo, divided by the standard deviation",
)
def biased_deviation(group_deviation: Function, members: Tensor) -> Any:
    return members.std(correction=0) if len(members) > 1 else group_deviation(members)


@ROLLOUT_FAULTS.add(
    summary="the leave-one-out baseline includes the response itself",
    source="https://github.com/areal-project/AReaL/pull/354",
    stage="advantages",
    cells=rl("gspo", only=FULL),
    needs="rloo",
)
def rloo_with_itself(rloo: Function, scores: Tensor, groups: Any) -> Tensor:
    sizes = Counter(groups)
    # The reward minus the mean over all n is (n - 1) / n times the reward minus the mean over the n - 1 others.
    shares = [(sizes[group] - 1) / sizes[group] if sizes[group] > 1 else 1.0 for group in groups]
    advantages: Tensor = rloo(scores, groups)
    return advantages * torch.tensor(shares, dtype=scores.dtype)


@ROLLOUT_FAULTS.add(
    summary="the reward of a response is given at its first token instead of at its last",
    source="https://github.com/openai/spinningup/issues/50",
    stage="returns",
    cells=rl("ppo"),
    needs="a critic; group estimators use the sum of a response's rewards",
)
def reward_at_first_token(token_rewards: Function, response: Any, **options: Any) -> Tensor:
    rewards: Tensor = token_rewards(response, **options)
    if len(rewards):
        rewards[-1] -= response.reward
        rewards[0] += response.reward
    return rewards


@ROLLOUT_FAULTS.add(
    summary="the KL penalty is added to the reward instead of subtracted",
    source="arXiv 1909.08593, section 2: R = r - beta log(policy / reference)",
    stage="returns",
    cells=rl("ppo"),
    needs="kl_coef",
)
def penalty_added(kl_in_reward: Function, *arguments: Any) -> Any:
    return -kl_in_reward(*arguments)


@ROLLOUT_FAULTS.add(
    summary="values are taken one position before the one that predicts the token",
    source="https://github.com/huggingface/trl/issues/44",
    stage="old values",
    cells=rl("ppo"),
    needs="a critic",
)
def values_off_by_one(outputs_of: Function, result: Tensor, inputs: Any, **options: Any) -> Any:
    outputs = outputs_of(result, inputs, **options)
    return outputs if outputs.values is None else dataclasses.replace(outputs, values=outputs.values.roll(1, dims=1))


@ROLLOUT_FAULTS.add(
    summary="the advantage of the last token of a response continues into the response that is packed behind it",
    source="https://github.com/RoboVerseOrg/RoboVerse/pull/814",
    stage="returns",
    cells=rl("ppo"),
    needs="a critic",
)
def gae_across_documents(of_responses: Function, *numbers: Any, **options: Any) -> Any:
    """numbers: rewards, values and gaps, by response."""
    rewards, *_ = numbers
    (one,) = of_responses(*([torch.cat(list(each))] for each in numbers), **options)
    lengths = [len(each) for each in rewards]
    parts = zip(one.advantages.split(lengths), one.returns.split(lengths), strict=True)
    return [dataclasses.replace(one, advantages=advantages, returns=returns) for advantages, returns in parts]


@ROLLOUT_FAULTS.add(
    summary="the last token is bootstrapped with its own value, as if the response continued",
    source="https://github.com/anthonytorlucci/rlevo/issues/342",
    stage="returns",
    cells=rl("ppo"),
    needs="a critic",
)
def bootstrapped_end(next_values: Function, values: Tensor) -> Tensor:
    return torch.cat([next_values(values)[:-1], values[-1:]])


@ROLLOUT_FAULTS.add(
    summary="advantages are whitened over each response instead of over the rollout",
    source="https://github.com/radixark/miles/pull/3229, where they are whitened over each slice of the batch",
    stage="advantages",
    cells=rl("ppo"),
    needs="whitened advantages",
)
def whitened_by_response(whiten: Function, parts: Any) -> list[Tensor]:
    return [whiten([part])[0] if len(part) > 1 else part * 0 for part in parts]


@ROLLOUT_FAULTS.add(
    summary="a return starts anew at an observation, so no reward reaches the turns before it",
    source="https://github.com/verl-project/verl/issues/7278",
    stage="returns",
    cells=rl("ppo-turns", half="ppo-turns-half"),
    needs="a response of several turns, and a critic or reinforce_plus_plus",
)
def return_reset_at_observation(estimate: Function, responses: Any, objective: Any) -> Any:
    turns = [turn for response in responses for turn in _turns(response)]
    found, merged = iter(estimate(turns, objective)), []
    for response in responses:
        parts = [next(found) for _ in _turns(response)]
        merged.append(
            dataclasses.replace(
                parts[0],
                advantages=torch.cat([part.advantages for part in parts]),
                returns=torch.cat([part.returns for part in parts]),
            )
        )
    return merged


def _turns(response: Any) -> list[Any]:
    """Splits a response where tokens that are not trained on stand between two that are."""
    ends = [place + 1 for place, gap in enumerate(response.gaps.tolist()) if gap > 1]
    bounds = [0, *ends, len(response.old_logprobs)]
    parts = []
    for start, end in itertools.pairwise(bounds):
        numbers = {
            name: None if getattr(response, name) is None else getattr(response, name)[start:end]
            for name in ("old_logprobs", "reference_logprobs", "values", "given", "gaps")
        }
        is_last = end == bounds[-1]
        parts.append(dataclasses.replace(response, **numbers, reward=response.reward if is_last else 0.0))
    return parts


@ROLLOUT_FAULTS.add(
    summary="advantages are whitened over the answers of tools, too, which have the advantage 0",
    source="https://github.com/radixark/miles/pull/1827, on tokens that the policy has not written",
    stage="advantages",
    cells=rl("ppo-turns", half="ppo-turns-half"),
    needs="whitened advantages, and a response of several turns",
)
def whitened_over_all_tokens(estimate: Function, responses: Any, objective: Any) -> Any:
    others = int(sum((response.gaps - 1).sum() for response in responses))
    whiten = estimators.whiten

    def over_all(parts: Any) -> Any:
        return whiten([*parts, torch.zeros(others)])[:-1]

    with mock.patch.object(estimators, "whiten", over_all):
        return estimate(responses, objective)


@ROLLOUT_FAULTS.add(
    summary="the answers of tools are trained on as if the policy had written them",
    source="https://github.com/PrimeIntellect-ai/prime-rl/pull/978",
    stage="old log-probs",
    cells=rl("grpo-turns", half="grpo-turns-half"),
    needs="a response of several turns",
)
def observations_trained(annotated: Function, rollouts: Any, batch: Any) -> Any:
    return _with_targets(annotated(rollouts, batch), _filled)


@ROLLOUT_FAULTS.add(
    summary="the mask of a response is shifted by one token",
    source="https://github.com/NVIDIA-NeMo/Automodel/pull/3739, on masks that miss the generation prompt",
    stage="old log-probs",
    cells=rl("grpo-turns", half="grpo-turns-half"),
    needs="a response of several turns, or a prompt",
)
def response_mask_shifted(annotated: Function, rollouts: Any, batch: Any) -> Any:
    return _with_targets(annotated(rollouts, batch), lambda targets: (False, *targets[:-1]))


def _filled(targets: tuple[bool, ...]) -> tuple[bool, ...]:
    """Marks all tokens between the first and the last one that are marked."""
    places = [place for place, target in enumerate(targets) if target]
    return tuple(bool(places) and places[0] <= place <= places[-1] for place in range(len(targets)))


def _with_targets(batch: Batch, change: Callable[[tuple[bool, ...]], tuple[bool, ...]]) -> Batch:
    rows = []
    for row in batch.rows:
        documents = tuple(dataclasses.replace(one, targets=change(one.targets)) for one in row.documents)
        rows.append(dataclasses.replace(row, documents=documents))
    return dataclasses.replace(batch, rows=tuple(rows))


@ROLLOUT_FAULTS.add(
    summary="old log-probs are computed before every update, so the ratio is always 1 and nothing is clipped",
    source="https://github.com/tensorforce/tensorforce/issues/312",
    stage="old log-probs",
    half_stage="loss",
    cells=rl("grpo"),
    blind=("loss", "loss and norm"),
    needs="old log-probs that are recomputed, and a second update of a rollout",
)
def old_of_every_update(annotated: Function, rollouts: Any, batch: Batch) -> Any:
    if batch.rollout:
        rollouts.first_batches = batch.rollout
    else:
        rollouts.known = rollout_columns(
            rollouts.context, rollouts.models, rollouts.objective, list(rollouts.first_batches)
        )
    return annotated(rollouts, batch)


@ROLLOUT_FAULTS.add(
    summary="advantages of a group are not divided by its standard deviation",
    source="arXiv 2402.03300, section 4.1.2: rewards minus their mean, over their standard deviation",
    stage="advantages",
    cells=rl("grpo"),
    needs="grpo, divided by the standard deviation",
)
def deviation_left_out(group_advantages: Function, scores: Tensor, groups: Any, *, by_std: bool) -> Any:
    return group_advantages(scores, groups, by_std=False)


@ROLLOUT_FAULTS.add(
    summary="advantages of Dr. GRPO are divided by the standard deviation of the group",
    source="arXiv 2503.20783, section 3.2, on how the division weighs easy and hard questions",
    stage="advantages",
    cells=rl("grpo-off-policy", only=FULL),
    needs="grpo, not divided by the standard deviation",
)
def deviation_in_dr_grpo(group_advantages: Function, scores: Tensor, groups: Any, *, by_std: bool) -> Any:
    return group_advantages(scores, groups, by_std=True)
