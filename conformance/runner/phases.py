"""Runs the phases of a cell in worker groups; every phase after the first runs in new processes.

The result has the failure, and whether the ranks had run other cells before, one of which may then be the cause.
"""

import secrets
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.backends.faults import find_fault
from conformance.backends.protocol import BackendEntry
from conformance.backends.registry import adapter_of
from conformance.data.prepare import FrozenInputs
from conformance.matrix.cell import Cell, Phase
from conformance.models.synthetic import with_other_numbers
from conformance.results.bisection import Bisected, bisected_from_json
from conformance.runtime import Device, Outcome, Pool, WorkerGroupConfig
from conformance.runtime.failure import FailureKind
from conformance.spec.scenario import scenario_to_json
from conformance.worker.phase_spec import TASK, PhaseSpec


@dataclass(frozen=True, kw_only=True)
class PhasesEnded:
    """Holds how the phases of a cell ended.

    failure: why a phase failed; empty if none did. kind: the kind of the failure.
    used: whether ranks of a phase had run another cell before.
    """

    failure: str
    kind: FailureKind
    used: bool


def run_phases(
    pool: Pool, cell: Cell, inputs: FrozenInputs, folder: Path, *, device: Device, budget_s: float, fresh: bool
) -> PhasesEnded:
    """Runs the phases in order, phase N in ``folder/N``, until one fails.

    fresh: whether the first phase also runs in new processes, which have run no other cell.
    """
    used, met = False, Counter[str]()
    for number in range(len(cell.phases)):
        outcome = _run_phase(pool, cell, number, inputs, folder, device=device, budget_s=budget_s, fresh=fresh)
        used = used or outcome.used
        if outcome.state == "failed":
            where = f"phase {number + 1} of {len(cell.phases)}: " if len(cell.phases) > 1 else ""
            return PhasesEnded(failure=where + outcome.reason, kind=outcome.kind, used=used)
        for of_rank in outcome.results:
            met.update(of_rank)
    return PhasesEnded(failure=_not_met(cell, met), kind="", used=used)


def _not_met(cell: Cell, met: Counter[str]) -> str:
    """Returns a failure if a planted fault was never called on any rank, because such a cell proves nothing; else
    empty."""
    for name in cell.faults:
        if not met[name]:
            needs = find_fault(name).needs
            return f"fault {name!r} was never called in this cell, so it changed nothing; it needs {needs}"
    return ""


def _run_phase(
    pool: Pool,
    cell: Cell,
    number: int,
    inputs: FrozenInputs,
    folder: Path,
    *,
    device: Device,
    budget_s: float,
    fresh: bool,
) -> Outcome:
    phase = cell.phases[number]
    saved_before = folder / str(number - 1) / "saved" if number else None
    if number and cell.phases[number - 1].save in ("checkpoint", "state"):
        trained = [role.name for role in cell.scenario.objective.roles if role.trained]
        begun = folder / str(number) / "begun"
        models_with_other_numbers = {name: with_other_numbers(inputs.models[name], begun / name) for name in trained}
        inputs = replace(inputs, models={**inputs.models, **models_with_other_numbers})
    return pool.run(
        key=phase.backend.name,
        config=group_config(phase, device),
        task=TASK,
        kwargs=phase_spec(cell, number, inputs, folder / str(number), saved_before).kwargs,
        log_dir=folder / str(number) / "logs",
        budget_s=budget_s,
        fresh=fresh or number > 0 or adapter_of(phase.backend).traits.fresh_ranks,
    )


class TraceFailed(Exception):
    """Reports that a cell could not be traced; the message says why."""


def run_traced(
    pool: Pool, cell: Cell, inputs: FrozenInputs, folder: Path, *, step: int, device: Device, budget_s: float
) -> None:
    """Runs the first phase up to ``step``; writes its record to ``folder/record``, and the activations of ``step`` to
    ``folder/trace``. Raises TraceFailed."""
    phase = cell.phases[0]
    spec = phase_spec(cell, 0, inputs, folder, None).traced(step, folder / "trace")
    shutil.rmtree(folder, ignore_errors=True)
    outcome = pool.run(
        key=phase.backend.name,
        config=group_config(phase, device),
        task=TASK,
        kwargs=spec.kwargs,
        log_dir=folder / "logs",
        budget_s=budget_s,
        fresh=adapter_of(phase.backend).traits.fresh_ranks,
    )
    if outcome.state == "failed":
        raise TraceFailed(f"{cell} failed while it was traced: {outcome.reason}")


def find_in_traced(
    pool: Pool, cell: Cell, inputs: FrozenInputs, folder: Path, oracle: Path, *, step: int, budget_s: float
) -> tuple[Bisected, ...]:
    """Compares the activations that ``run_traced`` wrote to ``folder`` with the oracle's, in a separate process. Raises
    TraceFailed."""
    outcome = pool.run(
        key="bisect",
        config=WorkerGroupConfig(size=1, device="cpu", preload=("conformance.bisect.locate",)),
        task="conformance.bisect.locate:find",
        kwargs={
            "scenario": scenario_to_json(cell.scenario.reference),
            "models": {role: str(path) for role, path in inputs.models.items()},
            "batches": str(inputs.batches),
            "oracle": str(oracle),
            "traced": str(folder),
            "step": step,
        },
        log_dir=folder / "comparison",
        budget_s=budget_s,
    )
    if outcome.state == "failed":
        raise TraceFailed(f"the activations of {cell} could not be compared: {outcome.reason}")
    return bisected_from_json(outcome.results[0])


def import_ahead(pool: Pool, waiting: Iterable[Cell], device: Device) -> None:
    """Starts to import the backends of the first waiting cell, and of the next cell with other backends."""
    backends: set[BackendEntry] = set()
    for cell in waiting:
        new = {phase.backend: phase for phase in cell.phases if phase.backend not in backends}
        for phase in new.values():
            pool.prepare(group_config(phase, device))
        if backends and new:
            return
        backends |= new.keys()


def group_config(phase: Phase, device: Device) -> WorkerGroupConfig:
    """Returns the configuration of the worker group for a phase."""
    return WorkerGroupConfig(
        size=phase.layout.world_size,
        device=device,
        preload=adapter_of(phase.backend).traits.preload_for(phase.layout),
        python=phase.backend.python,
    )


def phase_spec(cell: Cell, number: int, inputs: FrozenInputs, folder: Path, saved_before: Path | None) -> PhaseSpec:
    """Returns the specification of phase ``number`` for its ranks.

    folder: the phase's folder. saved_before: the folder that the previous phase has saved; None for the first phase.
    """
    phase, models = cell.phases[number], inputs.models
    loads = cell.phases[number - 1].save if number else None
    exported = loads in ("export", "merge")
    if exported and saved_before:
        models = {role: saved_before / role for role in models}
    return PhaseSpec(
        cell=str(cell),
        target=phase.backend.target,
        scenario=cell.scenario,
        layout=phase.layout,
        models=models,
        batches=inputs.batches,
        first_step=cell.first_steps[number],
        steps=phase.steps,
        load=(loads, saved_before) if saved_before and loads in ("checkpoint", "state") else None,
        merged=loads == "merge",
        save=(phase.save, folder / "saved") if phase.save else None,
        record=folder / "record",
        planted=cell.faults,
        draw=secrets.randbits(32),
    )
