"""Expands profiles (quick, full, ...) to cells.

A profile is a TOML file with ``[[cells]]`` tables; each table is the product of its lists. Every selected backend gets
the same cells and decides which of them it supports. A table may also name its backends, for cells that only
some libraries can run.

A table may name a program of the profile's ``[programs]``: the phases in which its cells run. Layouts and backends of
several phases are written ``dp2-to-tp2`` and ``fsdp2-to-megatron``; a single layout or backend is used for all phases.
"""

import dataclasses
import fnmatch
import itertools
import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from conformance.backends.faults import find_fault
from conformance.backends.protocol import BackendEntry, registered_backends
from conformance.backends.registry import find_backend
from conformance.core.errors import STRICT, UsageError, did_you_mean, explain, shown
from conformance.core.host import FIXTURES, dataset_folder, model_folder, resolve
from conformance.core.io import read_toml
from conformance.data.rollouts import has_data
from conformance.data.samples import reads_of
from conformance.matrix.cell import Cell, Handover, Phase
from conformance.matrix.options import Selection
from conformance.models.synthetic import with_skeleton
from conformance.results.requirements import TO
from conformance.spec.layout import Layout
from conformance.spec.observables import IN_PAIRS
from conformance.spec.precision import PRECISIONS, PrecisionName
from conformance.spec.scenario import Count, DataConfig, FilePath, Scenario, Steps, load_scenario

logger = logging.getLogger(__name__)


def _check_layouts(text: str) -> str:
    for layout in text.split(TO):
        Layout.parse(layout)
    return text


Layouts = Annotated[str, AfterValidator(_check_layouts)]  # dp2-to-tp2, or a single layout for all phases


@validated(frozen=True, kw_only=True, config=STRICT)
class PlannedPhase:
    """Describes one phase of a program.

    ``steps``: None, in the last phase only, means all remaining steps. ``save``: see Phase.
    """

    steps: Steps | None = None
    save: Handover | None = None


@validated(frozen=True, kw_only=True, config=STRICT)
class CellTable:
    """Describes one ``[[cells]]`` table of a profile.

    scenarios: built-in names or .toml files. models: names of folders in fixtures/models.
    backends: the backends, or chains of backends, that run these cells; empty: all.
    program: the name of one of the profile's programs.
    to: layouts of the last phase; every layout in ``layouts`` is combined with every layout in ``to``.
    steps, rows: as in a profile, and instead of the profile's.
    """

    scenarios: Annotated[tuple[str, ...], Field(min_length=1)]
    models: Annotated[tuple[str, ...], Field(min_length=1)]
    layouts: Annotated[tuple[Layouts, ...], Field(min_length=1)]
    precisions: Annotated[tuple[PrecisionName, ...], Field(min_length=1)]
    backends: tuple[str, ...] = ()
    program: str = ""
    to: tuple[Layouts, ...] = ()
    steps: Count | None = None
    rows: Count | None = None


