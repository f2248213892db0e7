"""What several test files share: one session, so that worlds are made once, and one cache of the oracle's records."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.backend import BackendEntry, find_backend
from conformance.layout import Layout
from conformance.paths import FIXTURES
from conformance.plan.cell import Cell, Leg
from conformance.run.session import Session, SessionConfig
from conformance.scenario import Precision, load_scenario

# Groups of tests that one worker runs one after another, the longest first, so that none is left over at the end.
LONG = (
    "cells-megatron",
    "cells-deepspeed",
    "cells-fsdp2",
    "test_findings",
    "test_world_failures",
    "test_pytest_plugin",
    "test_deepspeed",
    "test_megatron",
    "test_ring_attention",
    "test_cli",
)


def group_of(item: pytest.Item) -> str:
    """Tests of a backend's cells share its worlds; all others stay with their file."""
    parameters = getattr(item, "callspec", None)
    backend = parameters.params.get("backend") if parameters else None
    if isinstance(backend, str) and f"cells-{backend}" in LONG:
        return f"cells-{backend}"
    return item.path.stem.replace("test_cells_", "cells-")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        group = group_of(item)
        return LONG.index(group) if group in LONG else len(LONG)

    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def _oracle_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The oracle's records of this run of pytest, for all its workers; nothing of an earlier run is used."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["PARITY_CACHE"] = str(shared / "oracle-cache")


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with Session(SessionConfig(out=tmp_path_factory.mktemp("session"), budget_s=120.0)) as session:
        yield session


def make_cell(
    scenario: str,
    model: str,
    layout: str,
    precision: Precision,
    *,
    faults: tuple[str, ...] = (),
    backend: BackendEntry | None = None,
    scenarios: Path = FIXTURES / "scenarios",
    **overrides: Any,
) -> Cell:
    """A cell of the built-in fixtures; ``overrides`` are fields of the scenario.

    The scenario ``sft-warmup`` is saved after two steps and goes on in fresh processes.
    """
    config = load_scenario(scenarios / f"{scenario}.toml", model=f"models/{model}", precision=precision, **overrides)
    chosen, parsed = backend or find_backend("fsdp2"), Layout.parse(layout)
    if scenario == "sft-warmup":
        before = Leg(backend=chosen, layout=parsed, steps=2, save="checkpoint")
        after = Leg(backend=chosen, layout=parsed, steps=config.steps - 2)
        return Cell(scenario=config, legs=(before, after), program="resume", faults=faults)
    return Cell.single(scenario=config, backend=chosen, layout=parsed, faults=faults)
