"""megatron-core: the padding of the vocabulary takes part in the softmax, so log-probs are not the model's.

Two ranks, CPU, each with half of the padded vocabulary. Exit code 0: defect present (log-probs and gradients differ
from those over the real vocabulary), and masking the padding mends it. 1: gone. See megatron-padded-vocabulary.md.
"""

import megatron_on_cpu as on_cpu
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

ROWS, HIDDEN, VOCABULARY, RANKS = 32, 64, 1000, 2
MULTIPLE = 128 * RANKS  # Megatron-LM's --make-vocab-size-divisible-by 128, for each rank
PADDED = -(-VOCABULARY // MULTIPLE) * MULTIPLE


def model() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states (rows, hidden), head (vocabulary, hidden), targets."""
    torch.manual_seed(0)
    return torch.randn(ROWS, HIDDEN), 0.1 * torch.randn(VOCABULARY, HIDDEN), torch.randint(VOCABULARY, (ROWS,))


def errors(rank: int, filling: str, masked: bool) -> tuple[float, float]:
    """Errors against the real vocabulary: of log-probs (largest difference) and of the hidden states' gradient."""
    hidden, head, target = model()
    fill = head[-1:] if filling == "last row" else torch.zeros(1, HIDDEN)
    padded = torch.cat([head, fill.expand(PADDED - VOCABULARY, -1)])
    own = padded.chunk(RANKS)[rank]
    x = hidden.clone().requires_grad_()
    logits = x @ own.T
    if masked:  # the remedy
        columns = torch.arange(len(own)) + rank * len(own)
        logits = logits.masked_fill(columns >= VOCABULARY, -torch.inf)
    losses = vocab_parallel_cross_entropy(logits[:, None], target[:, None])[:, 0]
    (gradient,) = torch.autograd.grad(losses.mean(), x)
    dist.all_reduce(gradient)  # each rank has the part that goes through its rows of the head
    truth = hidden.double().requires_grad_()
    right = torch.nn.functional.cross_entropy(truth @ head.double().T, target, reduction="none")
    (right_gradient,) = torch.autograd.grad(right.mean(), truth)
    off = (gradient - right_gradient).norm() / right_gradient.norm()
    return float((losses - right).abs().max().detach()), float(off)


def present(rank: int) -> bool:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    there = True
    for filling in ("zeros", "last row"):
        wrong, mended = errors(rank, filling, masked=False), errors(rank, filling, masked=True)
        if rank == 0:
            print(f"padded with {filling}: log-probs {wrong[0]:.1e} off, gradient {wrong[1]:.1e} off;", end=" ")
            print(f"REMEDY masked: {mended[0]:.1e}, {mended[1]:.1e}", flush=True)
        there = there and wrong[0] > 1e-3 and wrong[1] > 1e-3 and max(mended) < 1e-5
    return there


if __name__ == "__main__":
    print(f"vocabulary {VOCABULARY}, padded to {PADDED}")
    on_cpu.two_ranks(present)
