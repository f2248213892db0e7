"""Samples and rewards responses to prompts, and deals them into the mini-batches of a rollout.

Every rank samples the responses to a share of the prompts, and all ranks get all responses. The columns of a rollout
(impl/engine/trainer.py) are then computed in the same way on every rank, as in cells.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from conformance.core.errors import UsageError
from conformance.spec.batch import Batch, Document, Row, with_rollouts
from conformance.spec.objectives import PolicyGradient
from conformance.spec.scenario import Scenario
from impl.checkpoints.training_state import DataPosition
from impl.interface.distributed import on_first
from impl.interface.trainable import Context, Trainable
from impl.models.lora import merged_weights
from impl.train.config import RolloutConfig
from impl.train.generation import Response, RolloutEngine, seed_of, share_of
from impl.train.rewards import FunctionReward, Reward
from impl.train.text_pipeline import Prompt, Work

LOGPROB_GAP, IMPORTANCE = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"  # as in TRL

SUMS = (  # of the comparison of the engine with the policy, in an order that all ranks have
    *("gap", "ratio", "kl", "k3", "apart", "square", "p", "q", "pp", "qq", "pq"),
    *("tokens", "responses", "by_response"),
)


@dataclass
class RolloutSource:
    """Makes rollouts one after the other, each with all of its updates.

    tokenizer: decodes responses for the reward.
    targets: the layers of the policy that have adapters.
    """

    context: Context
    policy: Trainable
    scenario: Scenario
    config: RolloutConfig
    engine: RolloutEngine
    prompts: Sequence[Prompt]
    reward: Reward | FunctionReward
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
        groups = sample_responses(self.context, self.engine, prompts, seeds, greedy=self.config.greedy)
        rewards = score(self.reward, prompts, texts_of(groups, self.tokenizer))
        documents = [
            document_of(prompt, response, group=number, reward=reward)
            for number, (prompt, group, group_rewards) in enumerate(zip(prompts, groups, rewards, strict=True))
            for response, reward in zip(group, group_rewards, strict=True)
        ]
        random.Random(f"{self.scenario.seed} {rollout}").shuffle(documents)  # spreads a group over rows and ranks
        logged = rollout_numbers(groups, rewards, kl_coef=self.objective.kl_coef)
        return Work(batches=self._batches(step, documents), numbers=logged)

    def load_engine(self) -> None:
        """Gives the engine the policy's current weights, with adapters merged into their base. Collective."""
        weights, lora = self.policy.named_tensors("weight"), self.scenario.lora
        self.engine.load(merged_weights(weights, lora, self.targets) if lora else weights)

    @property
    def objective(self) -> PolicyGradient:
        assert isinstance(self.scenario.objective, PolicyGradient)
        return self.scenario.objective

    def _batches(self, step: int, documents: Sequence[Document]) -> list[Batch]:
        """Returns the batch of every update of the rollout; the first batch has the mini-batches."""
        data, count = self.scenario.data, self.objective.mini_batches
        rows = deal(documents, count * data.rows)
        batches = []
        for number in range(self.objective.steps_per_rollout):
            first = number % count * data.rows
            own = tuple(Row(i, row) for i, row in enumerate(rows[first : first + data.rows]))
            batches.append(Batch(step + number, data.max_len, own))
        return with_rollouts(batches, [count] + [0] * (len(batches) - 1))


def sample_responses(
    context: Context,
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    seeds: Sequence[Sequence[int]],
    *,
    greedy: bool,
) -> list[list[Response]]:
    """Returns the responses to each prompt; every rank samples a share. Collective."""
    tokens = [prompt.tokens for prompt in prompts]
    own = share_of(tokens, engine.sampling.prompts, rank=dist.get_rank(), ranks=dist.get_world_size())
    found = engine.generate([tokens[n] for n in own], [seeds[n] for n in own], greedy=greedy)
    responses: dict[int, list[Response]] = {}
    for part in context.all_gather(dict(zip(own, found, strict=True))):
        responses |= part
    return [responses[number] for number in range(len(prompts))]


def texts_of(groups: Sequence[Sequence[Response]], tokenizer: Any) -> list[list[str]]:
    return [[tokenizer.decode(one.tokens, skip_special_tokens=True) for one in group] for group in groups]


