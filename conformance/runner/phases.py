"""Runs the phases of a cell in worker groups; every phase after the first runs in new processes.

The result has the failure, and whether the ranks had run other cells before, one of which may then be the cause.

A phase reaches nothing of the phases before it, but what they saved, and that in another place. Their worker groups
have ended, and their folders lie next to the output folder until the last phase is done. As a control, a phase may load
once more from a copy whose tensors were changed, which must fail or show.
"""

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.backends.faults import needs_in_words
from conformance.backends.protocol import BackendEntry
from conformance.backends.registry import adapter_of
from conformance.core.io import write_file
from conformance.data.inputs import FrozenInputs
from conformance.judge.tolerance import largest_rounding
from conformance.matrix.cell import TASK, Cell, Phase, PhaseSpec
from conformance.models.synthetic import is_large, with_other_numbers
from conformance.records.record_format import CONTROL, dumps, read_lines
from conformance.results.bisection import Bisected, bisected_from_json
from conformance.runner.resource_estimate import leased_bytes
from conformance.runtime import Device, Outcome, Pool, WorkerGroupConfig
from conformance.runtime.failure import FailureKind
from conformance.spec.scenario import scenario_to_json

DRAW: int | None = None  # see PhaseSpec.draw; tests set a number


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
    pool: Pool,
    cell: Cell,
    inputs: FrozenInputs,
    folder: Path,
    *,
    device: Device,
    budget_s: float,
    fresh: bool,
    alone: bool = False,
    aside: Path,
    hidden: Path | None = None,
    controlled: bool = False,
) -> PhasesEnded:
    """Runs the phases in order, phase N in ``folder/N``, until one fails.

    fresh: whether the first phase also runs in new processes, which have run no other cell. alone: whether each phase
    runs while no other task does.
    aside: a new folder that no rank is told, on the same disk; the folders of earlier phases lie there meanwhile, and
    so does ``hidden``, the folder of an earlier attempt. controlled: whether phases load once more as a control.
    """
    used, met = False, Counter[str]()
    with _moving(aside) as move:
        if hidden and hidden.exists():
            move(hidden, aside / hidden.name)
        for number, phase in enumerate(cell.phases):
            outcome = _run_phase(
                pool, cell, number, inputs, folder, device=device, budget_s=budget_s, fresh=fresh, alone=alone
            )
            used = used or outcome.used
            if outcome.state == "failed":
                where = f"phase {number + 1} of {len(cell.phases)}: " if len(cell.phases) > 1 else ""
                return PhasesEnded(failure=where + outcome.reason, kind=outcome.kind, used=used)
            for of_rank in outcome.results:
                met.update(of_rank)
            if number and controlled and not cell.faults:
                _control(pool, cell, number, inputs, folder, device=device, budget_s=budget_s)
            if phase.save:
                move(folder / str(number), aside / str(number))
                move(aside / str(number) / "saved", folder / str(number + 1) / LOADED)
    return PhasesEnded(failure=_not_met(cell, met), kind="", used=used)


LOADED = "loaded"  # in a phase's folder: what the phase before saved


@contextlib.contextmanager
def _moving(aside: Path) -> Iterator[Callable[[Path, Path], None]]:
    """Yields a function that moves a folder, and moves all of them back at the end. ``aside``: removed at the end."""
    moved: list[tuple[Path, Path]] = []

    def move(source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
        moved.append((source, target))

    try:
        yield move
    finally:
        for source, target in reversed(moved):
            target.rename(source)
        shutil.rmtree(aside, ignore_errors=True)


def _not_met(cell: Cell, met: Counter[str]) -> str:
    """Returns a failure if a planted fault was never called on any rank, because such a cell proves nothing; else
    empty."""
    for name in cell.faults:
        if not met[name]:
            return f"fault {name!r} was never called in this cell, so it changed nothing; {needs_in_words(name)}"
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
    alone: bool,
) -> Outcome:
    phase, own = cell.phases[number], folder / str(number)
    inputs = _begun(cell, number, inputs, own)
    return pool.run(
        key=phase.backend.name,
        config=_sized_config(cell, phase, device),
        task=TASK,
        kwargs=phase_spec(cell, number, inputs, own, own / LOADED if number else None).kwargs,
        log_dir=own / "logs",
        budget_s=budget_s,
        fresh=fresh or number > 0 or adapter_of(phase.backend).traits.fresh_ranks,
        keep=not phase.save,
        alone=alone,
        about=str(cell),
    )


