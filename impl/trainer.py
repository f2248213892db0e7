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
    loss_sum = 0.0
    logprobs: dict[int, torch.Tensor] = {}
    for index, rows in enumerate(micro_batches):
        strategy.start_micro_batch(index, len(micro_batches))
        inputs = collate(rows, multiple_of=strategy.sequence_multiple).to(device)
        logp = strategy.forward(inputs)  # (rows, length)
        strategy.backward(-logp.sum() / token_count)
        loss_sum -= logp.detach().sum().item()
        logprobs |= row_logprobs(rows, inputs, logp.detach())
    strategy.finish_gradients()
    on_gradients()
    grad_norm = strategy.optimizer_step()
    return StepMetrics(
        loss_sum=strategy.all_reduce(loss_sum),
        token_count=token_count,
        grad_norm=grad_norm,
        lr=lr,
        logprobs=logprobs,
    )


def count_targets(strategy: Strategy, micro_batches: list[tuple[Row, ...]]) -> int:
    """Target tokens of the whole optimizer step: the one denominator of its loss."""
    return int(strategy.all_reduce(sum(row.target_count for rows in micro_batches for row in rows)))


def row_logprobs(rows: tuple[Row, ...], inputs: Inputs, logp: torch.Tensor) -> dict[int, torch.Tensor]:
    """Log-probs of each row's targets, by the row's index in the optimizer step."""
    return {row.index: logp[r][inputs.labels[r] != NO_TARGET].cpu() for r, row in enumerate(rows) if row.target_count}
