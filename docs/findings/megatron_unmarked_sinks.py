"""megatron-core: the gradient norm leaves out the sinks of attention that are not on the first tensor-parallel rank.

Two tensor-parallel ranks, CPU, a layer's attention with `softmax_type="learnable"`. Exit code 0: defect present, and
right with the mark. 1: gone. See megatron-unmarked-sinks.md.
"""

import megatron_on_cpu as on_cpu
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

HEADS, SIZE, LENGTH = 4, 8, 16
CONFIG = TransformerConfig(
    num_layers=1, hidden_size=HEADS * SIZE, num_attention_heads=HEADS, tensor_model_parallel_size=2,
    sequence_parallel=True, softmax_type="learnable", attention_dropout=0.0, masked_softmax_fusion=False,
    init_method=torch.nn.init.normal_,
)  # fmt: skip


def whole() -> list[torch.Tensor]:
    """Queries, keys and values of all heads, and what the output is multiplied by: (length, 1, heads, size)."""
    random = torch.Generator().manual_seed(0)
    return [torch.randn(LENGTH, 1, HEADS, SIZE, generator=random) for _ in range(4)]


def right(sinks: torch.Tensor) -> float:
    """The norm of the gradient of all sinks (heads,), in one process."""
    q, k, v, weight = (x[:, 0].transpose(0, 1) for x in whole())
    scores = (q @ k.transpose(1, 2) * SIZE**-0.5).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    scores = torch.cat([scores, sinks[:, None, None].expand(-1, LENGTH, 1)], dim=-1)
    output = torch.softmax(scores, dim=-1)[..., :-1] @ v
    return float(torch.autograd.grad((output * weight).sum(), sinks)[0].norm())


def norm(rank: int, *, marked: bool) -> float:
    """The library's gradient norm of a model that has sinks and nothing else, half of them on each rank."""
    attention = DotProductAttention(CONFIG, 1, AttnMaskType.causal, "self")
    with torch.no_grad():
        attention.softmax_offset.copy_(torch.linspace(-1, 2, HEADS).chunk(2)[rank])
    if marked:
        set_tensor_model_parallel_attributes(attention.softmax_offset, True, 0, 1)
    model = DistributedDataParallel(CONFIG, DistributedDataParallelConfig(), attention)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.0, clip_grad=1e9), [model])
    q, k, v, weight = (x.chunk(2, dim=2)[rank] for x in whole())
    (model(q, k, v, None) * weight.flatten(2)).sum().backward()
    finalize_model_grads([model])
    return float(optimizer.step()[1])


def present(rank: int) -> bool:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    wanted = right(torch.linspace(-1, 2, HEADS).requires_grad_())
    wrong, mended = norm(rank, marked=False), norm(rank, marked=True)
    if rank == 0:
        print(f"gradient norm of four sinks on two ranks: {wrong:.4f}, {wrong / wanted:.3f} of the right {wanted:.4f}")
        print(f"REMEDY with the mark: {mended:.4f}", flush=True)
    return wrong < 0.95 * wanted and abs(mended - wanted) < 1e-5 * wanted


if __name__ == "__main__":
    on_cpu.two_ranks(present)
