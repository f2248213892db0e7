"""One optimizer step, written once on the strategy interface, whatever the backend."""

from collections.abc import Callable

import torch

from conformance.backend import StepMetrics
from conformance.batch import Batch, Row
from impl.collate import NO_TARGET, Inputs, collate
from impl.strategy import Strategy


def sft_step(strategy: Strategy, batch: Batch, *, device: str, on_gradients: Callable[[], None]) -> StepMetrics:
    """Supervised fine-tuning: the loss is the mean of -log p over the step's target tokens, on all ranks together."""
    micro_batches = strategy.setup_dataloader(batch)
    token_count = count_targets(strategy, micro_batches)
    lr = strategy.learning_rate()
    inputs = [collate(rows, multiple_of=strategy.sequence_multiple).to(device) for rows in micro_batches]
    logprobs = strategy.forward_backward(inputs, lambda index, logp: -logp.sum() / token_count)
    strategy.finish_gradients()
    on_gradients()
    grad_norm = strategy.optimizer_step()
    return StepMetrics(
        loss_sum=strategy.all_reduce(-sum(logp.sum().item() for logp in logprobs)),
        token_count=token_count,
        grad_norm=grad_norm,
        lr=lr,
        logprobs={
            index: targets
            for rows, micro_batch, logp in zip(micro_batches, inputs, logprobs, strict=True)
            for index, targets in row_logprobs(rows, micro_batch, logp).items()
        },
    )


def count_targets(strategy: Strategy, micro_batches: list[tuple[Row, ...]]) -> int:
    """Target tokens of the whole optimizer step: the one denominator of its loss."""
    return int(strategy.all_reduce(sum(row.target_count for rows in micro_batches for row in rows)))


def row_logprobs(rows: tuple[Row, ...], inputs: Inputs, logp: torch.Tensor) -> dict[int, torch.Tensor]:
    """Log-probs of each row's targets, by the row's index in the optimizer step."""
    return {row.index: logp[r][inputs.labels[r] != NO_TARGET].cpu() for r, row in enumerate(rows) if row.target_count}
