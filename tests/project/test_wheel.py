"""The wheel: what a user installs is all there, and works away from the checkout."""

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance.matrix.options import Selection
from conformance.matrix.profile import profile_names, select_cells

FSDP2 = Selection(backend=("fsdp2",))  # whose library is imported soonest
CHECKOUT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


@dataclass(frozen=True, kw_only=True)
class Installed:
    """A folder that the wheel is installed in, which comes before the checkout on the path."""

    target: Path

    def run(self, *command: str | Path) -> str:
        environment = {**os.environ, "PYTHONPATH": str(self.target)}
        done = subprocess.run(command, cwd=self.target.parent, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, CHECKOUT], check=True
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Installed:
    target = wheel.with_name("target")
    subprocess.run([*PIP, "install", "--no-deps", "--no-index", "--target", target, wheel], check=True)
    return Installed(target=target)


def test_fixtures_templates_and_suite_are_inside(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for source, place in (
        ("fixtures/models", "conformance/_fixtures/models"),
        ("fixtures/data", "conformance/_fixtures/data"),
        ("fixtures/scenarios", "conformance/_fixtures/scenarios"),
        ("fixtures/profiles", "conformance/_fixtures/profiles"),
        ("fixtures/templates", "conformance/_fixtures/templates"),
        ("docs/findings", "reports/_findings"),
        ("reports/templates", "reports/templates"),
        ("conformance/suite", "conformance/suite"),
    ):
        files = [path for path in (CHECKOUT / source).rglob("*") if path.is_file() and path.suffix != ".pyc"]
        assert files
        assert {f"{place}/{path.relative_to(CHECKOUT / source).as_posix()}" for path in files} <= names


def test_every_package_is_typed(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"{package}/py.typed" for package in ("conformance", "impl", "parity", "reports")} <= {*names}


def test_tests_and_caches_are_not(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"conformance", "impl", "parity", "reports"}
    assert not [name for name in names if "__pycache__" in name or name.startswith("reports/published")]


@pytest.mark.exhaustive
def test_the_command_lists_the_cells_of_the_fixtures_inside(installed: Installed) -> None:
    listed = json.loads(installed.run(installed.target / "bin" / "parity", "list", "--json", *FSDP2.arguments()))
    assert listed["profiles"] == profile_names()
    assert [row["id"] for row in listed["cells"]] == [str(cell) for cell in select_cells(FSDP2)]


@pytest.mark.exhaustive
def test_announced_commands_are_found(installed: Installed) -> None:
    model = CHECKOUT / "fixtures/models/llama"
    found = json.loads(installed.run(installed.target / "bin" / "parity", "inspect", model, "--json"))
    assert found["format"] == "Hugging Face folder"


@pytest.mark.exhaustive
def test_the_package_parity_stands_beside_the_command_of_that_name(installed: Installed) -> None:
    where = "import parity; print(parity.__file__, parity.record.__module__)"
    place, module = installed.run(sys.executable, "-c", where).split()
    assert Path(place).is_relative_to(installed.target)
    assert module == "parity.recorder"


@pytest.mark.exhaustive
def test_the_suite_in_it_has_an_item_per_cell_and_collecting_writes_nothing(installed: Installed, wheel: Path) -> None:
    where = "import conformance.core.host as p; print(p.__file__, p.FIXTURES)"
    for place in installed.run(sys.executable, "-c", where).split():
        assert Path(place).is_relative_to(installed.target)
    collected = installed.run(
        *(sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider"),
        *("--pyargs", "conformance.suite", "--collect-only", "-q", "--parity-backend", "fsdp2"),
    )
    items = [line for line in collected.splitlines() if "::" in line]
    assert items == [f"target/conformance/suite/test_cells.py::test_cell[{c}]" for c in select_cells(FSDP2)]
    assert {path.name for path in installed.target.parent.iterdir()} == {"target", wheel.name}
