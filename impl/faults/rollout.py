"""Plants faults in the rollout pass, before the first update: log-probs, rewards, groups, advantages and returns."""

import dataclasses
from collections import Counter
from typing import Any

import torch

from conformance.backends.faults import Fault, Function
from conformance.spec.batch import Batch
from conformance.spec.observables import POLICY, REFERENCE
from impl.engine.trainer import rollout_columns
from impl.faults.cells import FULL, rl


def _temperature_not_in_looks(output_rows: Function) -> Function:
    def faulty(context: Any, trainable: Any, batch: Any, want: Any, temperature: float, *routing: Any) -> Any:
        return output_rows(context, trainable, batch, want, 1.0, *routing)

    return faulty


def _policy_as_reference(rollout_columns: Function) -> Function:
    def faulty(context: Any, models: Any, objective: Any, batches: Any) -> Any:
        return rollout_columns(context, {**models, REFERENCE.name: models[POLICY.name]}, objective, batches)

    return faulty


def _old_of_every_update(annotated: Function) -> Function:
    rollout: list[Batch] = []

    def faulty(rollouts: Any, batch: Batch) -> Any:
        if batch.rollout:
            rollout[:] = batch.rollout
        else:
            rollouts.known = rollout_columns(rollouts.context, rollouts.models, rollouts.objective, rollout)
        return annotated(rollouts, batch)

    return faulty


