"""torch's optimizers of the reference backends: in one kernel on GPUs, but not where that kernel would be wrong."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from conformance.numerics.float64_tier import exact_tier
from conformance.oracle.optimizer import COEFFICIENTS, AdamW, Muon, make_optimizer, orthogonalized
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


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_updates_matrices_of_layers_as_the_oracle_does_and_adamw_all_else(
    shape: tuple[int, int], adjust_lr: Literal["original", "match_rms_adamw"], nesterov: bool
) -> None:
    config = OptimizerConfig(
        name="muon", lr=0.1, momentum=0.9, weight_decay=0.3, nesterov=nesterov, adjust_lr=adjust_lr
    )
    names = "model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.layers.0.norm.weight"
    draw = torch.Generator().manual_seed(1)
    sizes = dict(zip(names, (shape, shape, shape[:1]), strict=True))
    start = {name: torch.randn(size, dtype=torch.float64, generator=draw) for name, size in sizes.items()}
    parameters = {name: torch.nn.Parameter(weight.clone()) for name, weight in start.items()}
    oracles = {name: make_optimizer(config, name, weight.ndim) for name, weight in start.items()}
    assert [type(one) for one in oracles.values()] == [Muon, AdamW, AdamW]
    with exact_tier():
        groups = parameter_groups([*parameters.values()], config, matrices=[parameters[names[0]]])
        optimizer = torch_optimizer(groups, config, device="cpu", precision="exact")
        for step in range(3):
            for parameter in parameters.values():
                parameter.grad = torch.randn(parameter.shape, dtype=torch.float64, generator=draw)
            if step == 2:  # a checkpoint replaces groups and state of both
                optimizer.load_state_dict(optimizer.state_dict())
            gradients = {
                name: parameter.grad.clone() for name, parameter in parameters.items() if parameter.grad is not None
            }
            optimizer.step()
            start = {
                name: one.step({name: start[name]}, {name: gradients[name]}, 0.1)[name] for name, one in oracles.items()
            }
            for name, parameter in parameters.items():
                torch.testing.assert_close(parameter.data, start[name], rtol=1e-12, atol=1e-12)


def test_singular_values_come_near_to_1() -> None:
    matrix = torch.randn(40, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    for half in (False, True):
        found = orthogonalized(matrix, COEFFICIENTS["simple"] * 5, half=half)
        sizes = (left.mT @ found @ right.mT).diagonal()
        assert ((sizes > 0.5) & (sizes < 1.5)).all(), sizes


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("count", [1, 5, 7])
def test_a_newton_schulz_step_changes_singular_values_by_its_polynomial(
    coefficients: Literal["simple", "quintic"], count: int
) -> None:
    config = OptimizerConfig(
        name="muon",
        lr=1.0,
        momentum=0.9,
        nesterov=False,
        adjust_lr="spectral",
        ns_steps=count,
        ns_coefficients=coefficients,
    )
    gradient = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left, sizes, right = torch.linalg.svd(gradient, full_matrices=False)
    sizes = sizes / gradient.norm()
    for step in range(count):
        a, b, c = COEFFICIENTS[coefficients][step % len(COEFFICIENTS[coefficients])]
        sizes = a * sizes + b * sizes**3 + c * sizes**5
    name = "layers.0.mlp.down_proj.weight"
    moved = make_optimizer(config, name, 2).step({name: torch.zeros_like(gradient)}, {name: gradient}, 1.0)[name]
    torch.testing.assert_close(moved, -(6**0.5) * left * sizes @ right, rtol=1e-12, atol=1e-12)


def test_fused_projections_are_one_matrix_and_their_biases_are_not() -> None:
    layer = [f"model.layers.1.{name}" for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")]
    mlp = [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")]
    weights, biases = [f"{name}.weight" for name in (*layer, *mlp)], [f"{name}.bias" for name in layer]
    config = OptimizerConfig(
        name="muon",
        lr=1.0,
        momentum=0.9,
        nesterov=False,
        adjust_lr="original",
        fused_matrices=("qkv_proj", "gate_up_proj"),
    )
    found = config.matrices([*weights, *biases])
    attention, gated = "model.layers.1.self_attn.qkv_proj.weight", "model.layers.1.mlp.gate_up_proj.weight"
    assert {name: set(parts) for name, parts in found.items() if len(parts) > 1} == {
        attention: set(weights[:3]),
        gated: set(weights[3:5]),
    }
    assert {name for name, parts in found.items() if parts == (name,)} == {weights[5], *biases}
    assert config.orthogonalizes(attention, 2)
    apart = replace(config, fused_matrices=())
    assert apart.matrices(weights) == {name: (name,) for name in weights}


@pytest.mark.parametrize(("fused", "device"), [(False, "cpu"), (True, "meta")])
def test_updates_are_counted_where_the_kernel_reads_the_number(fused: bool, device: str) -> None:
    """A fused kernel on a GPU would read a number on the CPU by an address that is not its own."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    optimizer.param_groups[0]["fused"] = fused
    read = torch.tensor(3.0, dtype=torch.float64)
    count = update_count(read, optimizer, torch.empty(2, device="meta"))
    assert (count.device.type, count.dtype) == (device, torch.float32)
    assert count is not read
