"""What several test files share: one session, so that worlds and oracle runs are made once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.backend import BackendEntry, find_backend
from conformance.plan.cell import Cell
from conformance.layout import Layout
from conformance.paths import FIXTURES
from conformance.scenario import Precision, load_scenario
from conformance.run.session import Session, SessionConfig


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
    """A cell of the built-in fixtures; ``overrides`` are fields of the scenario."""
    config = load_scenario(scenarios / f"{scenario}.toml", model=f"models/{model}", precision=precision, **overrides)
    return Cell(scenario=config, backend=backend or find_backend("fsdp2"), layout=Layout.parse(layout), faults=faults)
