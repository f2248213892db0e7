"""Plants faults in the denominators of losses, in masks, and in metrics that are reduced over ranks."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from conformance.backends.faults import Function
from conformance.spec.objectives import METRICS
from impl.faults.declaration import FULL, Faults, rl

MEANS_FAULTS = Faults()


@MEANS_FAULTS.add(
    summary="each micro-batch is divided by its own tokens and weighted by its share of the sequences",
    source="https://github.com/verl-project/verl/issues/5625",
    stage="loss",
    cells=rl("grpo"),
    needs="token-mean, several micro-batches and responses of different lengths",
)
def mean_of_micro_batch(
    evaluate: Function, functions: Any, model: str, outputs: Any, inputs: Any, *, totals: Any, others: Any
) -> Any:
    # The mean over the micro-batch's own tokens, times its share of the sequences.
    targets = inputs.targets
    begins = targets & ~torch.nn.functional.pad(targets, (1, 0))[:, :-1]
    tokens, sequences = targets.sum().item(), begins.sum().item()
    own = tokens * totals["sequence_count"] / sequences if sequences else totals["token_count"]
    return evaluate(functions, model, outputs, inputs, totals={**totals, "token_count": own}, others=others)


@MEANS_FAULTS.add(
    summary="the loss of a mini-batch has the denominator of the whole rollout",
    source="arXiv 1707.06347, algorithm 1: an update for each minibatch, of the surrogate's mean over it",
    stage="loss",
    cells=rl("grpo-off-policy"),
    needs="mini_batches of 2 or more",
)
def divided_by_mini_batches(loss_weights: Function, inputs: Any, objective: Any, totals: Any) -> Any:
    return loss_weights(inputs, objective, totals) / objective.mini_batches


@MEANS_FAULTS.add(
    summary="the sum over response tokens is divided by all tokens of the micro-batches, including masked ones",
    source="https://github.com/huggingface/trl/pull/6439",
    stage="loss",
    cells=rl("grpo"),
    needs="token-mean",
)
def padding_in_mean(step_totals: Function, context: Any, functions: Any, micro_batches: Any) -> dict[str, Tensor]:
    totals: dict[str, Tensor] = step_totals(context, functions, micro_batches)
    places = sum(len(rows) * max(row.length for row in rows) for rows in micro_batches)
    return totals | {"token_count": torch.full_like(totals["token_count"], context.all_reduce(places))}


@MEANS_FAULTS.add(
    summary="the weights of losses ignore the mask, so the critic learns from prompts",
    source="https://github.com/TIGER-AI-Lab/verl-tool/issues/116",
    stage="critic loss",
    cells=rl("ppo"),
    blind=("loss",),
    needs="a critic; a policy loss is masked again",
)
def mask_lost(loss_weights: Function, inputs: Any, objective: Any, totals: Any) -> Tensor:
    weights: Tensor = loss_weights(inputs, objective, totals)
    return torch.full_like(weights, weights.max().item())


@MEANS_FAULTS.add(
    summary="tokens of the prompt are targets with the advantage of their response",
    source="https://github.com/TIGER-AI-Lab/verl-tool/issues/116",
    stage="old log-probs",
    cells=rl("grpo"),
    needs="rollouts",
)
def prompt_trained(collate: Function, rows: Any, **options: Any) -> Any:
    inputs = collate(rows, **options)
    if "advantage" not in inputs.columns:  # before advantages are known, no token is trained on
        return inputs
    labels, columns = inputs.labels.clone(), {name: numbers.clone() for name, numbers in inputs.columns.items()}
    for r, row in enumerate(rows):
        start = 0
        for document in row.documents:
            end = start + len(document.tokens)
            labels[r, start : end - 1] = inputs.tokens[r, start + 1 : end]
            advantages = columns["advantage"][r, start:end]
            advantages[:-1] = advantages[advantages.abs().argmax()]
            start = end
    return dataclasses.replace(inputs, labels=labels, columns=columns)


@MEANS_FAULTS.add(
    summary="the response mask begins and ends one token early",
    source="https://github.com/lucidrains/PaLM-rlhf-pytorch/issues/31",
    stage="old log-probs",
    cells=rl("grpo"),
    needs="prompts",
)
def mask_off_by_one(collate: Function, rows: Any, **options: Any) -> Any:
    # The last token of the prompt becomes a target, and the last token of the response is no longer one.
    moved = [dataclasses.replace(row, documents=tuple(map(_one_earlier, row.documents))) for row in rows]
    return collate(moved, **options)


def _one_earlier(document: Any) -> Any:
    targets = document.targets
    # A prompt of one token has no earlier token.
    return document if len(targets) > 1 and targets[1] else dataclasses.replace(document, targets=(*targets[1:], False))


@MEANS_FAULTS.add(
    summary="metrics are those of the first rank's own tokens",
    source="https://github.com/RLinf/RLinf/issues/603",
    stage="policy metrics",
    cells=rl("grpo"),
    blind=("loss", "loss and norm"),
    needs="dp of 2 or more, and a metric that is not the same on all ranks: a second update of a rollout",
)
def metrics_of_one_rank(of_all_ranks: Function, context: Any, sums: Any, highest: Any) -> dict[str, Tensor]:
    first = context.all_gather({o.key: sums[o.key].item() for o in METRICS if o.key in sums})[0]
    reduced: dict[str, Tensor] = of_all_ranks(context, sums, highest)
    own = {key: torch.full_like(reduced[key], value * context.data_size) for key, value in first.items()}
    return reduced | own


@MEANS_FAULTS.add(
    summary="the mean over tokens is a mean over sequences of means, so short responses weigh more",
    source="arXiv 2503.14476, section 3.3, on what a mean over sequences does to long responses",
    stage="loss",
    cells=rl("grpo"),
    needs="token-mean and responses of different lengths",
)
def sequence_mean_for_token_mean(token_weights: Function, lengths: Tensor, mode: str, **totals: Any) -> Any:
    return token_weights(lengths, "seq-mean-token-mean", **totals)


@MEANS_FAULTS.add(
    summary="the mean over sequences of means is a mean over tokens, so long responses weigh more",
    source="https://github.com/huggingface/trl/issues/3187",
    stage="loss",
    cells=rl("gspo", only=FULL),
    needs="seq-mean-token-mean and responses of different lengths",
)
def token_mean_for_sequence_mean(token_weights: Function, lengths: Tensor, mode: str, **totals: Any) -> Any:
    return token_weights(lengths, "token-mean", **totals)
