"""Session: cells to verdicts. Runs the legs of each cell in live worlds, waits for its oracle, judges, keeps it all.

The output folder (docs/architecture.md): ``summary.json``, ``cells/SLUG/{verdict.json,legs/}``, ``oracle/``,
``inputs/``. The summary is written before the first cell and after every one, so that a session that is interrupted
shows what was not run (claim 9).
"""

import os
import shlex
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from conformance.backend import BackendEntry, ExpectedDifference, MissingExtra, Unsupported
from conformance.inputs.prepare import FrozenInputs, prepare_inputs
from conformance.judge.expected import apply_expectation
from conformance.judge.verdict import judge_folders
from conformance.objective import all_observables
from conformance.oracle.objectives import functions_of
from conformance.plan.cell import Cell, Leg
from conformance.record.results import Entry, Run, Verdict, write_entry, write_summary
from conformance.run.environment import environment, model_sizes
from conformance.run.oracles import Oracles
from conformance.scenario import scenario_to_json
from conformance.world import Device, Outcome, Pool, WorldConfig


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
class JudgedCell:
    """A cell with its verdict."""

    cell: Cell
    verdict: Verdict
    seconds: float = 0.0
    completed: bool = False


class Session:
    """Use it in a ``with`` statement; no process is left after it."""

    def __init__(self, config: SessionConfig) -> None:
        self.config = config
        self._entries: dict[str, Entry] = {}

    def __enter__(self) -> "Session":
        self._started = datetime.now(UTC)
        self._clock = time.monotonic()
        self._environment = environment()
        self.config.out.mkdir(parents=True, exist_ok=True)
        self._pool = Pool(work_dir=self.config.out / "worlds")
        self._oracles = Oracles(root=self.config.out, device=self.config.device, budget_s=self.config.budget_s)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()
        self._oracles.__exit__()

    def run_all(self, cells: Sequence[Cell], *, progress: Callable[[JudgedCell], None]) -> None:
        """Run and judge the cells one after another; their oracles are computed meanwhile."""
        self.announce(cells)
        waiting = deque(cell for cell in cells if not self.refusal(cell))
        for cell in waiting:
            self._request(cell)
        for cell in cells:
            if waiting and cell is waiting[0]:
                self._import_ahead(waiting)
                waiting.popleft()
            judged = self.run(cell)
            self.write_summary(finished=False)
            progress(judged)
        self.write_summary(finished=True)

    def _import_ahead(self, waiting: Iterable[Cell]) -> None:
        """Have the backends of the first cell imported, and beside it those of the next cell that has others."""
        backends: set[BackendEntry] = set()
        for cell in waiting:
            new = {leg.backend: leg for leg in cell.legs if leg.backend not in backends}
            for leg in new.values():
                self._pool.prepare(world_config(leg, self.config.device))
            if backends and new:
                return
            backends |= new.keys()

    def announce(self, cells: Sequence[Cell]) -> None:
        """Put every cell into the output folder as not run, so that none is forgotten if the session is cut short."""
        for cell in cells:
            self._keep(JudgedCell(cell=cell, verdict=Verdict(state="not_run", reason="the run ended before this cell")))
        self.write_summary(finished=False)

    def run(self, cell: Cell) -> JudgedCell:
        """Run one cell, leg after leg, and judge it; writes the cell's verdict."""
        began = time.monotonic()
        verdict, completed = self._run(cell)
        judged = JudgedCell(cell=cell, verdict=verdict, seconds=time.monotonic() - began, completed=completed)
        self._keep(judged)
        return judged

    def _run(self, cell: Cell) -> tuple[Verdict, bool]:
        """The verdict, and whether all legs came to their end."""
        if refusal := self.refusal(cell):
            return Verdict(state="unsupported", reason=refusal), False
        inputs = self._request(cell)
        failure = self._run_legs(cell, inputs)
        if missing := self._oracles.wait(cell):
            return Verdict(state="infrastructure", reason=missing), not failure
        if failure:
            return Verdict(state="infrastructure", reason=failure), False
        legs = [self._leg_folder(cell, number) for number in range(len(cell.legs))]
        verdict = judge_folders([leg / "record" for leg in legs], self._oracles.folder(cell))
        if verdict.state == "conforms":
            for leg in legs:
                shutil.rmtree(leg / "saved", ignore_errors=True)  # what differs is kept for whoever looks into it
        known = _expectation(cell)
        return apply_expectation(verdict, asdict(known) if known else None), True

    def _request(self, cell: Cell) -> FrozenInputs:
        inputs = prepare_inputs(cell.scenario, self.config.out)
        self._oracles.request(cell, inputs)
        return inputs

    def refusal(self, cell: Cell) -> str:
        """Why the cell cannot be run at all, in words for the user; empty if it can.

        Raises UsageError for a model, data set or objective that cannot be used: that is no property of the cell.
        """
        functions_of(cell.scenario.objective)
        model = next(iter(prepare_inputs(cell.scenario, self.config.out).models.values()))
        for leg in cell.legs:
            if reason := self._refusal_of_leg(cell, leg, model):
                return reason
        return ""

    def _refusal_of_leg(self, cell: Cell, leg: Leg, model: Path) -> str:
        scenario, kind = cell.scenario, cell.scenario.objective.kind
        try:
            adapter = leg.backend.load()
        except MissingExtra as error:
            return str(error)
        if kind not in getattr(adapter, "objectives", ("sft",)):
            return f"{leg.backend.name} does not train the objective {kind!r}"
        answer = adapter.supports(scenario, leg.layout)
        if isinstance(answer, Unsupported):
            return answer.reason
        try:
            leg.layout.validate(**model_sizes(model), rows=scenario.data.rows, accumulation=scenario.accumulation)
        except ValueError as error:
            return str(error)
        gpus, ranks = torch.cuda.device_count(), leg.layout.world_size
        if self.config.device == "cuda" and gpus < ranks:
            return f"needs {ranks} GPUs, {gpus} visible; a layout of at most {gpus} ranks would run"
        return ""

    def _run_legs(self, cell: Cell, inputs: FrozenInputs) -> str:
        """Run the legs in order, each in processes that never saw another; returns why one failed, or nothing."""
        for number in range(len(cell.legs)):
            outcome = self._run_leg(cell, number, inputs)
            if outcome.state == "failed":
                where = f"leg {number + 1} of {len(cell.legs)}: " if len(cell.legs) > 1 else ""
                return where + outcome.reason
        return ""

    def _run_leg(self, cell: Cell, number: int, inputs: FrozenInputs) -> Outcome:
        leg, folder = cell.legs[number], self._leg_folder(cell, number)
        return self._pool.run(
            key=leg.backend.name,
            config=world_config(leg, self.config.device),
            task="conformance.run.task:run_leg",
            kwargs=leg_arguments(cell, number, inputs, folder, self._saved_before(cell, number)),
            log_dir=folder / "logs",
            budget_s=self.config.budget_s,
            fresh=number > 0,
        )

    def _saved_before(self, cell: Cell, number: int) -> Path | None:
        return self._leg_folder(cell, number - 1) / "saved" if number else None

    def _leg_folder(self, cell: Cell, number: int) -> Path:
        return self.config.out / "cells" / cell.slug / "legs" / str(number)

    def _keep(self, judged: JudgedCell) -> None:
        cell, folder = judged.cell, self.config.out / "cells" / judged.cell.slug
        legs = [f"legs/{number}/record" for number in range(len(cell.legs))]
        records = tuple(leg for leg in legs if (folder / leg).is_dir())
        known = _expectation(cell)
        entry = Entry(
            cell=str(cell),
            scenario=cell.scenario.name,
            model=cell.scenario.model_name,
            backend=cell.backend,
            layout=cell.layout,
            variant=cell.variant,
            world_size=cell.world_size,
            seconds=judged.seconds,
            folder=f"cells/{cell.slug}",
            completed=judged.completed,
            records=records,
            oracle=os.path.relpath(self._oracles.folder(cell), folder) if records else None,
            expected=asdict(known) if known else None,
            reproduce=shlex.join(["parity", "run", *self.config.arguments, "--cells", str(cell)]),
            observables=all_observables(cell.scenario.objective),
            verdict=judged.verdict,
        )
        self._entries[str(cell)] = entry
        write_entry(self.config.out, entry)

    def write_summary(self, *, finished: bool) -> None:
        """Write ``summary.json`` with what is known so far."""
        run = Run(
            started=self._started.isoformat(timespec="seconds"),
            finished=datetime.now(UTC).isoformat(timespec="seconds") if finished else None,
            seconds=round(time.monotonic() - self._clock, 2),
            profile=self.config.profile,
            device=self.config.device,
            command=self.config.command or shlex.join(["parity", "run", *self.config.arguments]),
            environment=self._environment,
        )
        write_summary(self.config.out, run, list(self._entries.values()))