def _groups_by_position(of_groups: Function) -> Function:
    def faulty(scores: torch.Tensor, groups: Any, function: Any) -> Any:
        (_, size), *_ = Counter(groups).most_common(1)
        return of_groups(scores, [place // size for place in range(len(groups))], function)

    return faulty


def _biased_deviation(group_deviation: Function) -> Function:
    def faulty(members: torch.Tensor) -> Any:
        return members.std(correction=0) if len(members) > 1 else group_deviation(members)

    return faulty


def _divided_by_deviation(divided: bool) -> Any:
    def wrap(group_advantages: Function) -> Function:
        def faulty(scores: torch.Tensor, groups: Any, *, by_std: bool) -> Any:
            return group_advantages(scores, groups, by_std=divided)

        return faulty

    return wrap


def _rloo_with_itself(rloo: Function) -> Function:
    def faulty(scores: torch.Tensor, groups: Any) -> torch.Tensor:
        sizes = Counter(groups)
        # The reward minus the mean over all n is (n - 1) / n times the reward minus the mean over the n - 1 others.
        shares = [(sizes[group] - 1) / sizes[group] if sizes[group] > 1 else 1.0 for group in groups]
        advantages: torch.Tensor = rloo(scores, groups)
        return advantages * torch.tensor(shares, dtype=scores.dtype)

    return faulty


def _reward_at_first_token(token_rewards: Function) -> Function:
    def faulty(response: Any, **options: Any) -> torch.Tensor:
        rewards: torch.Tensor = token_rewards(response, **options)
        if len(rewards):
            rewards[-1] -= response.reward
            rewards[0] += response.reward
        return rewards

    return faulty


def _penalty_added(kl_estimate: Function) -> Function:
    def faulty(*arguments: Any) -> Any:
        return -kl_estimate(*arguments)

    return faulty


def _values_off_by_one(outputs_of: Function) -> Function:
    def faulty(result: torch.Tensor, inputs: Any, **options: Any) -> Any:
        outputs = outputs_of(result, inputs, **options)
        return (
            outputs if outputs.values is None else dataclasses.replace(outputs, values=outputs.values.roll(1, dims=1))
        )

    return faulty


def _gae_across_documents(of_responses: Function) -> Function:
    def faulty(rewards: Any, values: Any, **options: Any) -> Any:
        (one,) = of_responses([torch.cat(list(rewards))], [torch.cat(list(values))], **options)
        lengths = [len(each) for each in rewards]
        parts = zip(one.advantages.split(lengths), one.returns.split(lengths), strict=True)
        return [dataclasses.replace(one, advantages=advantages, returns=returns) for advantages, returns in parts]

    return faulty


def _bootstrapped_end(next_values: Function) -> Function:
    def faulty(values: torch.Tensor) -> torch.Tensor:
        return torch.cat([next_values(values)[:-1], values[-1:]])

    return faulty


def _whitened_by_response(whiten: Function) -> Function:
    def faulty(parts: Any) -> list[torch.Tensor]:
        return [whiten([part])[0] if len(part) > 1 else part * 0 for part in parts]

    return faulty


ROLLOUT_FAULTS = (
    Fault(
        name="temperature-not-in-looks",
        summary="old log-probs are not at the temperature of sampling",
        source="https://github.com/OpenRLHF/OpenRLHF/pull/857",
        seam="output_rows",
        stage="old log-probs",
        cells=rl("grpo"),
        needs="a temperature other than 1 and old log-probs that are recomputed",
        wrap=_temperature_not_in_looks,
    ),
    Fault(
        name="policy-as-reference",
        summary="the policy is used as the reference, so the KL divergence starts at 0",
        source="https://github.com/pytorch/rl/issues/1920",
        seam="rollout_columns",
        stage="reference log-probs",
        cells=rl("grpo"),
        blind=("loss and norm",),
        needs="a reference that is not the policy",
        wrap=_policy_as_reference,
    ),
    Fault(
        name="old-of-every-update",
        summary="old log-probs are computed before every update, so the ratio is always 1 and nothing is clipped",
        source="https://github.com/tensorforce/tensorforce/issues/312",
        seam="annotated",
        stage="old log-probs",
        cells=rl("grpo"),
        blind=("loss", "loss and norm"),
        needs="old log-probs that are recomputed, and a second update of a rollout",
        wrap=_old_of_every_update,
    ),
    Fault(
        name="groups-by-position",
        summary="advantages are relative to neighboring responses instead of to responses to the same prompt",
        source="https://github.com/PrimeIntellect-ai/prime-rl/issues/600",
        seam="of_groups",
        stage="advantages",
        cells=rl("grpo-off-policy"),
        needs="groups whose responses are not in consecutive rows",
        wrap=_groups_by_position,
    ),
    Fault(
        name="biased-deviation",
        summary="the standard deviation of a group divides by n, as in numpy",
        source="https://numpy.org/doc/stable/reference/generated/numpy.std.html; verl, TRL, OpenRLHF divide by n - 1",
        seam="group_deviation",
        stage="advantages",
        cells=rl("grpo"),
        needs="grpo, divided by the standard deviation",
        wrap=_biased_deviation,
    ),
    Fault(
        name="deviation-left-out",
        summary="advantages of a group are not divided by its standard deviation",
        source="arXiv 2402.03300, section 4.1.2: rewards minus their mean, over their standard deviation",
        seam="group_advantages",
        stage="advantages",
        cells=rl("grpo"),
        needs="grpo, divided by the standard deviation",
        wrap=_divided_by_deviation(False),
    ),
    Fault(
        name="deviation-in-dr-grpo",
        summary="advantages of Dr. GRPO are divided by the standard deviation of the group",
        source="arXiv 2503.20783, section 3.2, on how the division weighs easy and hard questions",
        seam="group_advantages",
        stage="advantages",
        cells=rl("grpo-off-policy", only=FULL),
        needs="grpo, not divided by the standard deviation",
        wrap=_divided_by_deviation(True),
    ),
    Fault(
        name="rloo-with-itself",
        summary="the leave-one-out baseline includes the response itself",
        source="https://github.com/areal-project/AReaL/pull/354",
        seam="rloo",
        stage="advantages",
        cells=rl("gspo", only=FULL),
        needs="rloo",
        wrap=_rloo_with_itself,
    ),
    Fault(
        name="reward-at-first-token",
        summary="the reward of a response is given at its first token instead of at its last",
        source="https://github.com/openai/spinningup/issues/50",
        seam="token_rewards",
        stage="returns",
        cells=rl("ppo"),
        needs="a critic; group estimators use the sum of a response's rewards",
        wrap=_reward_at_first_token,
    ),
    Fault(
        name="penalty-added",
        summary="the KL penalty is added to the reward instead of subtracted",
        source="arXiv 1909.08593, section 2: R = r - beta log(policy / reference)",
        seam="kl_in_reward",
        stage="returns",
        cells=rl("ppo"),
        needs="kl_coef",
        wrap=_penalty_added,
    ),
    Fault(
        name="values-off-by-one",
        summary="values are taken one position before the one that predicts the token",
        source="https://github.com/huggingface/trl/issues/44",
        seam="outputs_of",
        stage="old values",
        cells=rl("ppo"),
        needs="a critic",
        wrap=_values_off_by_one,
    ),
    Fault(
        name="gae-across-documents",
        summary="the advantage of the last token of a response continues into the response that is packed behind it",
        source="https://github.com/RoboVerseOrg/RoboVerse/pull/814",
        seam="of_responses",
        stage="returns",
        cells=rl("ppo"),
        needs="a critic",
        wrap=_gae_across_documents,
    ),
    Fault(
        name="bootstrapped-end",
        summary="the last token is bootstrapped with its own value, as if the response continued",
        source="https://github.com/anthonytorlucci/rlevo/issues/342",
        seam="next_values",
        stage="returns",
        cells=rl("ppo"),
        needs="a critic",
        wrap=_bootstrapped_end,
    ),
    Fault(
        name="whitened-by-response",
        summary="advantages are whitened over each response instead of over the rollout",
        source="https://github.com/radixark/miles/pull/3229, where they are whitened over each slice of the batch",
        seam="whiten",
        stage="advantages",
        cells=rl("ppo"),
        needs="whitened advantages",
        wrap=_whitened_by_response,
    ),
)