def _begun(cell: Cell, number: int, inputs: FrozenInputs, own: Path) -> FrozenInputs:
    """Returns the inputs of a phase. One that loads a training state begins with models of other numbers."""
    if not number or cell.phases[number - 1].save not in ("checkpoint", "state"):
        return inputs
    trained = [role.name for role in cell.scenario.objective.roles if role.trained]
    begun = {name: own / "begun" / name for name in trained}
    models = {
        name: path if path.exists() else with_other_numbers(inputs.models[name], path) for name, path in begun.items()
    }
    return replace(inputs, models={**inputs.models, **models})


def _control(
    pool: Pool, cell: Cell, number: int, inputs: FrozenInputs, folder: Path, *, device: Device, budget_s: float
) -> None:
    """Loads once more from a copy whose tensors were changed, and writes into the phase's record what came of it."""
    phase, own = cell.phases[number], folder / str(number)
    control = own / "control"
    shutil.rmtree(control, ignore_errors=True)
    shutil.copytree(own / LOADED, control / LOADED)
    changed = [file for file in (control / LOADED).rglob("*") if change_tensors(file)]
    if not changed:
        return
    spec = phase_spec(cell, number, _begun(cell, number, inputs, own), control, control / LOADED)
    outcome = pool.run(
        key=phase.backend.name,
        config=_sized_config(cell, phase, device),
        task=TASK,
        kwargs=replace(spec, steps=0, save=None).kwargs,
        log_dir=own / "logs" / "control",
        budget_s=budget_s,
        keep=False,
    )
    came = "failed" if outcome.state == "failed" else "differs"
    if outcome.state == "done":
        loaded, changed = (read_lines(one / "record").loaded["tensors"] for one in (own, control))
        came = "same" if loaded and changed and loaded["sha256"] == changed["sha256"] else "differs"
    write_file(own / "record" / CONTROL, dumps({"control": came}))
    shutil.rmtree(control)


TEXTS = (".json", ".jinja", ".model", ".py", ".txt")
_OTHER_BYTES = bytes(byte ^ 1 for byte in range(256))


def change_tensors(file: Path) -> bool:
    """Changes every byte in the middle half of a file that may hold tensors, and returns whether it did.

    The rest of such a file has its structure.
    """
    if not file.is_file() or file.suffix in TEXTS:
        return False
    content = file.read_bytes()
    begin, end = len(content) // 4, 3 * len(content) // 4
    file.write_bytes(content[:begin] + content[begin:end].translate(_OTHER_BYTES) + content[end:])
    return True


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
        config=_sized_config(cell, phase, device),
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
            "bound": largest_rounding(cell.scenario.precision),
        },
        log_dir=folder / "comparison",
        budget_s=budget_s,
    )
    if outcome.state == "failed":
        raise TraceFailed(f"the activations of {cell} could not be compared: {outcome.reason}")
    return bisected_from_json(outcome.results[0])


def import_ahead(pool: Pool, waiting: Iterable[Cell], device: Device) -> None:
    """Starts to import the backends of the first waiting cell, and of the next cell with other backends; if cells run
    side by side, all backends."""
    backends: set[BackendEntry] = set()
    for cell in waiting:
        new = {phase.backend: phase for phase in cell.phases if phase.backend not in backends}
        for phase in new.values():
            pool.prepare(_sized_config(cell, phase, device))
        if backends and new and not pool.is_shared:
            return
        backends |= new.keys()


def _sized_config(cell: Cell, phase: Phase, device: Device) -> WorkerGroupConfig:
    """Returns ``group_config`` with the memory that a rank of a large model needs of its GPU."""
    memory = leased_bytes(cell) if device == "cuda" and is_large(cell.scenario) else 0
    return replace(group_config(phase, device), rank_memory=memory)


def group_config(phase: Phase, device: Device) -> WorkerGroupConfig:
    """Returns the configuration of the worker group for a phase."""
    traits = adapter_of(phase.backend).traits
    return WorkerGroupConfig(
        size=phase.layout.world_size,
        device=device,
        preload=traits.preload_for(phase.layout),
        gpu_backend=traits.gpu_backend,
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
        draw=DRAW,
    )
