"""torch's optimizers of the reference backends: in one kernel on GPUs, but not where that kernel would be wrong."""

import pytest
import torch

from conformance.scenario import OptimizerConfig, Precision
from impl.optimizers import parameter_groups, torch_optimizer


@pytest.mark.parametrize("name", ["adamw", "sgd"])
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
def test_the_fused_kernel_is_for_gpus_and_neither_for_loss_scales_nor_for_the_exact_tier(
    name: str, device: str, precision: Precision, fused: bool
) -> None:
    config = OptimizerConfig(name=name, lr=0.1)  # type: ignore[arg-type]
    groups = parameter_groups([torch.nn.Parameter(torch.ones(2, 2))], config)
    made = torch_optimizer(groups, config, device=device, precision=precision)
    assert made.defaults["fused"] is fused