@validated(frozen=True, kw_only=True, config=STRICT)
class Profile:
    """Describes a named selection of cells.

    description: shown by ``parity list``. programs: sequences of phases, by name.
    steps: at most this many steps of every scenario; None: all steps. rows: of a step; None: the scenario's.
    steps_of: the same by shell patterns of SCENARIO/MODEL/PRECISION, of which the first that fits counts, instead of
        ``steps``. Reports compare backends on cells that have all three of these in common, so their steps are equal.
        A user's model has the most steps that the scenario has there with any of the profile's models.
    data: the file that scenarios read whose file names none.
    expected: by the name of a backend, shell patterns of links. A difference that a backend declares as expected counts
        only if its link is named here, or if the backend belongs to the suite.
    """

    description: str
    cells: Annotated[tuple[CellTable, ...], Field(min_length=1)]
    steps: Count | None = None
    steps_of: dict[str, Count] = Field(default_factory=dict)
    rows: Count | None = None
    data: FilePath | None = None
    programs: dict[str, Annotated[tuple[PlannedPhase, ...], Field(min_length=1)]] = Field(default_factory=dict)
    expected: dict[str, tuple[str, ...]] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Holds the user's replacements for a profile's values: model folder, fields of ``data``, seed, stride of a ring.

    ``sketch``, ``trust_remote_code``, ``assume_inert``: see Scenario.
    """

    model: str | None = None
    seed: int | None = None
    stride: int | None = None
    data: tuple[tuple[str, Any], ...] = ()
    sketch: int | None = None
    trust_remote_code: bool = False
    assume_inert: tuple[str, ...] = ()


def select_cells(selection: Selection) -> list[Cell]:
    """Returns the cells of a selection, in an order that depends only on the selection.

    Raises UsageError for an unknown backend, profile, fault or scenario, for a profile that has no cell for the
    backends, for a stride that changes no cell, and for a pattern that matches no cell.
    """
    named = ("input_key", "output_key", "max_len", "too_long", "max_samples", "split")
    path = selection.data and dataset_folder(selection.data)
    data: dict[str, Any] = {"path": path, **{name: getattr(selection, name) for name in named}}
    data["packed"] = selection.packing_samples or None
    overrides = Overrides(
        model=selection.model and model_folder(selection.model),
        seed=selection.seed,
        stride=selection.ring_head_stride,
        data=tuple((key, value) for key, value in data.items() if value is not None),
        sketch=selection.sketch,
        trust_remote_code=selection.trust_remote_code,
        assume_inert=selection.assume_inert,
    )
    faults = tuple(find_fault(name).name for name in selection.faults)
    profile, backends, name = profile_of(selection), selected_backends(selection), selection.profile_name
    try:
        cells = expand(profile, backends, overrides, faults=faults)
    except UsageError as error:
        raise error if selection.chooses_cells else UsageError(f"profile {name}: {error}") from None
    if not cells:
        meant = sorted({chain for table in profile.cells for chain in table.backends})
        raise UsageError(
            f"profile {name} has no cell for {', '.join(entry.name for entry in backends)}; its tables are for "
            f"{', '.join(meant)}"
        )
    if selection.ring_head_stride and not any(phase.layout.gathers for cell in cells for phase in cell.phases):
        raise UsageError(
            f"--ring-head-stride {selection.ring_head_stride} changes no cell of profile {name}: none has a ring that "
            f"gathers (sp2); leave it out"
        )
    return _fitting(select(cells, selection.cells), selection, path)


def _fitting(cells: list[Cell], selection: Selection, path: str | None) -> list[Cell]:
    """Leaves out the cells whose objective does not read what the user's data set holds, unless none would be left.

    Without a data set of the user, those without rollouts of the user's model are left out. One line names what was
    left out. Raises UsageError if the data set cannot be read.
    """
    reads = reads_of(resolve(path), split=selection.split) if path else None
    if reads in IN_PAIRS and selection.output_key:  # the user trains on one of the answers
        reads = "samples"
    fitting = [cell for cell in cells if (cell.scenario.objective.reads == reads if path else has_data(cell.scenario))]
    if not fitting or len(fitting) == len(cells):
        return cells  # none reads the data: reading it for a cell raises an error with advice
    left_out = [cell for cell in cells if cell not in fitting]
    others = sorted({cell.scenario.name for cell in left_out})
    verb = "needs" if len(others) == 1 else "need"
    kinds = {cell.scenario.objective.reads for cell in left_out}
    needed = " or ".join(sorted("texts" if kind == "samples" else kind for kind in kinds))
    why = f"and {selection.data} holds none" if path else f"and there are none of {selection.model}; --data gives them"
    logger.warning(
        "left out %d of %d cells, because %s %s %s, %s",
        *(len(cells) - len(fitting), len(cells), ", ".join(others), verb, needed, why),
    )
    return fitting


def selected_backends(selection: Selection) -> list[BackendEntry]:
    """Returns the adapters that the user names, or all registered ones. Raises UsageError."""
    pythons = dict(one.split("=", 1) for one in selection.python if "=" in one)
    if len(pythons) < len(selection.python):
        raise UsageError(f"--python {' --python '.join(selection.python)}: give each once, as BACKEND=EXECUTABLE")
    names = selection.backend or tuple(dict.fromkeys((*registered_backends(), *pythons)))
    if unknown := sorted(pythons.keys() - set(names)):
        raise UsageError(f"--python names {', '.join(unknown)}, which is not selected; add --backend {unknown[0]}")
    found = [find_backend(name, pythons.get(name, "")) for name in dict.fromkeys(names)]
    called = [entry.name for entry in found]
    if twice := next((name for name in called if called.count(name) > 1), ""):
        raise UsageError(
            f"two backends are called {twice!r}, but cell ids need different names; change describe() of one"
        )
    return found


def profile_names() -> list[str]:
    return sorted(path.stem for path in (FIXTURES / "profiles").glob("*.toml"))


def profile_of(selection: Selection) -> Profile:
    """Returns the profile that a selection names, or one of the scenarios, layouts and precisions that it lists.

    Raises UsageError for both at once, and for values that do not exist.
    """
    if not selection.chooses_cells:
        return load_profile(selection.profile_name)
    if selection.profile:
        raise UsageError(
            f"--scenario, --layout and --precision choose cells instead of --profile {selection.profile}; leave out "
            f"one or the other (--cells selects from a profile)"
        )
    for layout in selection.layout:
        Layout.parse(layout)
    for precision in selection.precision:
        if precision not in PRECISIONS:
            near = did_you_mean(precision, PRECISIONS)
            raise UsageError(f"--precision {precision}: {near}the precisions are {', '.join(PRECISIONS)}")
    table = CellTable(
        scenarios=selection.scenario or ("sft-packed",),
        models=("pangu",),
        layouts=selection.layout or ("dp2",),
        precisions=cast("tuple[PrecisionName, ...]", selection.precision) or ("exact",),
    )
    return Profile(description="cells of --scenario, --layout and --precision", cells=(table,))


def load_profile(name: str) -> Profile:
    """Reads a built-in profile by its name, or a .toml file by its path. Raises UsageError if this fails."""
    if Path(name).is_dir() and name not in profile_names():
        raise UsageError(f"profile {name!r} is a folder; give one of its .toml files")
    path = Path(name) if name.endswith(".toml") else FIXTURES / "profiles" / f"{name}.toml"
    try:
        return TypeAdapter(Profile).validate_python(read_toml(path))
    except FileNotFoundError:
        if name.endswith(".toml"):
            raise UsageError(f"there is no profile {shown(name)} in {Path.cwd()}; give the path of a file") from None
        near = did_you_mean(name, profile_names())
        raise UsageError(
            f"no profile {name!r}; {near}known: {', '.join(profile_names())}, or give a .toml file"
        ) from None
    except ValidationError as error:
        raise explain(error, source=str(path), what="profile") from None


def expand(
    profile: Profile, backends: Sequence[BackendEntry], overrides: Overrides, *, faults: tuple[str, ...] = ()
) -> list[Cell]:
    """Returns a profile's cells on the given backends, without duplicates, sorted so that worker groups can be reused.

    ``faults`` are planted in every cell. Where the tables of several models, all run with ``overrides.model``, differ
    only in the numbers of steps and rows, the longest cell stays. Raises UsageError for an invalid scenario, layout,
    program or data set, and for two different cells with the same id, as from two scenario files of the same name.
    """
    cells: dict[str, Cell] = {}
    registered = registered_backends()
    for table in profile.cells:
        chains = _chains(table, backends, registered)
        models = (overrides.model,) if overrides.model else tuple(f"models/{name}" for name in table.models)
        models = tuple(map(with_skeleton, models))
        for scenario_name, model, precision in itertools.product(table.scenarios, models, table.precisions):
            trusted = overrides.trust_remote_code
            values: dict[str, Any] = {"model": model, "precision": precision, "trust_remote_code": trusted}
            if overrides.assume_inert:
                values["assume_inert"] = overrides.assume_inert
            if overrides.seed is not None:
                values["seed"] = overrides.seed
            if overrides.sketch is not None:
                values["sketch"] = overrides.sketch
            own = scenario_name.endswith(".toml")
            file = Path(scenario_name) if own else FIXTURES / "scenarios" / f"{scenario_name}.toml"
            rows = table.rows or profile.rows
            data = {**({"rows": rows} if rows else {}), **dict(overrides.data)}
            scenario = load_scenario(file, data_overrides=data, **values)
            if profile.data and "path" not in data and scenario.data.path == DataConfig.path:
                scenario = dataclasses.replace(scenario, data=dataclasses.replace(scenario.data, path=profile.data))
            if first_steps := table.steps or _steps_of(profile, scenario, is_users=bool(overrides.model)):
                scenario = dataclasses.replace(scenario, steps=min(scenario.steps, first_steps))
            for layout, chain in itertools.product(_phase_layouts(table), chains):
                layouts = [_layout(part, overrides.stride) for part in layout.split(TO)]
                phases = _phases(_program(profile, table.program), chain, layouts, scenario)
                links = profile.expected.get(phases[0].backend.name, ())
                cell = Cell(scenario=scenario, phases=phases, program=table.program, faults=faults, expected=links)
                same = cells.setdefault(str(cell), cell)
                if same == cell:
                    continue
                as_many = dataclasses.replace(same.scenario.data, rows=scenario.data.rows)
                differs_in_size = dataclasses.replace(same.scenario, steps=scenario.steps, data=as_many) == scenario
                if not (overrides.model and differs_in_size):
                    raise UsageError(
                        f"two different cells have the id {cell}; rename one of the scenario files or model folders"
                    )
                cells[str(cell)] = max(same, cell, key=lambda one: (one.scenario.steps, one.scenario.data.rows))
    return [cells[name] for name in sorted(cells, key=lambda name: (cells[name].backend, cells[name].world_size, name))]


def _steps_of(profile: Profile, scenario: Scenario, *, is_users: bool) -> int | None:
    """Returns the steps of a scenario in a profile; None: all. A user's model has the most that any model has there."""
    models = {name for table in profile.cells for name in table.models} if is_users else {scenario.model_name}
    most = 0
    for named in (f"{scenario.name}/{model}/{scenario.precision}" for model in models):
        fitting = (steps for pattern, steps in profile.steps_of.items() if fnmatch.fnmatch(named, pattern))
        if (steps := next(fitting, profile.steps)) is None:
            return None
        most = max(most, steps)
    return most


