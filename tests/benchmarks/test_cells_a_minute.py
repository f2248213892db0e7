"""benchmarks/cells_a_minute.py: the same judged cells in worker groups that stay alive, and under a torchrun for each
phase."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "cells_a_minute.py"
sys.path.insert(0, str(PROGRAM.parent))
import cells_a_minute  # noqa: E402


@pytest.mark.exhaustive
def test_both_runs_judge_the_same_cell_and_only_one_starts_a_torchrun(tmp_path: Path) -> None:
    out = tmp_path / "out"
    subprocess.run(
        [sys.executable, str(PROGRAM), str(out), "--profile", "quick", "--cells", "sft-padded/llama/fsdp2/*"],
        check=True,
    )
    pool, torchrun = json.loads((out / "cells.json").read_text())["runs"]
    assert pool["states"] == torchrun["states"] == {"conforms": 1}
    assert 0 < torchrun["cells_a_minute"] < pool["cells_a_minute"]
    assert not list((out / "pool-0").rglob("torchrun.log"))
    assert len(list((out / "torchrun-0").rglob("torchrun.log"))) == 1
    oracles = [sorted(one.name for one in (out / f"{run}-0-cache/oracle").iterdir()) for run in ("pool", "torchrun")]
    assert oracles[0] == oracles[1] != []  # neither finds those of the other


@pytest.mark.parametrize("option", ["--ranks-per-gpu=2", "--faults"])
def test_what_torchrun_cannot_do_is_refused(
    tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), str(tmp_path / "out"), option])
    with pytest.raises(SystemExit, match="2"):
        cells_a_minute.main()
    assert "not possible under torchrun" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
