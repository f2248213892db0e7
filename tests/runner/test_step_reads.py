"""What a training step reads of the device, where each read waits for it: nobody pays for what is not observed."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cells import exhaustive, ranks_of, slow

from conformance.core.host import FIXTURES
from conformance.runtime import Pool
from conformance.spec.layout import Layout
from conformance.spec.scenario import load_scenario, scenario_to_json


def reads(pool: Pool, tmp_path: Path, backend: str, layout: str, *, accumulation: int) -> dict[str, Any]:
    """By whether rows are asked for: the calls of a step on the first rank, and how many rows it gave."""
    data = {"rows": 2 * accumulation * Layout.parse(layout).dp}
    scenario = load_scenario(
        FIXTURES / "scenarios" / "sft-padded.toml",
        model="models/llama",
        precision="bf16",
        data_overrides=data,
        accumulation=accumulation,
        steps=2,
    )
    outcome = pool.run(
        key=backend,
        config=ranks_of(backend, Layout.parse(layout).world_size),
        task="backend_tasks:reads_of_a_step",
        kwargs={
            **{"backend": backend, "scenario": scenario_to_json(scenario), "layout": layout},
            "models": {"policy": str(FIXTURES / "models" / "llama")},
        },
        log_dir=tmp_path / f"logs-{accumulation}",
        budget_s=120,
    )
    assert outcome.state == "done", outcome.reason
    found: dict[str, Any] = outcome.results[0]
    return found


@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("fsdp2", "dp2"),
        slow("deepspeed", "dp2.zero2"),
        slow("megatron", "dp2"),
        exhaustive("fsdp2", "tp2"),
        exhaustive("fsdp2", "sp2"),
        exhaustive("deepspeed", "dp2.zero1"),
        exhaustive("deepspeed", "dp2.zero3"),
        exhaustive("megatron", "sp2"),
        exhaustive("megatron", "pp2"),
    ],
)
def test_device_reads_do_not_grow_with_micro_batches(pool: Pool, tmp_path: Path, backend: str, layout: str) -> None:
    one, three = (reads(pool, tmp_path, backend, layout, accumulation=n) for n in (1, 3))
    (few, _), (many, rows), (observed, observed_rows) = one["False"], three["False"], three["True"]
    assert rows == 0
    assert observed_rows > 0
    # transformers asks once for each micro-batch whether its rows are packed.
    assert Counter(many) - Counter(few) == Counter({"__bool__ in masking_utils.py": 2} if backend != "megatron" else {})
    assert (Counter(observed) - Counter(many)).keys() == {"cpu in trainer.py"}
    norms = 1 if backend == "fsdp2" else 0  # the other libraries read it themselves
    assert many["tolist in distributed.py"] == 1 + norms  # all numbers of the step, together
    assert not any(name.endswith(" in trainer.py") for name in many)
