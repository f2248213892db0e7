"""megatron-core: the native fused cross-entropy rounds the gradient of the logits to bfloat16, whatever their dtype.

Two ranks, CPU, each with half of the vocabulary. Exit code 0: defect present, and the unfused function is right. 1:
gone. See megatron-fused-cross-entropy.md.
"""

import megatron_on_cpu as on_cpu
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

ROWS, VOCABULARY = 64, 256
Case = tuple[float, float, bool, bool]


def found(rank: int, dtype: torch.dtype, fused: bool) -> Case:
    """(error of the losses, error of the gradient of the logits, whether all numbers of that gradient are bfloat16
    numbers, whether the logits were overwritten)."""
    torch.manual_seed(0)
    whole = torch.randn(ROWS, 1, VOCABULARY).to(dtype)
    target = torch.randint(VOCABULARY, (ROWS, 1))
    own = whole.chunk(2, dim=-1)[rank].clone().requires_grad_()
    logits = own + 0
    if fused:
        losses = fused_vocab_parallel_cross_entropy(logits, target, dist.group.WORLD)
    else:
        losses = vocab_parallel_cross_entropy(logits, target)
    (gradient,) = torch.autograd.grad(losses.mean(), own)
    truth = whole.double().requires_grad_()
    right = torch.nn.functional.cross_entropy(truth.flatten(0, 1), target.flatten(), reduction="none")
    (right_gradient,) = torch.autograd.grad(right.mean(), truth)
    wrong = on_cpu.error(gradient.double(), right_gradient.chunk(2, dim=-1)[rank])
    rounded = torch.equal(gradient, gradient.bfloat16().to(dtype))
    return on_cpu.error(losses.flatten().double(), right), wrong, rounded, not torch.equal(logits, own)


def present(rank: int) -> bool:
    torch.compiler.set_stance("force_eager")  # the fused one is under torch.compile; compiled, it shows the same
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    there = True
    for dtype, least, most in ((torch.float32, 1e-3, 1e-6), (torch.float16, 1e-3, 5e-4)):
        fused, plain = found(rank, dtype, True), found(rank, dtype, False)
        if rank == 0:
            print(f"{dtype} logits, against float64 in one process:")
            for name, (loss, gradient, rounded, lost) in (("fused", fused), ("REMEDY not fused", plain)):
                print(f"{name}: loss {loss:.1e} off, gradient {gradient:.1e} off, in bfloat16 numbers: {rounded}")
                print(f"  the logits are overwritten: {lost}")
        there = there and fused[1] > least and fused[2] and plain[1] < most and not plain[2] and fused[0] < 1e-6
    return there


if __name__ == "__main__":
    on_cpu.two_ranks(present)
