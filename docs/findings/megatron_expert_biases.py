"""megatron-core: under tensor parallelism an expert's bias gets another expert's gradient, and the norm loses some.

Two tensor-parallel ranks with sequence parallelism, CPU, two experts on each. Exit code 0: defects present, and right
with other marks. 1: gone. See megatron-expert-biases.md.
"""

import megatron_on_cpu as on_cpu
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP

SIZE, TOKENS = 8, 12  # tokens of each rank, half of them for each of its experts
PARTS = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def experts(**settings: on_cpu.Any) -> tuple[SequentialMLP, TransformerConfig]:
    config = TransformerConfig(
        num_layers=1, hidden_size=SIZE, num_attention_heads=2, num_moe_experts=4, moe_ffn_hidden_size=SIZE,
        add_bias_linear=True, expert_tensor_parallel_size=1, bias_activation_fusion=False,
        use_cpu_initialization=True, init_method=torch.nn.init.normal_, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    count = 4 // config.expert_model_parallel_size
    return SequentialMLP(count, config, PARTS, ProcessGroupCollection.use_mpu_process_groups()), config


def output(module: torch.nn.Module, rank: int, count: int) -> torch.Tensor:
    tokens = torch.randn(TOKENS, SIZE, generator=torch.Generator().manual_seed(rank))
    found: torch.Tensor = module(tokens, torch.tensor([TOKENS // count] * count), torch.full((TOKENS,), 0.5))[0]
    return found


def in_place() -> str:
    """What a forward pass says where all ranks have the same experts."""
    try:
        output(experts()[0], 0, 4)
    except RuntimeError as error:
        return str(error).partition(".")[0]
    return "nothing"


def errors(rank: int, *, marked: bool) -> tuple[float, float]:
    """(error of the gradients of biases, gradient norm over the right one) after the library's reductions."""
    module, config = experts(tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2)
    biases = [expert.linear_fc2.bias for expert in module.local_experts]
    for bias in biases if marked else ():
        bias.sequence_parallel, bias.tensor_model_parallel = False, True
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), module)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.0, clip_grad=1e9), [model])
    output(model, rank, 2).sum().backward()
    right = [p.main_grad.clone() for p in module.parameters()]  # no other rank has these experts
    finalize_model_grads([model])
    wrong = max(on_cpu.error(b.main_grad, torch.full_like(b, 0.5 * TOKENS / 2)) for b in biases)
    norm = torch.stack([g.square().sum() for g in right]).sum()
    dist.all_reduce(norm)
    return wrong, float(optimizer.step()[1] / norm.sqrt())


def present(rank: int) -> bool:
    parallel_state.initialize_model_parallel()
    said = in_place()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1
    )
    wrong, mended = errors(rank, marked=False), errors(rank, marked=True)
    if rank == 0:
        print(f"without expert parallelism: {said}")
        for name, found in (("as shipped", wrong), ("REMEDY with other marks", mended)):
            print(f"{name}: gradients of biases {found[0]:.1e} off, norm {found[1]:.3f} of the right one", flush=True)
    return "modified inplace" in said and wrong[0] > 0.5 and max(mended[0], abs(mended[1] - 1)) < 1e-5


if __name__ == "__main__":
    on_cpu.two_ranks(present)
