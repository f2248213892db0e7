"""Session: cells to verdicts. Runs each cell in a live world, waits for its oracle, judges, and keeps it all on disk.

The output folder (docs/architecture.md): ``summary.json``, ``cells/SLUG/{verdict.json,record/,logs/}``, ``oracle/``,
``inputs/``. The summary is written before the first cell and after every one, so that a session that is interrupted
shows what was not run (claim 8).
"""

import json
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from conformance.backend import ExpectedDifference, MissingExtra, Unsupported
from conformance.plan.cell import Cell, package_version
from conformance.judge.verdict import Verdict, judge_folder
from conformance.run.oracles import Inputs, Oracles, prepare_inputs
from conformance.record.results import Entry, apply_expectation, write_entry, write_summary
from conformance.scenario import scenario_to_json
from conformance.world import Device, Outcome, Pool, WorldConfig

PACKAGES = ("torch", "transformers", "ring-flash-attn", "deepspeed", "megatron-core")  # whose versions a summary keeps


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """``command`` is what the user ran; ``arguments``, which select cells, make a cell's reproduce command."""

    out: Path
    device: Device = "cpu"
    profile: str = ""
    command: str = ""
    arguments: tuple[str, ...] = ()
    budget_s: float = 300.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """A judged cell."""

    cell: Cell
    verdict: Verdict
    seconds: float = 0.0


class Session:
    """Use it in a ``with`` statement; no process is left after it."""

    def __init__(self, config: SessionConfig) -> None:
        self.config = config
        self._entries: dict[str, Entry] = {}

    def __enter__(self) -> "Session":
        self._started = datetime.now(UTC)
        self._clock = time.monotonic()
        self.config.out.mkdir(parents=True, exist_ok=True)
        self._pool = Pool(work_dir=self.config.out / "worlds")
        self._oracles = Oracles(root=self.config.out, device=self.config.device, budget_s=self.config.budget_s)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()
        self._oracles.__exit__()

    def run_all(self, cells: Sequence[Cell], *, progress: Callable[[Result], None]) -> None:
        """Run and judge the cells one after another; their oracles are computed meanwhile."""
        self.announce(cells)
        for cell in cells:
            if not self._refusal(cell):
                self._request(cell)
        for cell in cells:
            result = self.run(cell)
            self.write_summary(finished=False)
            progress(result)
        self.write_summary(finished=True)

    def announce(self, cells: Sequence[Cell]) -> None:
        """Put every cell into the output folder as not run, so that none is forgotten if the session is cut short."""
        for cell in cells:
            self._keep(Result(cell=cell, verdict=Verdict(state="not_run", reason="the run ended before this cell")))
        self.write_summary(finished=False)

    def run(self, cell: Cell) -> Result:
        """Run one cell in its world and judge it; writes the cell's verdict."""
        began = time.monotonic()
        verdict = self._run(cell)
        result = Result(cell=cell, verdict=verdict, seconds=time.monotonic() - began)
        self._keep(result)
        return result

    def _run(self, cell: Cell) -> Verdict:
        if refusal := self._refusal(cell):
            return Verdict(state="unsupported", reason=refusal)
        inputs = self._request(cell)
        folder = self._folder(cell)
        outcome = self._run_in_world(cell, inputs, folder)
        if failure := self._oracles.wait(cell.scenario):
            return Verdict(state="infrastructure", reason=failure)
        if outcome.state == "failed":
            return Verdict(state="infrastructure", reason=outcome.reason)
        verdict = judge_folder(folder / "record", self._oracles.folder(cell.scenario))
        known = _expectation(cell)
        return apply_expectation(verdict, asdict(known) if known else None)

    def _request(self, cell: Cell) -> Inputs:
        inputs = prepare_inputs(cell.scenario, self.config.out)
        self._oracles.request(cell.scenario, inputs)
        return inputs

    def _refusal(self, cell: Cell) -> str:
        """Why the cell cannot be run at all, in words for the user; empty if it can.

        Raises ValueError for a model or data set that cannot be used: that is no property of the cell.
        """
        model = prepare_inputs(cell.scenario, self.config.out).model
        try:
            answer = cell.backend.load().supports(cell.scenario, cell.layout)
        except MissingExtra as error:
            return str(error)
        if isinstance(answer, Unsupported):
            return answer.reason
        data, accumulation = cell.scenario.data, cell.scenario.accumulation
        try:
            cell.layout.validate(**_sizes(model), rows=data.rows, accumulation=accumulation)
        except ValueError as error:
            return str(error)
        gpus = torch.cuda.device_count()
        if self.config.device == "cuda" and gpus < cell.layout.world_size:
            return f"needs {cell.layout.world_size} GPUs, {gpus} visible; a layout of at most {gpus} ranks would run"
        return ""

    def _run_in_world(self, cell: Cell, inputs: Inputs, folder: Path) -> Outcome:
        return self._pool.run(
            key=cell.backend.name,
            config=world_config(cell, self.config.device),
            task="conformance.plan.cell:run_cell",
            kwargs=task_arguments(cell, inputs, folder / "record"),
            log_dir=folder / "logs",
            budget_s=self.config.budget_s,
        )

    def _folder(self, cell: Cell) -> Path:
        return self.config.out / "cells" / cell.slug

    def _keep(self, result: Result) -> None:
        cell, folder = result.cell, self._folder(result.cell)
        has_record = (folder / "record").is_dir()
        completed = result.verdict.state not in ("infrastructure", "not_run", "unsupported")
        known = _expectation(cell)
        details = {
            "cell": str(cell),
            "scenario": cell.scenario.name,
            "model": cell.scenario.model_name,
            "backend": cell.backend.name,
            "layout": str(cell.layout),
            "precision": cell.scenario.precision,
            "world_size": cell.layout.world_size,
            "seconds": result.seconds,
            "folder": f"cells/{cell.slug}",
            "completed": completed,  # otherwise the record, if there is one, is not to be judged again
            "record": "record" if has_record else None,
            "oracle": os.path.relpath(self._oracles.folder(cell.scenario) / "float64", folder) if has_record else None,
            "expected": asdict(known) if known else None,
            "reproduce": shlex.join(["parity", "run", *self.config.arguments, "--cells", str(cell)]),
        }
        self._entries[str(cell)] = Entry(details=details, verdict=result.verdict)
        write_entry(self.config.out, self._entries[str(cell)])

    def write_summary(self, *, finished: bool) -> None:
        """Write ``summary.json`` with what is known so far."""
        run = {
            "started": self._started.isoformat(timespec="seconds"),
            "finished": datetime.now(UTC).isoformat(timespec="seconds") if finished else None,
            "seconds": round(time.monotonic() - self._clock, 2),
            "profile": self.config.profile,
            "device": self.config.device,
            "command": self.config.command or shlex.join(["parity", "run", *self.config.arguments]),
            "environment": environment(),
        }
        write_summary(self.config.out, run, list(self._entries.values()))


