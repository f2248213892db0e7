"""The pytest plugin refuses what this machine has no room for, before any cell runs, as `parity run` does."""

import pytest
from test_pytest_plugin import MINE, run_pytest_here

pytest_plugins = ["pytester"]


def test_a_machine_without_room_for_the_cells_runs_none(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conformance.room.check.available_memory", lambda: 1e6)
    run = run_pytest_here(pytester, *MINE, "--parity-backend", "odd:Odd", "--parity-cells", "*/dp2/*")
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert "GB of memory" in run.text
    assert "0.0 GB are free" in run.text
    assert not run.out.exists()
