"""The example adapter: short, on public names only, found once installed, and told from a broken one."""

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.cli import main as cli

EXAMPLE = Path(__file__).parents[2] / "examples" / "hf_trainer"
MODULE = EXAMPLE / "parity_hf_trainer.py"
HONEST = ("sft-packed/pangu/hf-trainer/dp2/exact", "sft-sgd/llama/hf-trainer/dp2/exact")
BROKEN = "sft-packed/pangu/local-token-mean/dp2/exact"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The example is installed, from a copy: building must not write into the checkout."""
    folder = tmp_path_factory.mktemp("hf_trainer")
    source = shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"),
            *("--no-deps", "--no-build-isolation", "--no-index", "--target", folder / "target", source),
        ],
        check=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / "target"))
        yield


def parity(*arguments: str | Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What a command says in JSON, if it comes to its end."""
    code = cli.main([*map(str, arguments), "--json", "--profile", str(EXAMPLE / "profile.toml")])
    said = capsys.readouterr()
    assert code in (0, 1), said.err
    answer: dict[str, Any] = json.loads(said.out)
    return answer


def test_it_has_less_than_a_hundred_lines() -> None:
    assert len(MODULE.read_text(encoding="utf-8").splitlines()) < 100


def test_it_needs_public_names_only() -> None:
    used = set()
    for node in ast.walk(ast.parse(MODULE.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            used |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
    own = {name for name in used if name.partition(".")[0] in ("conformance", "impl", "parity", "reports", "fixtures")}
    assert {name.partition(".")[0] for name in own} == {"parity"}
    assert not [name for name in own if "._" in name]


@pytest.mark.usefixtures("installed")
def test_once_installed_it_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    listed = parity("list", "--backend", "hf-trainer", capsys=capsys)
    assert listed["backends"]["hf-trainer"] == "parity_hf_trainer:HFTrainerBackend"
    assert set(HONEST) < {cell["id"] for cell in listed["cells"]}
    assert not [cell for cell in listed["cells"] if cell["refused"]]


@pytest.mark.usefixtures("installed")
@pytest.mark.exhaustive
def test_the_suite_tells_it_from_a_broken_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [argument for cell in (*HONEST, BROKEN) for argument in ("--cells", cell)]
    backends = ("--backend", "hf-trainer", "--backend", "hf_trainer_variants:LocalTokenMean")
    summary = parity("run", *backends, *chosen, "--out", tmp_path / "out", capsys=capsys)
    cells = {cell["id"]: cell for cell in summary["cells"]}
    assert {cell: cells[cell]["state"] for cell in HONEST} == dict.fromkeys(HONEST, "partly_observed"), cells
    assert all(cells[cell]["reason"].endswith("; not observed: log-probs") for cell in HONEST)  # the Trainer shows none
    assert cells[BROKEN]["state"] == "differs"
    assert cells[BROKEN]["reason"].startswith(("first difference at loss", "first difference at gradients"))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("installed")
def test_all_of_its_profile_agrees_in_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = parity("run", "--backend", "hf-trainer", "--out", tmp_path / "out", capsys=capsys)
    assert {cell["state"] for cell in summary["cells"]} == {"partly_observed"}
    assert summary["verdict"] == "partly_observed"
