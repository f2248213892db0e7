"""Describes a cell: a scenario and the phases in which conformance/runner runs it.

Most cells have one phase. With several phases, each phase except the last saves, and the next phase resumes from it in
the same layout, in another layout or on another backend, and always in new processes (docs/principles.md). The ranks of
a phase get its description as JSON (``PhaseSpec``).
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

from conformance.backends.protocol import BackendEntry
from conformance.core.errors import UsageError
from conformance.results.requirements import TO
from conformance.spec.layout import Layout
from conformance.spec.objectives import PolicyGradient
from conformance.spec.scenario import Scenario, parse_scenario, scenario_to_json

Handover = Literal["checkpoint", "state", "export", "merge"]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Describes a part of a cell: load what the previous phase saved, record the weights, train ``steps`` steps, save.

    save: ``checkpoint``: the full training state in the backend's own format; the next phase resumes from it.
        ``state``: the same in the format that all backends read.
        ``export``: one Hugging Face folder per model; the next phase starts from it with a new optimizer and schedule.
        ``merge``: the same with the policy's adapter added to its weights; the next phase starts with the adapter that
        the first phase started with, on this new base (as in ReLoRA, arXiv 2307.05695).
        None: nothing is saved, in the last phase only.
    """

    backend: BackendEntry
    layout: Layout
    steps: int
    save: Handover | None = None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Describes a scenario and the phases in which it runs.

    program: the name of the sequence of phases in the profile; empty for a cell of one phase.
    faults: names of the faults that are planted; an ordinary cell has none.
    expected: shell patterns of the links of those differences that count as expected if the backend declares them.

    Raises UsageError if the phases' steps do not add up to the scenario's, or if a phase cannot resume from the one
    before.
    """

    scenario: Scenario
    phases: tuple[Phase, ...]
    program: str = ""
    faults: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()

    @classmethod
    def single(
        cls,
        *,
        scenario: Scenario,
        backend: BackendEntry,
        layout: Layout,
        faults: tuple[str, ...] = (),
        expected: tuple[str, ...] = (),
    ) -> "Cell":
        """Builds a cell of one phase."""
        phase = Phase(backend=backend, layout=layout, steps=scenario.steps)
        return cls(scenario=scenario, phases=(phase,), faults=faults, expected=expected)

    def __post_init__(self) -> None:
        assert self.phases
        name = f"program {self.program!r}" if self.program else "the cell"
        if self.phases[-1].steps < 0:  # the earlier phases have more steps than the scenario
            raise UsageError(
                f"the phases of {name} before the last have {self.scenario.steps - self.phases[-1].steps} steps and "
                f"scenario {self.scenario.name} has {self.scenario.steps}; give them fewer"
            )
        if (total := sum(phase.steps for phase in self.phases)) != self.scenario.steps:
            raise UsageError(
                f"the phases of {name} have {total} steps and scenario {self.scenario.name} has {self.scenario.steps}; "
                f"change one of them, or leave out the steps of the last phase"
            )
        objective = self.scenario.objective
        if isinstance(objective, PolicyGradient):
            for number, step in enumerate(self.first_steps, start=1):
                if step % (each := objective.steps_per_rollout):
                    raise UsageError(
                        f"phase {number} of {name} begins at step {step} of scenario {self.scenario.name}, in the "
                        f"middle of a rollout; the steps of earlier phases must be multiples of {each}, which is "
                        f"mini_batches times ppo_epochs"
                    )
        if self.phases[-1].save:
            raise UsageError(
                f"the last phase of {name} saves, but no phase follows; add a phase, or leave out its save"
            )
        for before, after in pairwise(self.phases):
            if before.save == "merge" and not self.scenario.lora:
                raise UsageError(
                    f"{name} merges adapters, and scenario {self.scenario.name} has none; use another scenario, such "
                    f'as sft-lora, or save = "export"'
                )
            if before.save is None:
                raise UsageError(
                    f'a phase of {name} saves nothing for the next; give it save = "checkpoint", "state" or "export"'
                )
            if before.save == "checkpoint" and before.backend != after.backend:
                raise UsageError(
                    f"{name} loads a checkpoint of {before.backend.name} into {after.backend.name}, which cannot "
                    f'read it; use save = "state" or "export"'
                )
            if before.save in ("checkpoint", "state") and after.steps == 1:
                raise UsageError(
                    f"{name} has one step after a {before.save}, but lost optimizer state shows at the second; use at "
                    f"least two"
                )

    @property
    def backend(self) -> str:
        """Returns the names of the phases' backends, joined by ``-to-``; a single name if they are all the same."""
        return _chain([phase.backend.name for phase in self.phases])

    @property
    def layout(self) -> str:
        """Returns the phases' layouts, joined by ``-to-``; a single layout if they are all the same."""
        return _chain([str(phase.layout) for phase in self.phases])

    @property
    def variant(self) -> str:
        """Returns the part of the id after the layout: precision, and program, seed and faults if there are any."""
        program = [self.program] if self.program else []
        seed = [f"seed{self.scenario.seed}"] if self.scenario.seed else []
        return "/".join([self.scenario.precision, *program, *seed, *(f"fault-{name}" for name in self.faults)])

    @property
    def world_size(self) -> int:
        """Returns the number of ranks of the largest phase."""
        return max(phase.layout.world_size for phase in self.phases)

    @property
    def first_steps(self) -> tuple[int, ...]:
        """Returns the number of the first optimizer step of each phase."""
        return tuple(accumulate((phase.steps for phase in self.phases[:-1]), initial=0))

    @property
    def restarts(self) -> tuple[int, ...]:
        """Returns the steps at which optimizer and schedule begin anew, because a phase loads exported weights."""
        pairs = zip(self.phases[:-1], self.first_steps[1:], strict=True)
        return tuple(step for before, step in pairs if before.save in ("export", "merge"))

    @property
    def merges(self) -> tuple[int, ...]:
        """Returns those ``restarts`` at which the adapter has been merged into the base."""
        pairs = zip(self.phases[:-1], self.first_steps[1:], strict=True)
        return tuple(step for before, step in pairs if before.save == "merge")

    @cached_property
    def oracle_request(self) -> list[Any]:
        """Returns, as JSON, what the oracle run of this cell depends on.

        Of the cell's precision that is the format in which weights are stored without masters: training begins with
        weights that are rounded to it.
        """
        scenario, stored = scenario_to_json(self.scenario.reference), self.scenario.tier.stored
        parts: list[Any] = [{key: value for key, value in scenario.items() if key not in ("name", "precision")}]
        if stored:
            parts[0]["stored"] = stored.name
        merges = [list(self.merges)] if self.merges else []
        return [*parts, list(self.restarts), *merges] if self.restarts else parts

    @property
    def plain(self) -> "Cell":
        """Returns this cell with seed 0 and without faults."""
        return dataclasses.replace(self, scenario=dataclasses.replace(self.scenario, seed=0), faults=())

    def __str__(self) -> str:
        return self._id

    @cached_property
    def _id(self) -> str:
        return "/".join([self.scenario.name, self.scenario.model_name, self.backend, self.layout, self.variant])

    @property
    def slug(self) -> str:
        """Returns the id as a folder name."""
        return str(self).replace("/", "_")


def _chain(names: list[str]) -> str:
    return names[0] if len(set(names)) == 1 else TO.join(names)


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
