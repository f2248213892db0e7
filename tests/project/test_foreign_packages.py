"""A folder ``impl/`` or ``reports/`` of the user comes first on the path, and changes nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from plain_profile import write_profile

ROOT, SUPPORT = Path(__file__).parents[2], Path(__file__).parents[1] / "support"
FOREIGN = "raise RuntimeError('the package of the user was imported')\n"
COMMAND = (sys.executable, "-P", "-m", "conformance.cli.main")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The user's project, with modules of these names that must not be imported."""
    for name in ("impl", "reports"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(FOREIGN)
    return tmp_path


def run(folder: Path, *command: str) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([".", str(ROOT), str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of the user" not in done.stderr
    return done.stdout


def test_commands_find_the_packages_of_the_distribution(folder: Path) -> None:
    assert "grpo" in run(folder, *COMMAND, "train", "--help")


def test_a_run_finds_its_backends_ranks_and_reports(folder: Path) -> None:
    """The backend is in the user's package, and imports the distribution's package of the same name."""
    (folder / "impl" / "mine.py").write_text("from plain_backend import Plain as Mine\n")
    backend = ("--profile", write_profile(folder), "--backend", "impl.mine:Mine")
    said = run(folder, *COMMAND, "run", *backend, "--cells", "*/dp2/*", "--out", "out")
    assert said.startswith("pass: 1 pass")
    assert (folder / "out" / "report.html").is_file()


def test_functions_leave_the_modules_of_the_user_as_they_were(folder: Path) -> None:
    (folder / "reports" / "__init__.py").write_text("mine = 1\n")
    (folder / "reports" / "own.py").write_text("mine = 2\n")
    for name, loss in (("a", 1.0), ("b", 2.0)):
        (folder / f"{name}.jsonl").write_text(f'{{"step": 1, "loss": {loss}}}\n{{"step": 2, "loss": {loss}}}\n')
    code = """
import sys
import reports
import parity
for _ in range(2):
    found = parity.diff("a.jsonl", "b.jsonl")
    assert "diverge at step 1" in found.text()
    assert found.to_json()["differs"]
    assert sys.modules["reports"] is reports and reports.mine == 1
    import reports.own
    assert reports.own.mine == 2
    assert "reports.logdiff" not in sys.modules
"""
    run(folder, sys.executable, "-c", code)


@pytest.mark.exhaustive
def test_a_training_finds_its_ranks(folder: Path) -> None:
    model = ROOT / "fixtures" / "models" / "llama"
    options = ("--backend", "fsdp2", "--pretrain", str(model), "--max-steps", "1", "--device", "cpu")
    sizes = ("--max-len", "128", "--train-batch-size", "2", "--nproc-per-node", "1", "--logging", "log.jsonl")
    run(folder, *COMMAND, "train", "sft", *options, *sizes)
    assert (folder / "log.jsonl").is_file()