def _phase_layouts(table: CellTable) -> list[str]:
    """Returns the layouts of the cells' phases: ``layouts`` combined with ``to``, or ``layouts`` alone."""
    return [f"{one}{TO}{other}" for one in table.layouts for other in table.to] or list(table.layouts)


def _chains(
    table: CellTable, backends: Sequence[BackendEntry], registered: Mapping[str, BackendEntry]
) -> list[list[BackendEntry]]:
    """Returns the chains of backends for the phases of the table's cells, if all of their backends are selected."""
    selected = {backend.name: backend for backend in backends}
    known = {**registered, **selected}
    for name in (name for chain in table.backends for name in chain.split(TO)):
        if name not in known:
            near = did_you_mean(name, known)
            raise UsageError(f"a table names the backend {shown(name)}; {near}registered: {', '.join(known)}")
    if not table.backends:
        return [[backend] for backend in backends]
    wanted = [chain.split(TO) for chain in table.backends]
    return [[selected[name] for name in chain] for chain in wanted if selected.keys() >= set(chain)]


def _program(profile: Profile, name: str) -> tuple[PlannedPhase, ...]:
    if not name:
        return (PlannedPhase(),)
    if name not in profile.programs:
        known = ", ".join(profile.programs) or "none"
        raise UsageError(f"a table names the program {name!r}, which the profile does not have (known: {known})")
    return profile.programs[name]


