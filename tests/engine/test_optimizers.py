"""torch's optimizers of the reference backends: in one kernel on GPUs, but not where that kernel would be wrong."""

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from conformance.spec.precision import PrecisionName
from conformance.spec.scenario import OptimizerConfig
from impl.engine.optimizers import parameter_groups, torch_optimizer, update_count


@pytest.mark.parametrize(
    ("device", "precision", "fused"),
    [
        ("cuda:0", "bf16", True),
        ("cuda:0", "fp32", True),
        ("cuda:0", "fp16", False),
        ("cuda:0", "exact", False),
        ("cpu", "bf16", False),
    ],
)
def test_fused_optimizer_only_on_gpus_without_loss_scale(device: str, precision: PrecisionName, fused: bool) -> None:
    config = OptimizerConfig(name="adamw", lr=0.1)
    groups = parameter_groups([torch.nn.Parameter(torch.ones(2, 2))], config)
    made = torch_optimizer(groups, config, device=device, precision=precision)
    assert made.defaults["fused"] is fused


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_kernel_for_gpus_updates_shards_as_it_updates_whole_tensors(
    name: Literal["adamw", "sgd"], group: None
) -> None:
    config = OptimizerConfig(name=name, lr=0.1, momentum=0.9 if name == "sgd" else 0.0)
    whole = torch.nn.Parameter(torch.arange(6.0).reshape(3, 2))
    cut = torch.nn.Parameter(distribute_tensor(whole.detach().clone(), init_device_mesh("cpu", (1,)), [Shard(0)]))
    for parameter in (whole, cut):
        optimizer = torch_optimizer(parameter_groups([parameter], config), config, device="cuda:0", precision="fp32")
        for _ in range(2):
            parameter.square().sum().backward()
            optimizer.step()
    assert isinstance(cut.data, DTensor)
    torch.testing.assert_close(cut.data.full_tensor(), whole.data, rtol=0, atol=0)


@pytest.mark.parametrize(("fused", "device"), [(False, "cpu"), (True, "meta")])
def test_updates_are_counted_where_the_kernel_reads_the_number(fused: bool, device: str) -> None:
    """A fused kernel on a GPU would read a number on the CPU by an address that is not its own."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    optimizer.param_groups[0]["fused"] = fused
    read = torch.tensor(3.0, dtype=torch.float64)
    count = update_count(read, optimizer, torch.empty(2, device="meta"))
    assert (count.device.type, count.dtype) == (device, torch.float32)
    assert count is not read