def score(
    reward: Reward | FunctionReward, prompts: Sequence[Prompt], groups: Sequence[Sequence[str]]
) -> list[list[float]]:
    """Returns the rewards of the responses to each prompt. Collective: the first rank computes them."""
    pairs = [(prompt, text) for prompt, group in zip(prompts, groups, strict=True) for text in group]
    if isinstance(reward, FunctionReward):
        arguments = function_arguments(pairs)
        flat = iter(on_first(f"computing the reward {reward.name}", lambda: reward(*arguments)))
    else:
        one = reward.score
        flat = iter(on_first("computing rewards", lambda: [one(text, prompt.answer) for prompt, text in pairs]))
    return [[next(flat) for _ in group] for group in groups]


def function_arguments(pairs: Sequence[tuple[Prompt, str]]) -> tuple[list[Any], list[Any], dict[str, list[Any]]]:
    """Returns prompts, completions and columns as TRL gives them to a function."""
    samples = [prompt.sample for prompt, _ in pairs]
    prompts = [one.prompt[-1]["content"] if one.is_pair else [*one.prompt] for one in samples]
    completions = [
        text if one.is_pair else [{"role": "assistant", "content": text}]
        for one, (_, text) in zip(samples, pairs, strict=True)
    ]
    names = {name for one in samples for name in one.record} - {"prompt", "prompts", "completion", "completions"}
    columns = {name: [one.record.get(name) for one in samples] for name in sorted(names)}
    return prompts, completions, columns | {"reference": [one.answer for one in samples]}


def document_of(prompt: Prompt, response: Response, *, group: int, reward: float) -> Document:
    """Joins a prompt and its response, in the columns that conformance/data/rollouts.py reads from files."""
    before, after = len(prompt.tokens), len(response.tokens)
    return Document(
        (*prompt.tokens, *response.tokens),
        (False,) * before + (True,) * after,
        {"group": float(group), "reward": reward, "rollout_logprob": (0.0,) * before + response.logprobs},
    )


def deal(documents: Sequence[Document], rows: int) -> list[tuple[Document, ...]]:
    """Makes ``rows`` rows of one document each, or deals more documents out in turn, longest first."""
    if len(documents) == rows:
        return [(document,) for document in documents]
    ordered = sorted(documents, key=lambda document: -len(document.tokens))
    return [tuple(ordered[row::rows]) for row in range(rows)]


def rollout_numbers(
    groups: Sequence[Sequence[Response]], rewards: Sequence[Sequence[float]], *, kl_coef: float
) -> dict[str, float]:
    """Returns the numbers of a rollout for the log. Without ``kl_coef``, verl's rewards are its scores."""
    scores = [reward for group in rewards for reward in group]
    lengths = [float(len(response.tokens)) for group in groups for response in group]
    columns = {"critic/score": scores, "response_length": lengths} | ({} if kl_coef else {"critic/rewards": scores})
    functions: dict[str, Callable[[list[float]], float]] = {"mean": fmean, "max": max, "min": min}
    numbers = {f"{name}/{kind}": f(own) for name, own in columns.items() for kind, f in functions.items()}
    cut = fmean(not response.ended for group in groups for response in group)
    return numbers | {"critic/score/std": pstdev(scores), "completions/clipped_ratio": cut}


