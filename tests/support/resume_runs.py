"""Runs tasks of tests/support/resume_tasks.py in ranks with the inputs of a small cell."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cells import BACKENDS, cell_of

from conformance.backends.protocol import BackendEntry
from conformance.data.inputs import prepare_inputs
from conformance.runtime import Outcome, Pool, WorkerGroupConfig
from conformance.spec.precision import PrecisionName
from conformance.spec.scenario import scenario_to_json

ENTRIES = {**BACKENDS, "plain": BackendEntry(name="plain", target="plain_backend:Plain")}
STEPS, ROWS, DROPOUT = 3, 12, 0.1


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Runs tasks of one backend and layout. ``folder``: for inputs and logs."""

    pool: Pool
    folder: Path
    backend: str
    layout: str
    precision: PrecisionName = "fp32"

    def __call__(self, task: str, *, fresh: bool = False, dropout: bool = False, **arguments: Any) -> list[Any]:
        """The ranks' results. ``dropout``: the model's configuration has dropout in attention."""
        outcome = self.outcome(task, fresh=fresh, dropout=dropout, **arguments)
        assert outcome.state == "done", outcome.reason
        return outcome.results

    def outcome(self, task: str, *, fresh: bool = False, dropout: bool = False, **arguments: Any) -> Outcome:
        entry = ENTRIES[self.backend]
        name = "sft-sgd" if self.backend == "plain" else "sft-packed"
        cell = cell_of("fsdp2", name, "llama", self.layout, self.precision, rows=ROWS, steps=STEPS, accumulation=1)
        frozen = prepare_inputs(cell.scenario, self.folder)
        model = frozen.models["policy"]
        if dropout:
            config = json.loads((model / "config.json").read_text(encoding="utf-8")) | {"attention_dropout": DROPOUT}
            (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return self.pool.run(
            key=f"{self.backend} resumed",
            config=WorkerGroupConfig(
                size=cell.world_size,
                device="cpu",
                preload=(entry.target.partition(":")[0], "conformance.worker.phase", *entry.load().preload),  # type: ignore[attr-defined]
            ),
            task=task if ":" in task else f"resume_tasks:{task}",
            kwargs={
                "training": {
                    "target": entry.target,
                    "scenario": scenario_to_json(cell.scenario),
                    "layout": self.layout,
                    "models": {"policy": str(model)},
                    "batches": str(frozen.batches),
                },
                **arguments,
            },
            log_dir=self.folder / "logs",
            budget_s=120.0,
            fresh=fresh,
        )