def world_config(leg: Leg, device: Device) -> WorldConfig:
    """The world that a leg runs in: its size, and what its backend is slow to import."""
    preload = (
        leg.backend.target.partition(":")[0],
        "conformance.run.task",
        "torch._dynamo",  # dispatch modes, and so the exact tier, import it: a second in every rank
        *getattr(leg.backend.load(), "preload", ()),
    )
    return WorldConfig(size=leg.layout.world_size, device=device, preload=preload)


def leg_arguments(
    cell: Cell, number: int, inputs: FrozenInputs, folder: Path, saved_before: Path | None
) -> dict[str, Any]:
    """The arguments of conformance.run.task.run_leg, as JSON values.

    ``folder`` is the leg's; ``saved_before`` is what the leg before has saved.
    """
    leg, before = cell.legs[number], cell.legs[number - 1].save if number else None
    models = {role: str(path) for role, path in inputs.models.items()}
    if before == "export":
        models = {role: str(saved_before / role) for role in models} if saved_before else models
    return {
        "cell": str(cell),
        "target": leg.backend.target,
        "scenario": scenario_to_json(cell.scenario),
        "layout": str(leg.layout),
        "models": models,
        "batches": str(inputs.batches),
        "first_step": cell.first_steps[number],
        "steps": leg.steps,
        "load": str(saved_before) if before == "checkpoint" else None,
        "save": str(folder / "saved") if leg.save == "checkpoint" else None,
        "export": str(folder / "saved") if leg.save == "export" else None,
        "record": str(folder / "record"),
        "planted": list(cell.faults),
    }


def _expectation(cell: Cell) -> ExpectedDifference | None:
    """What the backend of the first leg says must differ. A backend that cannot be imported says nothing.

    A planted fault is no known defect: it has to be found wherever it is planted.
    """
    if cell.faults:
        return None
    try:
        known: tuple[ExpectedDifference, ...] = getattr(cell.legs[0].backend.load(), "expected", ())
    except MissingExtra:
        return None
    return next((k for k in known if k.means(str(cell))), None)
