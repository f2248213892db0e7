"""megatron-core: a checkpoint of remainders (store_param_remainders), saved as float32 numbers, cannot be loaded.

Needs TransformerEngine from 2.1 on and a GPU. Exit code 0: defect present, and with integers the masters come back bit
by bit. 1: gone. See megatron-remainder-checkpoints.md.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import TransformerConfig

SET = DistributedOptimizer._set_main_param_and_optimizer_states


def as_integers(optimizer: Any, parameter: Any, tensors: dict[str, torch.Tensor]) -> None:
    """The remedy: remainders become integers again."""
    SET(optimizer, parameter, {**tensors, "param": tensors["param"].to(torch.int16)})


def trained() -> Any:
    """An optimizer with remainders after three updates."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2))).bfloat16().cuda()
    model.config = config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1, bf16=True)
    own = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(config, own, model)
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True, use_precision_aware_optimizer=True
    )
    (optimizer,) = get_megatron_optimizer(settings, [ddp]).chained_optimizers
    for _ in range(3):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        ddp(torch.linspace(-1, 1, 512, device="cuda").view(8, 64).bfloat16()).float().square().mean().backward()
        ddp.finish_grad_sync()
        optimizer.step()
    return optimizer


def remainders(optimizer: Any) -> torch.Tensor:
    return torch.cat([state["master_param"].clone() for state in optimizer.optimizer.state.values()])


def main() -> int:
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29655"}
    dist.init_process_group("nccl", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    optimizer = trained()
    kept = remainders(optimizer)
    print(f"remainders: {kept.dtype}, {(kept != 0).float().mean():.1%} of {len(kept)} are not 0")
    saved = optimizer.get_parameter_state_dp_zero(use_gloo_comm=False)
    (buffers,) = saved[0].values()
    print(f"in the checkpoint: {buffers['param'].dtype}, up to {buffers['param'].abs().max():.0f} in size")
    try:
        optimizer.load_parameter_state_from_dp_zero(saved)
        print("loaded")
        return 1
    except AssertionError as error:
        print(f"load_parameter_state_from_dp_zero: AssertionError {error}")
    optimizer._set_main_param_and_optimizer_states = lambda *given: as_integers(optimizer, *given)
    for state in optimizer.optimizer.state.values():
        state["master_param"].zero_()
    optimizer.load_parameter_state_from_dp_zero(saved)
    same = bool((remainders(optimizer) == kept).all())
    print(f"REMEDY: {'all' if same else 'not all'} remainders are those of before")
    return 0 if same else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
