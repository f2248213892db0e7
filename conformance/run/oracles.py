"""References: the frozen inputs and oracle runs that cells share, made once per output folder.

Oracle runs go on beside the cells, in a world of their own. Other processes on the same output folder (pytest-xdist
workers) wait for each other's and use them.
"""

import contextlib
import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from conformance.batch import write_batches
from conformance.inputs.documents import build_batches
from conformance.oracle.architecture import read_architecture
from conformance.oracle.run import PolicyName
from conformance.paths import resolve
from conformance.record.tensors import RecordError, read_record
from conformance.scenario import Scenario, scenario_to_json
from conformance.inputs.model import prepare_model
from conformance.world import Device, Outcome, Pool, WorldConfig


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What every backend and the oracle get: a Hugging Face folder and the file of frozen batches."""

    model: Path
    batches: Path


def prepare_inputs(scenario: Scenario, root: Path) -> Inputs:
    """Make the scenario's inputs under ``root/inputs``, or find them there.

    Raises ValueError for a model or data set that cannot be used.
    """
    model = root / "inputs" / f"{scenario.model_name}-{_key(scenario.model, scenario.seed)}"
    data = {"data": scenario_to_json(scenario)["data"], "steps": scenario.steps, "model": model.name}
    batches = root / "inputs" / f"batches-{_key(data)}.json"
    with _locked(root / "inputs" / "lock"):
        if not model.exists():
            read_architecture(resolve(scenario.model))  # what the oracle does not know cannot be judged
            with _complete_or_nothing(model) as folder:
                prepare_model(scenario, folder)
        if not batches.exists():
            with _complete_or_nothing(batches) as file:
                write_batches(file, build_batches(scenario, model))
    return Inputs(model=model, batches=batches)


class Oracles:
    """Runs the oracle, one run at a time, in a thread that owns a world of one rank. Use it in a ``with`` statement."""

    def __init__(self, *, root: Path, device: Device, budget_s: float) -> None:
        self._root, self._device, self._budget_s = root, device, budget_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="oracle")
        self._runs: dict[Path, Future[str]] = {}
        self._pool: Pool | None = None

    def __enter__(self) -> "Oracles":
        return self

    def __exit__(self, *_: object) -> None:
        for run in self._runs.values():
            run.cancel()
        self._thread.submit(self._close)
        self._thread.shutdown()

    def folder(self, scenario: Scenario) -> Path:
        """Holds ``float64`` and, below the exact tier, the cell's precision."""
        values = scenario_to_json(scenario.reference)
        for irrelevant in ("name", "precision"):
            values.pop(irrelevant)
        return self._root / "oracle" / f"{scenario.model_name}-{_key(values)}"

    def request(self, scenario: Scenario, inputs: Inputs) -> None:
        """Have the runs made that a cell of this scenario is judged by, if they are not made or under way."""
        policies: list[PolicyName] = ["float64", *([] if scenario.precision == "exact" else [scenario.precision])]
        for policy in policies:
            out = self.folder(scenario) / policy
            if out not in self._runs:
                self._runs[out] = self._thread.submit(self._run, scenario.reference, inputs, out, policy)

    def wait(self, scenario: Scenario) -> str:
        """Wait for the scenario's runs; returns why one failed, or nothing."""
        folder = self.folder(scenario)
        return "; ".join(filter(None, (run.result() for out, run in self._runs.items() if out.parent == folder)))

    def _run(self, scenario: Scenario, inputs: Inputs, out: Path, policy: PolicyName) -> str:
        with _locked(out.with_name(f"{policy}.lock")):
            with contextlib.suppress(RecordError):
                read_record(out)
                return ""
            shutil.rmtree(out, ignore_errors=True)  # what a run that was interrupted left
            outcome = self._outcome(scenario, inputs, out, policy)
        return "" if outcome.state == "done" else f"the oracle's {policy} run failed: {outcome.reason}"

    def _outcome(self, scenario: Scenario, inputs: Inputs, out: Path, policy: PolicyName) -> Outcome:
        self._pool = self._pool or Pool(work_dir=self._root / "worlds")
        return self._pool.run(
            key="oracle",
            # The noise of a precision is that of the device's kernels; float64 is the same everywhere.
            config=WorldConfig(
                size=1,
                device="cpu" if policy == "float64" else self._device,
                preload=("conformance.oracle.task",),
            ),
            task="conformance.oracle.task:run",
            kwargs={
                "scenario": scenario_to_json(scenario),
                "model": str(inputs.model),
                "batches": str(inputs.batches),
                "out": str(out),
                "policy": policy,
            },
            log_dir=out.with_name(f"{policy}-logs"),
            budget_s=self._budget_s,
        )

    def _close(self) -> None:
        if self._pool:
            self._pool.close()


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the file stays, locks end with their process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _complete_or_nothing(path: Path) -> Iterator[Path]:
    """A path to write to, which gets its name only when all is written."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    yield unfinished
    unfinished.rename(path)
