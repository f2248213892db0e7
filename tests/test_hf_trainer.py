"""The example adapter: short, on public names only, found once installed, and told from a broken one."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "hf_trainer"
MODULE = EXAMPLE / "parity_hf_trainer.py"
HONEST = ("sft-packed/pangu/hf-trainer/dp2/exact", "sft-sgd/llama/hf-trainer/dp2/exact")
BROKEN = "sft-packed/pangu/localtokenmean/dp2/exact"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a process that sees the example installed, from a copy: building must not write into the checkout."""
    folder = tmp_path_factory.mktemp("hf_trainer")
    source = shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"),
            *("--no-deps", "--no-build-isolation", "--no-index", "--target", folder / "target", source),
        ],
        check=True,
    )
    return {**os.environ, "PYTHONPATH": f"{folder / 'target'}{os.pathsep}{Path(__file__).parent}"}


def parity(*arguments: str | Path, environment: dict[str, str]) -> dict[str, Any]:
    """What a command says in JSON, whatever its exit code."""
    command = [sys.executable, "-m", "conformance.cli", *arguments, "--json", "--profile", EXAMPLE / "profile.toml"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_it_has_less_than_a_hundred_lines() -> None:
    assert len(MODULE.read_text(encoding="utf-8").splitlines()) < 100


def test_it_needs_public_names_of_conformance_only() -> None:
    used = set()
    for node in ast.walk(ast.parse(MODULE.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            used |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
    own = {name for name in used if name.partition(".")[0] in ("conformance", "impl", "reports", "fixtures")}
    assert {name.partition(".")[0] for name in own} == {"conformance"}
    assert not [name for name in own if "._" in name]


def test_once_installed_it_is_found(environment: dict[str, str]) -> None:
    listed = parity("list", "--backend", "hf-trainer", environment=environment)
    assert listed["backends"]["hf-trainer"] == "parity_hf_trainer:HFTrainerBackend"
    assert set(HONEST) < {cell["id"] for cell in listed["cells"]}
    assert not [cell for cell in listed["cells"] if cell["unsupported"]]


def test_the_suite_tells_it_from_a_broken_one(environment: dict[str, str], tmp_path: Path) -> None:
    chosen = [argument for cell in (*HONEST, BROKEN) for argument in ("--cells", cell)]
    backends = ("--backend", "hf-trainer", "--backend", "hf_trainer_variants:LocalTokenMean")
    summary = parity("run", *backends, *chosen, "--out", tmp_path / "out", environment=environment)
    cells = {cell["id"]: cell for cell in summary["cells"]}
    assert {cell: cells[cell]["state"] for cell in HONEST} == dict.fromkeys(HONEST, "conforms"), cells
    assert cells[BROKEN]["state"] == "differs"
    assert cells[BROKEN]["reason"].startswith(("first difference at loss", "first difference at gradients"))
