"""megatron-core: a checkpoint of the distributed optimizer takes parameters and moments from wrong places.

Two ranks, CPU, several gradient buckets, as with overlap or large models. Exit code 0: defect present, and with the
remedy the right numbers are written. 1: gone. See megatron-checkpoint-buckets.md.
"""

from typing import Any

import megatron_on_cpu as on_cpu
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

LAYERS, WIDTH, STEPS = 4, 12, 3
ANY_LAYOUT = {"distrib_optim_sharding_type": "fully_reshardable"}


def trained(bucket_size: int | None) -> tuple[torch.nn.Module, Any]:
    """Linear layers, and the distributed optimizer that has trained them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    config: Any = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
    reduction = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=bucket_size
    )
    ddp = DistributedDataParallel(config, reduction, model)
    settings = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0, use_distributed_optimizer=True)
    (optimizer,) = get_megatron_optimizer(settings, [ddp]).chained_optimizers
    for _ in range(STEPS):
        ddp.zero_grad_buffer()
        torch.Tensor.mean(ddp(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)).square()).backward()
        ddp.finish_grad_sync()
        optimizer.step()
    return model, optimizer


def wrong(model: torch.nn.Module, optimizer: Any) -> list[float]:
    """The relative errors of the parameters that dist_checkpointing is given to write; only those that are not 0."""
    names, rank = dict(model.named_parameters()), torch.distributed.get_rank()
    sharded = {n: ShardedTensor.from_rank_offsets(n, p, replica_id=(0, 0, rank)) for n, p in names.items()}
    state = optimizer.sharded_state_dict(sharded, metadata=ANY_LAYOUT)["param_state"]
    written = {
        tensors["param"].key.removeprefix("optimizer.state.param."): tensors["param"] for tensors in state.values()
    }
    errors = [float((written[n].data - p).norm() / p.norm()) for n, p in names.items()]
    return sorted(error for error in errors if error)


def leave_out_padding(optimizer: Any) -> None:
    """REMEDY: indices of parameters that do not count the padding at the end of buckets."""
    for buffer in optimizer.buffers:
        shift, end = {}, 0
        for bucket in buffer.buckets:
            shift[bucket.bucket_id] = end - bucket.offset
            end += bucket.numel_unpadded
        places = buffer.param_index_map.items()
        buffer.param_index_map = {p: (start + shift[b], stop + shift[b], b) for p, (start, stop, b) in places}


def present(rank: int) -> bool:
    parallel_state.initialize_model_parallel()
    found = []
    for what, bucket_size in (("one bucket", None), ("a bucket for each layer", WIDTH * (WIDTH + 1))):
        model, optimizer = trained(bucket_size)
        found.append((what, optimizer, wrong(model, optimizer)))
    leave_out_padding(optimizer)
    found.append(("REMEDY", optimizer, wrong(model, optimizer)))
    for what, one, errors in found if rank == 0 else ():
        sizes = [(bucket.numel_unpadded, bucket.grad_data.numel()) for bucket in one.buffers[0].buckets]
        print(f"{what}, without and with padding {sizes}")
        print(
            f"    {len(errors)} of {2 * LAYERS} parameters wrong: {' '.join(f'{error:.2f}' for error in errors) or '-'}"
        )
    return [bool(errors) for _, _, errors in found] == [False, True, False]


if __name__ == "__main__":
    on_cpu.two_ranks(present)
