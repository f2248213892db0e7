"""Plants faults in the denominators of losses, in masks, and in metrics that are reduced over ranks."""

import dataclasses
from typing import Any

import torch

from conformance.backends.faults import Fault, Function
from conformance.spec.objectives import METRICS
from impl.faults.cells import FULL, rl

NO_TARGET = -100


def _aggregated_as(wrong: str) -> Any:
    def wrap(token_weights: Function) -> Function:
        def faulty(lengths: torch.Tensor, mode: str, **totals: Any) -> Any:
            return token_weights(lengths, wrong, **totals)

        return faulty

    return wrap


def _mean_of_micro_batch(evaluate: Function) -> Function:
    def faulty(functions: Any, model: str, outputs: Any, inputs: Any, *, totals: Any, others: Any) -> Any:
        # The mean over the micro-batch's own tokens, times its share of the sequences.
        targets = inputs.targets
        begins = targets & ~torch.nn.functional.pad(targets, (1, 0))[:, :-1]
        tokens, sequences = targets.sum().item(), begins.sum().item()
        own = tokens * totals["sequence_count"] / sequences if sequences else totals["token_count"]
        return evaluate(functions, model, outputs, inputs, totals={**totals, "token_count": own}, others=others)

    return faulty


def _divided_by_mini_batches(loss_weights: Function) -> Function:
    def faulty(inputs: Any, objective: Any, totals: Any) -> Any:
        return loss_weights(inputs, objective, totals) / objective.mini_batches

    return faulty


def _padding_in_mean(step_totals: Function) -> Function:
    def faulty(context: Any, functions: Any, micro_batches: Any) -> dict[str, torch.Tensor]:
        totals: dict[str, torch.Tensor] = step_totals(context, functions, micro_batches)
        places = sum(len(rows) * max(row.length for row in rows) for rows in micro_batches)
        return totals | {"token_count": torch.full_like(totals["token_count"], context.all_reduce(places))}

    return faulty


def _mask_lost(loss_weights: Function) -> Function:
    def faulty(inputs: Any, objective: Any, totals: Any) -> torch.Tensor:
        weights: torch.Tensor = loss_weights(inputs, objective, totals)
        return torch.full_like(weights, weights.max().item())

    return faulty


def _prompt_trained(collate: Function) -> Function:
    def faulty(rows: Any, **options: Any) -> Any:
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

    return faulty


def _mask_off_by_one(collate: Function) -> Function:
    def faulty(rows: Any, **options: Any) -> Any:
        # The last token of the prompt becomes a target, and the last token of the response is no longer one.
        moved = [dataclasses.replace(row, documents=tuple(map(_one_earlier, row.documents))) for row in rows]
        return collate(moved, **options)

    return faulty


def _one_earlier(document: Any) -> Any:
    targets = document.targets
    # A prompt of one token has no earlier token.
    return document if len(targets) > 1 and targets[1] else dataclasses.replace(document, targets=(*targets[1:], False))


def _metrics_of_one_rank(of_all_ranks: Function) -> Function:
    def faulty(context: Any, sums: Any, highest: Any) -> dict[str, torch.Tensor]:
        first = context.all_gather({o.key: sums[o.key].item() for o in METRICS if o.key in sums})[0]
        reduced: dict[str, torch.Tensor] = of_all_ranks(context, sums, highest)
        own = {key: torch.full_like(reduced[key], value * context.data_size) for key, value in first.items()}
        return reduced | own

    return faulty


MEANS_FAULTS = (
    Fault(
        name="sequence-mean-for-token-mean",
        summary="the mean over tokens is a mean over sequences of means, so short responses weigh more",
        source="arXiv 2503.14476, section 3.3, on what a mean over sequences does to long responses",
        seam="token_weights",
        stage="loss",
        cells=rl("grpo"),
        needs="token-mean and responses of different lengths",
        wrap=_aggregated_as("seq-mean-token-mean"),
    ),
    Fault(
        name="token-mean-for-sequence-mean",
        summary="the mean over sequences of means is a mean over tokens, so long responses weigh more",
        source="https://github.com/huggingface/trl/issues/3187",
        seam="token_weights",
        stage="loss",
        cells=rl("gspo", only=FULL),
        needs="seq-mean-token-mean and responses of different lengths",
        wrap=_aggregated_as("token-mean"),
    ),
    Fault(
        name="mean-of-micro-batch",
        summary="each micro-batch is divided by its own tokens and weighted by its share of the sequences",
        source="https://github.com/verl-project/verl/issues/5625",
        seam="evaluate",
        stage="loss",
        cells=rl("grpo"),
        needs="token-mean, several micro-batches and responses of different lengths",
        wrap=_mean_of_micro_batch,
    ),
    Fault(
        name="divided-by-mini-batches",
        summary="the loss of a mini-batch has the denominator of the whole rollout",
        source="arXiv 1707.06347, algorithm 1: an update for each minibatch, of the surrogate's mean over it",
        seam="loss_weights",
        stage="loss",
        cells=rl("grpo-off-policy"),
        needs="mini_batches of 2 or more",
        wrap=_divided_by_mini_batches,
    ),
    Fault(
        name="padding-in-mean",
        summary="the sum over response tokens is divided by all tokens of the micro-batches, including masked ones",
        source="https://github.com/huggingface/trl/pull/6439",
        seam="step_totals",
        stage="loss",
        cells=rl("grpo"),
        needs="token-mean",
        wrap=_padding_in_mean,
    ),
    Fault(
        name="mask-lost",
        summary="the weights of losses ignore the mask, so the critic learns from prompts",
        source="https://github.com/TIGER-AI-Lab/verl-tool/issues/116",
        seam="loss_weights",
        stage="critic loss",
        cells=rl("ppo"),
        blind=("loss",),
        needs="a critic; a policy loss is masked again",
        wrap=_mask_lost,
    ),
    Fault(
        name="prompt-trained",
        summary="tokens of the prompt are targets with the advantage of their response",
        source="https://github.com/TIGER-AI-Lab/verl-tool/issues/116",
        seam="collate",
        stage="old log-probs",
        cells=rl("grpo"),
        needs="rollouts",
        wrap=_prompt_trained,
    ),
    Fault(
        name="mask-off-by-one",
        summary="the response mask begins and ends one token early",
        source="https://github.com/lucidrains/PaLM-rlhf-pytorch/issues/31",
        seam="collate",
        stage="old log-probs",
        cells=rl("grpo"),
        needs="prompts",
        wrap=_mask_off_by_one,
    ),
    Fault(
        name="metrics-of-one-rank",
        summary="metrics are those of the first rank's own tokens",
        source="https://github.com/RLinf/RLinf/issues/603",
        seam="of_all_ranks",
        stage="policy metrics",
        cells=rl("grpo"),
        blind=("loss", "loss and norm"),
        needs="dp of 2 or more, and a metric that is not the same on all ranks: a second update of a rollout",
        wrap=_metrics_of_one_rank,
    ),
)
