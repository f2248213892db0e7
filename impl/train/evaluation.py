"""Evaluation on held-out data, without an update: the loss of documents, or the reward of the likeliest responses."""

from collections.abc import Sequence
from statistics import fmean

from conformance.batch import Batch, Document, Row
from conformance.scenario import DataConfig
from impl.rollouts import look
from impl.strategy import Context, Trainable
from impl.train.experience import RolloutSource, sampled, text_of
from impl.train.prompts import Prompt
from impl.train.rewards import Reward
from impl.train.source import fits


def held_out_batches(documents: Sequence[Document], data: DataConfig) -> list[Batch]:
    """Each document once and in order, in batches of ``data.rows`` rows; what fills up the last one has no targets."""
    rows: list[list[Document]] = []
    for document in documents:
        if rows and fits(rows[-1], document, data):
            rows[-1].append(document)
        else:
            rows.append([document])
    shortest = min(documents, key=lambda document: len(document.tokens))
    filling = Document(shortest.tokens, (False,) * len(shortest.tokens))
    rows += [[filling]] * (-len(rows) % data.rows)
    cut = [rows[start : start + data.rows] for start in range(0, len(rows), data.rows)]
    return [Batch(n, data.max_len, tuple(Row(i, tuple(row)) for i, row in enumerate(own))) for n, own in enumerate(cut)]


def held_out_loss(context: Context, policy: Trainable, batches: Sequence[Batch]) -> dict[str, float]:
    """The mean of -log p over all targets, by forward passes without dropout; collective."""
    total, count = 0.0, 0
    for batch in batches:
        rows = look(context, policy, batch, frozenset({"logprobs"}), 1.0).rows
        total -= sum(logprobs.sum().item() for logprobs in rows.values())
        count += batch.target_count
    return {"eval_loss": context.all_reduce(total) / count}


def held_out_reward(source: RolloutSource, prompts: Sequence[Prompt], reward: Reward) -> dict[str, float]:
    """The mean ``reward`` of the likeliest response to each prompt; collective."""
    source.load_engine()
    groups = sampled(source.context, source.engine, prompts, [[0]] * len(prompts), greedy=True)
    rewards = [
        reward(text_of(response, source.tokenizer), prompt.answer)
        for prompt, (response,) in zip(prompts, groups, strict=True)
    ]
    return {"eval_reward": fmean(rewards)}
