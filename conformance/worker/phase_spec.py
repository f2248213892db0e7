"""Describes one phase of a cell to a worker group, as a dataclass that is sent to its ranks as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from conformance.matrix.cell import Handover
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario, parse_scenario, scenario_to_json

TASK = "conformance.worker.phase:run_phase"  # the task that runs a phase, with the arguments of ``PhaseSpec.kwargs``


@dataclass(frozen=True, kw_only=True)
class PhaseSpec:
    """A phase of a cell and the files that it reads and writes.

    cell: the cell's id. target: the backend's adapter, ``module:Class``.
    models: the Hugging Face folder of each role. batches: the file of the frozen batches.
    first_step, steps: the optimizer steps of the phase.
    load: the checkpoint or training state that the phase resumes from, and its folder; None: the models only.
    merged: whether the previous phase has merged its adapter into the weights that this phase begins with.
    save: the kind of state that the phase saves for the next one, and its folder.
    record: the folder of the record. planted: the names of the faults to plant.
    trace: a step whose activations are captured, and the folder for them.
    draw: the seed of the steps that ranks draw, for tests that repeat; None: nobody knows a draw before it is made.
    """

    cell: str
    target: str
    scenario: Scenario
    layout: Layout
    models: Mapping[str, Path]
    batches: Path
    first_step: int
    steps: int
    load: tuple[Literal["checkpoint", "state"], Path] | None = None
    merged: bool = False
    save: tuple[Handover, Path] | None = None
    record: Path
    planted: tuple[str, ...] = ()
    trace: tuple[int, Path] | None = None
    draw: int | None = None

    @property
    def loads(self) -> Literal["", "checkpoint", "state", "merge"]:
        """Returns the training state that the phase resumes from, or ``merge`` for a merged adapter; empty: neither."""
        return "merge" if self.merged else self.load[0] if self.load else ""

    def traced(self, step: int, folder: Path) -> "PhaseSpec":
        """Returns the same phase up to ``step``, whose activations go to ``folder``; it saves nothing."""
        return replace(self, steps=step + 1, save=None, trace=(step, folder))

    @property
    def kwargs(self) -> dict[str, Any]:
        """Returns the arguments of ``TASK``."""
        return {"spec": self.to_json()}

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values; ``from_json`` reads them back."""
        return {
            **vars(self),
            "scenario": scenario_to_json(self.scenario),
            "layout": str(self.layout),
            "models": {role: str(folder) for role, folder in self.models.items()},
            "batches": str(self.batches),
            "load": self.load and [self.load[0], str(self.load[1])],
            "save": self.save and [self.save[0], str(self.save[1])],
            "record": str(self.record),
            "planted": list(self.planted),
            "trace": self.trace and [self.trace[0], str(self.trace[1])],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "PhaseSpec":
        """Reads the values of ``to_json``. Raises UsageError for an invalid scenario or layout."""
        pairs = {key: (values[key][0], Path(values[key][1])) for key in ("load", "save", "trace") if values[key]}
        paths = {key: Path(values[key]) for key in ("batches", "record")}
        parsed = {
            "scenario": parse_scenario(values["scenario"]),
            "layout": Layout.parse(values["layout"]),
            "models": {role: Path(folder) for role, folder in values["models"].items()},
            "planted": tuple(values["planted"]),
        }
        return cls(**{**values, **parsed, **paths, **pairs})
