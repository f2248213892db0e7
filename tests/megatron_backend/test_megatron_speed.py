"""What saves time and memory on GPUs changes no result: logits in half precision, and AdamW as one kernel."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cells import needs, ranks_of

from conformance.core.host import FIXTURES
from conformance.runtime import Pool
from conformance.spec.layout import Layout

pytestmark = needs("megatron-core")

FOLDERS = {"policy": str(FIXTURES / "models" / "pangu")}


@pytest.fixture
def run_ranks(pool: Pool, tmp_path: Path) -> Any:
    def run(task: str, layout: str) -> list[Any]:
        outcome = pool.run(
            key="megatron models",
            config=ranks_of("megatron", Layout.parse(layout).world_size),
            task=f"megatron_speed_tasks:{task}",
            kwargs={"layout": layout, "folders": FOLDERS},
            log_dir=tmp_path / "logs",
            budget_s=240.0,
        )
        assert outcome.state == "done", outcome.reason
        return outcome.results

    return run


def test_logits_in_half_precision_stay_so(run_ranks: Any) -> None:
    """megatron-core would make float32 of them, all at once, and no kernel for half precision would run."""
    assert run_ranks("logits", "tp2") == [["torch.bfloat16"], ["torch.bfloat16"]]


def test_adamw_as_one_kernel_trains_as_many_kernels_do(run_ranks: Any) -> None:
    for kernels, apart in run_ranks("fused", "dp2.zero1"):
        assert kernels == [False, True]
        assert apart < 1e-6


@pytest.mark.parametrize(
    ("device", "precision", "fused"),
    [
        ("cuda", "bf16", True),
        ("cuda", "fp32", True),
        ("cuda", "fp16", False),  # whose loss scaler the kernel would want
        ("cuda", "exact", False),  # the kernel counts steps in float32
        ("cpu", "bf16", False),
    ],
)
def test_adamw_is_one_kernel_where_that_is_right(device: str, precision: Any, fused: bool) -> None:
    from impl.interface.trainable import ContextConfig
    from impl.megatron.config import update_in_one_kernel

    inner = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    made = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)])
    config = ContextConfig(layout=Layout.parse("dp1"), precision=precision, device=device, accumulation=1, packed=False)
    update_in_one_kernel(made, config)
    assert bool(inner.param_groups[0]["fused"]) == fused
