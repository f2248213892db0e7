"""Defines tasks of ranks with tensors: on device meshes, as DTensors, in collectives, and on GPUs."""

import inspect
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from conformance.runtime import RankContext, cleanup

_computed: list[Any] = []
_counting: list[bool] = []


def tensor_parallel(context: RankContext) -> dict[str, Any]:
    """Build two device meshes and a named group, train on one of them, release nothing."""
    from torch.distributed.device_mesh import init_device_mesh  # a second, which other worker groups do without
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.set_default_device(context.device)
    kind = torch.device(context.device).type
    mesh = init_device_mesh(kind, (2, context.world_size // 2), mesh_dim_names=("tp", "dp"))
    init_device_mesh(kind, (context.world_size,))
    if context.rank < 2:
        group = dist.new_group([0, 1], use_local_synchronization=True)
        dist.all_reduce(torch.ones(1), group=group)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    return {"pid": os.getpid(), "loss": loss.item()}


def dtensor_power(context: RankContext, *, exponent: float, dtype: str) -> dict[str, Any]:
    """Compute a power of whole numbers on a new mesh, and on none; also returns the shapes computed in this rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    if not _counting:  # in the first task of this rank
        _counting.append(True)
        compute = cleanup._shape_on_meta

        def counted(schema: Any) -> Any:
            _computed.append(schema)
            return compute(schema)

        cleanup._shape_on_meta = counted
        cleanup.keep_shapes()
    torch.set_default_dtype(getattr(torch, dtype))
    whole = torch.ones(2, 3, dtype=torch.int64)
    result: Any = distribute_tensor(whole, init_device_mesh("cpu", (context.world_size,)), [Shard(0)]) ** exponent
    found, plain = ([str(power.dtype), *power.shape] for power in (result._spec.tensor_meta, whole**exponent))
    return {"equal": found == plain, "computed": len(_computed)}


def dtensor_shapes(context: RankContext) -> dict[str, Any]:
    """Trains on DTensors, whose shapes are computed on the meta device and by a fake mode; returns the differences."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagator: Any = ShardingPropagator
    kept = propagator._propagate_tensor_meta_non_cached
    compute, other, count = getattr(kept, "__wrapped__", kept), list[str](), list[int]()

    def compared(self: Any, schema: Any) -> Any:
        right, found = compute(self, schema), cleanup._shape_on_meta(schema)
        count.append(found is not None)
        if found is not None and (found != right or type(found) is not type(right)):
            other.append(f"{schema.op}: {found}, {right}")
        return right

    propagator._propagate_tensor_meta_non_cached = compared
    mesh = init_device_mesh("cpu", (context.world_size,))
    weight: Any = distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)]).requires_grad_()
    x = distribute_tensor(torch.ones(2, 4, 6), mesh, [Replicate()])
    heads: Any = (x @ weight.T).unflatten(-1, (2, 4)).transpose(1, 2)  # (2, 2, 4, 4), not contiguous
    attended = (heads @ heads.mT).softmax(-1) @ heads
    joined = attended.transpose(1, 2).flatten(2)
    half, images = joined.bfloat16(), joined.view(2, 2, 4, 4).contiguous(memory_format=torch.channels_last)
    normed = [torch.nn.functional.layer_norm(x, (8,)) for x in (joined, half)]
    filters: Any = distribute_tensor(torch.ones(3, 2, 2, 2), mesh, [Replicate()]).requires_grad_()
    parts = [*normed[0].float().split(4, -1), normed[1].float(), torch.nn.functional.conv2d(images, filters)]
    sum(part.square().mean() for part in parts).backward()
    torch.optim.AdamW([weight], foreach=False).step()
    propagator._propagate_tensor_meta_non_cached = kept
    return {"other": other, "on_meta": sum(count), "all": len(count)}


def dtensor_threads(context: RankContext) -> dict[str, Any]:
    """Multiply DTensors by ever other numbers in four threads; returns whether all were right, and the kept shapes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    cleanup.MOST_SHAPES = 100
    cleanup.keep_shapes()
    mesh = init_device_mesh("cpu", (1,))

    def multiply(thread: int) -> bool:
        right = []
        for size in range(1, 100):
            sharded: Any = distribute_tensor(torch.ones(size, thread + 1), mesh, [Shard(0)], src_data_rank=None)
            result = sharded * (size + thread / 7)
            right.append(torch.equal(result.to_local(), torch.full((size, thread + 1), size + thread / 7)))
        return all(right)

    with ThreadPoolExecutor(4) as threads:
        right = all(threads.map(multiply, range(4)))
    propagator: Any = ShardingPropagator
    known = inspect.getclosurevars(propagator._propagate_tensor_meta_non_cached).nonlocals["known"]
    return {"right": right, "kept": len(known)}


def multiply_where_much_was(context: RankContext, *, mib: int) -> None:
    """Matrix products, forward and backward, whose workspaces find room in memory that a large tensor had."""
    torch.empty(mib * 2**20, dtype=torch.uint8, device=context.device)
    weight = torch.ones(64, 64, device=context.device, requires_grad=True)
    (weight @ weight).sum().backward()


def break_cuda(context: RankContext, *, rank: int) -> None:
    """A rank indexes beyond a tensor on its GPU: an error that stays with the process, whatever it does next."""
    if context.rank == rank:
        torch.zeros(1, device=context.device)[torch.tensor([7], device=context.device)].sum().item()
    dist.barrier()


def exchange(context: RankContext) -> dict[str, Any]:
    """Speak with all other ranks, as layouts do: sums, gathers, scatters, and a ring."""
    rank, size = context.rank, context.world_size
    mine = torch.full((size,), float(rank + 1), dtype=torch.float64, device=context.device)
    total, gathered, scattered, received = mine.clone(), mine.new_empty(size * size), mine[:1].clone(), mine.clone()
    dist.all_reduce(total)
    dist.all_gather_into_tensor(gathered, mine)
    dist.reduce_scatter_tensor(scattered, mine)
    following, previous = (rank + 1) % size, (rank - 1) % size
    ring = [dist.P2POp(dist.isend, mine, following), dist.P2POp(dist.irecv, received, previous)]
    for sent in dist.batch_isend_irecv(ring):
        sent.wait()
    return {
        "backend": dist.get_backend(),
        "gpu": str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid),
        "sum": total.tolist(),
        "gathered": gathered.tolist(),
        "scattered": scattered.tolist(),
        "received": received.tolist(),
    }


def on_gpu(context: RankContext) -> tuple[str, int]:
    return str(torch.cuda.get_device_properties(context.device).uuid), os.getpid()