def _phases(
    program: Sequence[PlannedPhase], chain: Sequence[BackendEntry], layouts: Sequence[Layout], scenario: Scenario
) -> tuple[Phase, ...]:
    count = len(program)
    for what, given in (("backends", chain), ("layouts", layouts)):
        if len(given) not in (1, count):
            raise UsageError(f"{len(given)} {what} for a program of {count} phases; give one for all, or one for each")
    left = scenario.steps - sum(phase.steps or 0 for phase in program)
    if any(phase.steps is None for phase in program[:-1]):
        raise UsageError("only the last phase of a program may leave out its steps")
    return tuple(
        Phase(
            backend=chain[i % len(chain)],
            layout=layouts[i % len(layouts)],
            steps=left if phase.steps is None else phase.steps,
            save=phase.save,
        )
        for i, phase in enumerate(program)
    )


def _layout(text: str, stride: int | None) -> Layout:
    """Parses a layout. ``stride``, if given, replaces the stride of a layout whose ring gathers keys and values."""
    layout = Layout.parse(text)
    return dataclasses.replace(layout, stride=stride) if stride is not None and layout.gathers else layout


def select(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """Returns the cells whose id, with or without seed and faults, matches a shell pattern; all without patterns.

    ``{dp2,tp2}`` in a pattern stands for either text. Raises UsageError for a pattern that matches no cell.
    """
    ids: dict[str, set[int]] = defaultdict(set)  # whole ids, as a command repeats them by the hundred, are looked up
    for index, cell in enumerate(cells):
        for name in (str(cell), str(cell.plain)):
            ids[name].add(index)
    chosen: set[int] = set()
    for pattern in patterns:
        matched = [
            ids[name]
            for one in _without_braces(pattern)
            for name in ([one] if one in ids else fnmatch.filter(ids, one))
        ]
        if not matched:
            like = ", ".join(str(cell) for cell in cells[:3])
            advice = _near(pattern, cells) or _as_options(pattern)
            raise UsageError(
                f"no cell matches {pattern!r}; {advice}ids look like {like} ({len(cells)} in all: parity list)"
            )
        chosen.update(*matched)
    return [cell for index, cell in enumerate(cells) if not patterns or index in chosen]


def _without_braces(pattern: str) -> list[str]:
    """Returns a pattern for each choice of ``{a,b}``, as a shell expands it."""
    if not (braces := re.search(r"\{([^{}]*)\}", pattern)):
        return [pattern]
    choices = (pattern[: braces.start()] + choice + pattern[braces.end() :] for choice in braces[1].split(","))
    return [one for choice in choices for one in _without_braces(choice)]


def _as_options(pattern: str) -> str:
    """Advises the command that shows the cell of a whole id of one phase; empty for any other pattern."""
    if not (whole := re.fullmatch(r"([\w.-]+)/([\w.-]+)/([\w-]+)/([\w.]+)/([\w-]+)", pattern)):
        return ""
    scenario, model, backend, layout, precision = whole.groups()
    folder = f"models/{model}" if (FIXTURES / "models" / model).is_dir() else "FOLDER"
    return (
        f"to see whether it is supported outside of this profile, run: parity list --scenario {scenario} "
        f"--model {folder} --backend {backend} --layout {layout} --precision {precision}; "
    )


def _near(pattern: str, cells: Sequence[Cell]) -> str:
    """Suggests ids for the first part of a pattern that no cell has; empty if none is close."""
    known = sorted({part for cell in cells for part in str(cell).split("/")})
    wrong = (part for part in pattern.split("/") if not fnmatch.filter(known, part))
    return next((near for part in wrong if (near := did_you_mean(part, known))), "")
