"""Experience: from prompts to the mini-batches of a roll-out. Responses are sampled, rewarded and dealt into rows.

Every rank samples the responses to a share of the prompts, and all ranks get all responses: what is computed of a whole
roll-out (impl/engine/rollout_pass.py) is computed alike on every rank, as in cells.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch.distributed as dist

from conformance.core.errors import UsageError
from conformance.spec.batch import Batch, Document, Row, with_rollouts
from conformance.spec.objectives import PolicyGradient
from conformance.spec.scenario import Scenario
from impl.checkpoints.training_state import DataPosition
from impl.interface.protocol import Context, Trainable
from impl.models.lora import added_up
from impl.train.config import RolloutConfig
from impl.train.data import Prompt, Reward, Work
from impl.train.generation import Response, RolloutEngine, seed_of


@dataclass
class RolloutSource:
    """Roll-outs one after the other, each with all of its updates. ``tokenizer`` reads responses for the reward.
    ``targets``: the layers of the policy that have adapters."""

    context: Context
    policy: Trainable
    scenario: Scenario
    config: RolloutConfig
    engine: RolloutEngine
    prompts: Sequence[Prompt]
    reward: Reward
    tokenizer: Any
    position: DataPosition
    targets: tuple[str, ...] = ()

    def next(self, step: int) -> Work:
        numbers, self.position = self.position.take(self.config.prompts)
        prompts = [self.prompts[number] for number in numbers]
        rollout = step // self.objective.steps_per_rollout
        self.load_engine()
        samples = range(self.config.n_samples_per_prompt)
        seeds = [[seed_of(self.scenario.seed, rollout, place, n) for n in samples] for place in range(len(prompts))]
        groups = sampled(self.context, self.engine, prompts, seeds, greedy=self.config.greedy)
        rewards = [
            [self.reward(text_of(response, self.tokenizer), prompt.answer) for response in group]
            for prompt, group in zip(prompts, groups, strict=True)
        ]
        documents = [
            document_of(prompt, response, group=number, reward=reward)
            for number, (prompt, group, of_group) in enumerate(zip(prompts, groups, rewards, strict=True))
            for response, reward in zip(group, of_group, strict=True)
        ]
        random.Random(f"{self.scenario.seed} {rollout}").shuffle(documents)  # a group lies in different rows and ranks
        return Work(batches=self._batches(step, documents), numbers=told_of(groups, rewards))

    def load_engine(self) -> None:
        """Give the engine the policy's weights of now; those of adapters added to their base. Collective."""
        weights, lora = self.policy.named_tensors("weight"), self.scenario.lora
        self.engine.load(added_up(weights, lora, self.targets) if lora else weights)

    @property
    def objective(self) -> PolicyGradient:
        assert isinstance(self.scenario.objective, PolicyGradient)
        return self.scenario.objective

    def _batches(self, step: int, documents: Sequence[Document]) -> list[Batch]:
        """The batch of every update of the roll-out; the first one has the mini-batches."""
        data, count = self.scenario.data, self.objective.mini_batches
        rows = dealt(documents, count * data.rows)
        batches = []
        for number in range(self.objective.steps_per_rollout):
            first = number % count * data.rows
            own = tuple(Row(i, row) for i, row in enumerate(rows[first : first + data.rows]))
            batches.append(Batch(step + number, data.max_len, own))
        return with_rollouts(batches, [count] + [0] * (len(batches) - 1))


def sampled(
    context: Context,
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    seeds: Sequence[Sequence[int]],
    *,
    greedy: bool,
) -> list[list[Response]]:
    """The responses to each prompt, of which every rank has sampled a share; collective."""
    own = range(dist.get_rank(), len(prompts), dist.get_world_size())
    found = engine.generate([prompts[n].tokens for n in own], [seeds[n] for n in own], greedy=greedy)
    of_all: dict[int, list[Response]] = {}
    for part in context.all_gather(dict(zip(own, found, strict=True))):
        of_all |= part
    return [of_all[number] for number in range(len(prompts))]


def text_of(response: Response, tokenizer: Any) -> str:
    text: str = tokenizer.decode(response.tokens, skip_special_tokens=True)
    return text


def document_of(prompt: Prompt, response: Response, *, group: int, reward: float) -> Document:
    """A prompt with its response, in the columns that conformance/data/rollouts.py reads from files."""
    before, after = len(prompt.tokens), len(response.tokens)
    return Document(
        (*prompt.tokens, *response.tokens),
        (False,) * before + (True,) * after,
        {"group": float(group), "reward": reward, "rollout_logprob": (0.0,) * before + response.logprobs},
    )


