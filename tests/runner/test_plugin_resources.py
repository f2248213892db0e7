"""The pytest plugin refuses what this machine has no room for, before any cell runs, as `parity run` does."""

from pathlib import Path

import pytest
from test_pytest_plugin import MINE, run_pytest, run_pytest_here

pytest_plugins = ["pytester"]


def test_a_machine_without_room_for_the_cells_runs_none(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conformance.core.host.available_memory", lambda: 1e6)
    run = run_pytest_here(pytester, *MINE, "--parity-backend", "odd:Odd", "--parity-cells", "*/dp2/*")
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert "GB of memory" in run.text
    assert "0.0 GB are free" in run.text
    assert not run.out.exists()


SMALL_MACHINE = """
import os
import conformance.core.host as machine

def available_memory():  # workers take what their controller saw, so that all decide alike
    return 1e15 if "PYTEST_XDIST_WORKER" in os.environ else 3e9

machine.available_memory = available_memory
"""


@pytest.mark.exhaustive
def test_workers_together_need_the_room_of_as_many_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 GB are enough for one of these cells at a time, and not for three."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # of this run, which its own controller would inherit
    (tmp_path / "small_machine.py").write_text(SMALL_MACHINE)
    cells = [argument for dp in (1, 2, 3) for argument in ("--parity-cells", f"*/dp{dp}/*")]
    small = ("-n", "3", "-p", "small_machine", "--parity-backend", "plain_backend:Plain")
    run = run_pytest(tmp_path, *MINE, *small, *cells)
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert "3 cells at once" in run.text
    assert "workers would fit: -n 1" in run.text
    assert not run.out.exists()
