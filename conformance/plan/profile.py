"""Matrix: profiles (quick, full, ...) and how they become cells.

A profile is a TOML file with ``[[cells]]`` tables; each table is a product of its lists. Every backend that is asked
for gets the same cells and answers for itself which of them it supports, except for tables that name their backends:
those are about what only one library has.
"""

import dataclasses
import fnmatch
import itertools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from conformance.backend import BackendEntry, find_backend, registered_backends
from conformance.plan.cell import Cell
from conformance.faults import find_fault
from conformance.layout import Layout
from conformance.paths import FIXTURES
from conformance.scenario import STRICT, Precision, load_scenario


@validated(frozen=True, kw_only=True, config=STRICT)
class CellTable:
    """One ``[[cells]]`` table. ``scenarios``: built-in names or .toml files; ``models``: of fixtures/models.

    ``backends``: the table is for these only; for all if it names none.
    """

    scenarios: tuple[str, ...]
    models: tuple[str, ...]
    layouts: tuple[str, ...]
    precisions: tuple[Precision, ...]
    backends: tuple[str, ...] = ()


@validated(frozen=True, kw_only=True, config=STRICT)
class Profile:
    """A named part of the matrix. ``description`` is shown by ``parity list``."""

    description: str
    cells: tuple[CellTable, ...]


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """What the user puts in the place of the profile's own: a model folder, a data set, a seed, a ring's stride."""

    model: str | None = None
    seed: int | None = None
    stride: int | None = None
    data: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The cells that a user asks for. The fields are named as the options of ``parity run``, and mean the same.

    No backend stands for all that are registered, no pattern in ``cells`` for all cells.
    """

    profile: str = "quick"
    backend: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    model: str | None = None
    data: str | None = None
    input_key: str | None = None
    output_key: str | None = None
    max_len: int | None = None
    packing_samples: bool = False
    ring_head_stride: int | None = None
    seed: int | None = None

    @classmethod
    def from_options(cls, options: object, *, prefix: str = "") -> "Selection":
        """From what a parser returns: an attribute per field, None where the option was not given."""
        values: dict[str, Any] = {field.name: getattr(options, prefix + field.name) for field in fields(cls)}
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{name: value for name, value in (values | lists).items() if value is not None})

    @property
    def arguments(self) -> tuple[str, ...]:
        """The options of ``parity run`` that ask for the same, but for ``--cells``."""
        arguments: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is True:
                arguments.append(f"--{field.name}")
            elif field.name != "cells" and value != field.default:
                for single in value if isinstance(value, tuple) else (value,):
                    arguments += [f"--{field.name}", str(single)]
        return tuple(arguments)


def select_cells(selection: Selection) -> list[Cell]:
    """The cells of a selection, in an order that depends on nothing else.

    Raises ValueError for an unknown backend, profile, fault, scenario, or a pattern without a cell.
    """
    names = selection.backend or tuple(registered_backends())
    data = {"path": selection.data, **{k: getattr(selection, k) for k in ("input_key", "output_key", "max_len")}}
    data["packed"] = selection.packing_samples or None
    overrides = Overrides(
        model=selection.model,
        seed=selection.seed,
        stride=selection.ring_head_stride,
        data=tuple((key, value) for key, value in data.items() if value is not None),
    )
    faults = tuple(find_fault(name).name for name in selection.faults)
    cells = expand(load_profile(selection.profile), [find_backend(name) for name in names], overrides, faults=faults)
    return select(cells, selection.cells)


def profile_names() -> list[str]:
    return sorted(path.stem for path in (FIXTURES / "profiles").glob("*.toml"))


def load_profile(name: str) -> Profile:
    """Read a built-in profile by name, or one of your own by path. Raises ValueError with what is wrong."""
    path = Path(name) if name.endswith(".toml") else FIXTURES / "profiles" / f"{name}.toml"
    try:
        return TypeAdapter(Profile).validate_python(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ValueError(f"no profile {name!r}; known: {', '.join(profile_names())}, or give a .toml file") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ValueError(f"{path} is not a valid profile:\n" + "\n".join(lines)) from None


def expand(
    profile: Profile, backends: Sequence[BackendEntry], overrides: Overrides, *, faults: tuple[str, ...] = ()
) -> list[Cell]:
    """All cells of a profile on all backends, without repetition, in an order that lets worlds be used again.

    ``faults`` are planted in every cell.

    Raises ValueError for a scenario, layout or data set that is not valid.
    """
    cells: dict[str, Cell] = {}
    for table in profile.cells:
        asked = [backend for backend in backends if backend.name in (table.backends or (backend.name,))]
        models = (overrides.model,) if overrides.model else tuple(f"models/{name}" for name in table.models)
        for scenario_name, model, precision in itertools.product(table.scenarios, models, table.precisions):
            values: dict[str, Any] = {"model": model, "precision": precision}
            if overrides.seed is not None:
                values["seed"] = overrides.seed
            own = scenario_name.endswith(".toml")
            file = Path(scenario_name) if own else FIXTURES / "scenarios" / f"{scenario_name}.toml"
            scenario = load_scenario(file, data_overrides=dict(overrides.data), **values)
            for layout, backend in itertools.product(table.layouts, asked):
                cell = Cell(scenario=scenario, backend=backend, layout=_layout(layout, overrides.stride), faults=faults)
                cells.setdefault(str(cell), cell)
    return sorted(cells.values(), key=lambda c: (c.backend.name, c.layout.world_size, str(c)))


def _layout(text: str, stride: int | None) -> Layout:
    """``stride`` replaces that of layouts which can have one."""
    layout = Layout.parse(text)
    return dataclasses.replace(layout, stride=stride) if stride and layout.gathers else layout


def select(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """Cells whose id, with or without seed and faults, matches a shell pattern; ValueError for one without a cell."""

    def matches(cell: Cell, pattern: str) -> bool:
        plain = dataclasses.replace(cell, scenario=dataclasses.replace(cell.scenario, seed=0), faults=())
        return any(fnmatch.fnmatchcase(name, pattern) for name in (str(cell), str(plain)))

    for pattern in patterns:
        if not any(matches(cell, pattern) for cell in cells):
            near = ", ".join(str(cell) for cell in cells[:3])
            raise ValueError(f"no cell matches {pattern!r}; ids look like {near} ({len(cells)} in all: parity list)")
    return [cell for cell in cells if not patterns or any(matches(cell, pattern) for pattern in patterns)]