def check_rollout(scenario: Scenario, config: RolloutConfig, prompts: Sequence[Prompt]) -> None:
    """Raises UsageError if the responses of a rollout do not fill the rows of its updates."""
    objective, data = scenario.objective, scenario.data
    assert isinstance(objective, PolicyGradient)
    if scenario.steps % objective.steps_per_rollout:
        raise UsageError(
            f"{scenario.steps} updates are not a whole number of rollouts; a rollout has mini_batches x ppo_epochs = "
            f"{objective.steps_per_rollout} updates; use a multiple of it"
        )
    if config.greedy and config.n_samples_per_prompt > 1:
        raise UsageError("greedy responses to one prompt are all the same; use n_samples_per_prompt=1, or sample")
    responses, rows = config.prompts * config.n_samples_per_prompt, objective.mini_batches * data.rows
    if responses != rows and not (data.packed and responses >= rows):
        raise UsageError(
            f"{config.prompts} prompts x {config.n_samples_per_prompt} samples = {responses} responses do not fill "
            f"{objective.mini_batches} mini-batches of {data.rows} rows = {rows}; make both numbers equal"
            + (", or use more responses than rows" if data.packed else "")
        )
    each, longest = -(-responses // rows), max(len(prompt.tokens) for prompt in prompts) + config.max_new_tokens
    if each * longest > data.max_len:
        raise UsageError(
            f"a row of {each} prompts and responses has up to {each} x {longest} tokens, but data.max_len is "
            f"{data.max_len}; use data.max_len={each * longest}, or more rows"
        )


def check_resumes(scenario: Scenario, config: RolloutConfig, *, step: int, position: DataPosition) -> None:
    """Raises UsageError if a training with ``step`` updates, at ``position`` in the prompts, had other rollouts.

    Responses follow from the number of their rollout, which is counted by updates; with other rollouts a number would
    be used twice.
    """
    objective = scenario.objective
    assert isinstance(objective, PolicyGradient)
    rollouts, within = divmod(step, objective.steps_per_rollout)
    if within or position.consumed != rollouts * config.prompts:
        raise UsageError(
            f"the checkpoint has {step} updates on {position.consumed} prompts, but this training makes "
            f"{objective.steps_per_rollout} per rollout of {config.prompts}; resume with the initial prompts and "
            f"samples of a rollout, rows of a step and ppo_epochs"
        )


def logprob_gap(context: Context, batch: Batch, logprobs: Mapping[int, Any]) -> dict[str, float]:
    """Compares the engine's log-probs with the policy's before an update, over all response tokens of ``batch``.

    ``logprobs[row.index]``: (targets of the row,), for the rows of this rank. The names are those of TRL, verl
    (``training/``, ``rollout_corr/``) and slime (``train/``); slime's is a mean over responses. A ratio is
    policy / engine.
    """
    sums: dict[str, float] = defaultdict(float)
    largest_gap, largest_of_probs = [0.0], [0.0]
    for row in batch.rows:
        if row.index not in logprobs:
            continue
        policy = logprobs[row.index].double()
        engine = policy.new_tensor(rollout_logprobs(row))
        log_ratio, p, q = policy - engine, policy.exp(), engine.exp()
        gap, ratio, apart = log_ratio.abs(), log_ratio.exp(), (p - q).abs()
        terms = {"gap": gap, "ratio": ratio, "kl": -log_ratio, "k3": ratio - log_ratio - 1, "apart": apart}
        terms |= {"square": apart**2, "p": p, "q": q, "pp": p * p, "qq": q * q, "pq": p * q}
        of_responses = [part.mean() for part in gap.split([sum(d.targets) for d in row.documents]) if len(part)]
        terms |= {"tokens": torch.ones(len(gap)), "responses": torch.ones(len(of_responses))}
        terms["by_response"] = torch.stack(of_responses)
        for name, term in terms.items():
            sums[name] += term.sum().item()
        largest_gap.append(gap.max().item())
        largest_of_probs.append(apart.max().item())
    total = {name: context.all_reduce(sums[name]) for name in SUMS}
    count = total["tokens"]
    mean = {name: value / count for name, value in total.items()}
    spread = [math.sqrt(max(0.0, mean[x + x] - mean[x] ** 2)) for x in "pq"]
    return {
        f"{LOGPROB_GAP}/mean": mean["gap"],
        f"{LOGPROB_GAP}/max": largest(context.all_gather(largest(largest_gap))),
        f"{IMPORTANCE}/mean": mean["ratio"],
        "training/rollout_probs_diff_mean": mean["apart"],
        "training/rollout_probs_diff_max": largest(context.all_gather(largest(largest_of_probs))),
        "training/rollout_probs_diff_std": math.sqrt(
            max(0.0, total["square"] - count * mean["apart"] ** 2) / max(1.0, count - 1)
        ),
        "training/rollout_actor_probs_pearson_corr": (mean["pq"] - mean["p"] * mean["q"])
        / (spread[0] * spread[1] or math.nan),
        "rollout_corr/kl": mean["kl"],
        "rollout_corr/k3_kl": mean["k3"],
        "train/train_rollout_logprob_abs_diff": total["by_response"] / total["responses"],
    }


def largest(values: Sequence[float]) -> float:
    """Returns the largest number; NaN if one of them is NaN, which Python's ``max`` loses behind another number."""
    return float(np.max(values))


def rollout_logprobs(row: Row) -> list[float]:
    found: list[float] = []
    for document in row.documents:
        column: Any = document.columns["rollout_logprob"]
        found += [number for number, target in zip(column, document.targets, strict=True) if target]
    return found
