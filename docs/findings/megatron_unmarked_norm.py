"""megatron-core: under sequence parallelism the gradient of a norm stays partial unless its weight carries a mark.

Two tensor-parallel ranks, CPU. The norm is torch's own, the one to use without Transformer Engine and Apex. Exit code
0: defect present, and right with the mark. 1: gone. See megatron-unmarked-norm.md.
"""

from typing import Any

import megatron_on_cpu as on_cpu
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm

ROWS, HIDDEN = 32, 16


def inputs() -> torch.Tensor:
    return torch.randn(ROWS, 1, HIDDEN, generator=torch.Generator().manual_seed(0))


def loss(output: torch.Tensor) -> torch.Tensor:
    return (output - torch.linspace(-1, 1, HIDDEN)).square().sum() / ROWS


class Block(torch.nn.Module):
    """A norm and a feed-forward network; each rank has half of the rows of the residual stream."""

    def __init__(self, config: Any, marked: bool) -> None:
        super().__init__()
        settings = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": False}
        torch.manual_seed(0)
        self.config, self.norm = config, torch.nn.RMSNorm(HIDDEN, eps=1e-5)
        self.up = ColumnParallelLinear(HIDDEN, 4 * HIDDEN, gather_output=False, **settings)
        self.down = RowParallelLinear(4 * HIDDEN, HIDDEN, input_is_parallel=True, **settings)
        if marked:
            self.norm.weight.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))[0]))[0]  # type: ignore[no-any-return]


def gathered(own: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(parts, own.contiguous())
    return torch.cat(parts, dim)


def errors(rank: int, config: Any, marked: bool) -> tuple[float, float]:
    """(error of the norm's gradient, error of the next matrix's gradient) against one process, on the worse rank."""
    block = Block(config, marked)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), block)
    loss(ddp(inputs().chunk(2)[rank])).backward()
    finalize_model_grads([ddp])
    weight = torch.ones(HIDDEN, requires_grad=True)
    up, down = gathered(block.up.weight.detach(), 0).requires_grad_(), gathered(block.down.weight.detach(), 1)
    whole = loss(torch.relu(torch.nn.functional.rms_norm(inputs(), [HIDDEN], weight, 1e-5) @ up.T) @ down.T)
    right = torch.autograd.grad(whole, (weight, up))
    found: list[torch.Tensor] = [getattr(x.weight, "main_grad") for x in (block.norm, block.up)]  # noqa: B009
    both = torch.tensor([on_cpu.error(found[0], right[0]), on_cpu.error(found[1], right[1].chunk(2)[rank])])
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return float(both[0]), float(both[1])


def present(rank: int) -> bool:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, tensor_model_parallel_size=2, sequence_parallel=True,
        use_cpu_initialization=True, normalization="RMSNorm", init_method=torch.nn.init.xavier_normal_,
    )  # fmt: skip
    try:
        WrappedTorchNorm(config, HIDDEN)
        refused = "nothing"
    except AssertionError as error:
        refused = str(error)
    wrong, mended = errors(rank, config, marked=False), errors(rank, config, marked=True)
    if rank == 0:
        print(f"Megatron's own wrapper says: {refused}")
        for name, found in (("torch.nn.RMSNorm", wrong), ("REMEDY with the mark", mended)):
            print(f"{name}: gradient of the norm {found[0]:.1e} off, of the matrix after it {found[1]:.1e} off")
    return refused != "nothing" and wrong[0] > 0.1 and wrong[1] < 1e-5 and max(mended) < 1e-5


if __name__ == "__main__":
    on_cpu.two_ranks(present)