def dealt(documents: Sequence[Document], rows: int) -> list[tuple[Document, ...]]:
    """``rows`` rows: where there are as many documents, one each; else the longest first, dealt out in turn."""
    if len(documents) == rows:
        return [(document,) for document in documents]
    ordered = sorted(documents, key=lambda document: -len(document.tokens))
    return [tuple(ordered[row::rows]) for row in range(rows)]


def told_of(groups: Sequence[Sequence[Response]], rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """Numbers of a roll-out for the log."""
    responses = [response for group in groups for response in group]
    flat = [reward for group in rewards for reward in group]
    return {
        "reward_mean": fmean(flat),
        "reward_std": pstdev(flat),
        "response_length": fmean(len(response.tokens) for response in responses),
        "response_cut": fmean(not response.ended for response in responses),
    }


def check_rollout(scenario: Scenario, config: RolloutConfig, prompts: Sequence[Prompt]) -> None:
    """Raises UsageError where the responses of a roll-out do not fill the rows of its updates."""
    objective, data = scenario.objective, scenario.data
    assert isinstance(objective, PolicyGradient)
    if scenario.steps % objective.steps_per_rollout:
        raise UsageError(
            f"{scenario.steps} updates are no whole number of roll-outs, each of which has mini_batches x ppo_epochs = "
            f"{objective.steps_per_rollout}; use a multiple of it"
        )
    if config.greedy and config.n_samples_per_prompt > 1:
        raise UsageError("greedy responses to one prompt are all the same; use n_samples_per_prompt=1, or sample")
    responses, rows = config.prompts * config.n_samples_per_prompt, objective.mini_batches * data.rows
    if responses != rows and not (data.packed and responses >= rows):
        raise UsageError(
            f"{config.prompts} prompts x {config.n_samples_per_prompt} samples = {responses} responses do not fill "
            f"{objective.mini_batches} mini-batches of {data.rows} rows = {rows}; let the numbers be equal"
            + (", or have more responses than rows" if data.packed else "")
        )
    each, longest = -(-responses // rows), max(len(prompt.tokens) for prompt in prompts) + config.max_new_tokens
    if each * longest > data.max_len:
        raise UsageError(
            f"a row of {each} prompts and responses has up to {each} x {longest} tokens, and data.max_len is "
            f"{data.max_len}; use data.max_len={each * longest}, or more rows"
        )


def check_goes_on(scenario: Scenario, config: RolloutConfig, *, step: int, position: DataPosition) -> None:
    """Raises UsageError where a training of ``step`` updates, at ``position`` in the prompts, had other roll-outs.

    A roll-out's number, from which its responses follow, is counted by updates: with other ones it would come again.
    """
    objective = scenario.objective
    assert isinstance(objective, PolicyGradient)
    rollouts, within = divmod(step, objective.steps_per_rollout)
    if within or position.consumed != rollouts * config.prompts:
        raise UsageError(
            f"the checkpoint has {step} updates on {position.consumed} prompts, and this training makes "
            f"{objective.steps_per_rollout} of each roll-out of {config.prompts}; go on with the prompts and samples "
            f"of a roll-out, the rows of a step and the ppo_epochs that it was begun with"
        )


def logprob_gap(context: Context, batch: Batch, logprobs: Mapping[int, Any]) -> dict[str, float]:
    """How far the engine's log-probs are from the policy's before an update, over all response tokens of ``batch``.

    ``logprobs[row.index]``: (targets of the row,), of the rows that this rank has. Mean and largest |difference|, and
    the mean of exp(policy - engine), which is 1 where both are the same policy.
    """
    sums = {"logprob_gap_mean": 0.0, "logprob_gap_exp": 0.0}
    count, differences = 0, [0.0]
    for row in batch.rows:
        if row.index not in logprobs:
            continue
        sampled = logprobs[row.index].new_tensor(rollout_logprobs(row))
        difference = logprobs[row.index] - sampled
        sums["logprob_gap_mean"] += difference.abs().sum().item()
        sums["logprob_gap_exp"] += difference.exp().sum().item()
        differences.append(difference.abs().max().item())
        count += len(sampled)
    total = context.all_reduce(count)
    means = {key: context.all_reduce(value) / total for key, value in sums.items()}
    return means | {"logprob_gap_max": largest(context.all_gather(largest(differences)))}


def largest(values: Sequence[float]) -> float:
    """The largest of some numbers; NaN if one of them is NaN, which Python's ``max`` loses behind another number."""
    return float(np.max(values))


def rollout_logprobs(row: Row) -> list[float]:
    found: list[float] = []
    for document in row.documents:
        column: Any = document.columns["rollout_logprob"]
        found += [number for number, target in zip(column, document.targets, strict=True) if target]
    return found
