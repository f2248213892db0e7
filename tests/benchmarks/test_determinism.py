"""benchmarks/determinism.py: the same cell twice has the same bits, and other kernels have others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import determinism  # noqa: E402


def test_a_run_that_judges_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["determinism.py", str(tmp_path / "out")])
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 2))
    for message in ("first run: parity run ended with 2", "is not empty; give a new folder"):
        with pytest.raises(SystemExit, match="2"):
            determinism.main()
        assert message in capsys.readouterr().err


@pytest.mark.exhaustive
def test_other_kernels_differ_and_the_same_ones_do_not(tmp_path: Path) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "benchmarks/determinism.py", str(tmp_path / "out")),
            *("--precisions", "fp32", "--backends", "fsdp2", "--only", "run to run", "kernels without AVX"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    again, other = json.loads((tmp_path / "out" / "determinism.json").read_text())
    assert again["tensors"] > 100
    assert again["differing"] == 0
    assert 0 < other["differing"] <= other["tensors"]
    assert 0 < other["largest"] < 1e-3
    assert (
        "| run to run | torch.use_deterministic_algorithms (on GPUs, not in half precision) | fp32: same bits |"
        in ended.stdout
    )