def world_config(cell: Cell, device: Device) -> WorldConfig:
    """The world that a cell runs in: its size, and what its backend is slow to import."""
    preload = (cell.backend.target.partition(":")[0], "conformance.plan.cell", *getattr(cell.backend.load(), "preload", ()))
    return WorldConfig(size=cell.layout.world_size, device=device, preload=preload)


def task_arguments(cell: Cell, inputs: Inputs, record: Path) -> dict[str, Any]:
    """The arguments of conformance.plan.cell.run_cell, as JSON values."""
    return {
        "cell": str(cell),
        "target": cell.backend.target,
        "scenario": scenario_to_json(cell.scenario),
        "layout": str(cell.layout),
        "weights": str(inputs.model),
        "batches": str(inputs.batches),
        "record": str(record),
        "planted": list(cell.faults),
    }


def _expectation(cell: Cell) -> ExpectedDifference | None:
    """What the backend says must differ about this cell. A backend that cannot be imported says nothing.

    A planted fault is no known defect: it has to be found wherever it is planted.
    """
    if cell.faults:
        return None
    try:
        known: tuple[ExpectedDifference, ...] = getattr(cell.backend.load(), "expected", ())
    except MissingExtra:
        return None
    return next((k for k in known if k.means(str(cell))), None)


def environment() -> dict[str, Any]:
    """What a reader needs in order to see the same numbers."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": _gpus(),
        "cuda": torch.version.cuda,
        **{name: package_version(name) for name in PACKAGES},
    }


def _gpus() -> list[str]:
    """Name and driver of each GPU of the host, asked without creating a CUDA context in this process."""
    if not torch.cuda.device_count():
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()


def _sizes(model: Path) -> dict[str, int]:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    if "num_attention_heads" not in config:
        raise ValueError(f"{model}/config.json does not say num_attention_heads; this is no model that the suite knows")
    heads = config["num_attention_heads"]
    return {
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "layers": config["num_hidden_layers"],
    }
