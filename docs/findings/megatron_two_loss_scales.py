"""megatron-core: under expert parallelism fp16 has two loss scales, and an overflow in one part parts them.

Two ranks, CPU, one dense weight and one expert on each. The gradient of the first expert overflows once.
Exit code 0: afterwards the experts' gradients are divided by another scale than the loss was multiplied by, and the
remedy mends it. 1: gone. See megatron-two-loss-scales.md.
"""

import megatron_on_cpu as on_cpu
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

SIZE, SCALE = 8, 1024.0
CONFIG = TransformerConfig(
    num_layers=1, hidden_size=SIZE, num_attention_heads=1, num_moe_experts=2, moe_ffn_hidden_size=SIZE,
    expert_model_parallel_size=2, add_bias_linear=False, fp16=True, params_dtype=torch.half,
)  # fmt: skip


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = CONFIG
        self.dense, self.expert = (torch.nn.Parameter(torch.ones(SIZE, SIZE, dtype=torch.half)) for _ in range(2))
        self.expert.allreduce = False  # type: ignore[attr-defined]  # as the library marks its experts


def step(model: DistributedDataParallel, optimizer: on_cpu.Any, gradient: float, of_expert: float) -> list[float]:
    """The gradients of dense weight and expert that an update is made with, where these are the right ones."""
    model.zero_grad_buffer()
    scale = float(optimizer.get_loss_scale())  # by which a schedule multiplies the loss
    model.module.dense.main_grad.fill_(gradient * scale)
    model.module.expert.main_grad.fill_(of_expert * scale)
    optimizer.step()
    return [float(p.main_param.grad[0, 0]) for p in (model.module.dense, model.module.expert)]


def run(rank: int, *, remedy: bool) -> tuple[list[float], list[float]]:
    """(the scales, the gradients of the next update) after a step in which the first rank's expert overflows."""
    reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = DistributedDataParallel(CONFIG, reduction, Model())
    settings = OptimizerConfig(
        optimizer="sgd", lr=0.0, fp16=True, params_dtype=torch.half, initial_loss_scale=SCALE, hysteresis=1,
        clip_grad=0.0,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, [model])
    step(model, optimizer, 1.0, float("inf") if rank == 0 else 1.0)
    scalers = [one.grad_scaler for one in optimizer.chained_optimizers]
    if remedy:
        lowest = min(float(scaler.scale) for scaler in scalers)
        for scaler in scalers:
            scaler._scale.fill_(lowest)
    return [float(scaler.scale) for scaler in scalers], step(model, optimizer, 1.0, 1.0)


def present(rank: int) -> bool:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    scales, wrong = run(rank, remedy=False)
    _, mended = run(rank, remedy=True)
    if rank == 0:
        print(f"loss scales after an overflow in an expert: {scales}; gradients that should be 1:", end=" ")
        print(f"dense {wrong[0]:.1f}, expert {wrong[1]:.1f}; REMEDY {mended}", flush=True)
    return wrong == [1.0, 2.0] and mended == [1.0, 1.0]


if __name__ == "__main__":
    on_cpu.two_ranks(present)
