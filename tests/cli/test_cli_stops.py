"""A run that cannot go on says why in one line, leaves what it has, and is neither a pass nor wrong usage."""

import ast
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plain_profile import write_profile

import conformance
from conformance.cli import main as cli
from conformance.matrix.cell import Cell
from conformance.runner.attempt import JudgedCell
from conformance.runner.session import Session

Happens = Callable[[Path], None]


def the_disk_is_full(out: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out / "record.jsonl"))


def somebody_removes_the_folder(out: Path) -> None:
    shutil.rmtree(out)


def a_defect(out: Path) -> None:
    """Of the suite, or of a library; it happens to be a ValueError."""
    raise ValueError("not enough values to unpack")


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_profile(tmp_path_factory.mktemp("profile"))


def read(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(file.read_text())
    return values


def run(happens: Happens, profile: str, out: Path, monkeypatch: pytest.MonkeyPatch, *, after: int = 0) -> int:
    """The exit code of a run of two cells, to which something happens after so many of them."""
    ran: list[Cell] = []
    run_cell = Session.judged

    def run_until(session: Session, cell: Cell) -> JudgedCell:
        if len(ran) == after:
            happens(out)
        ran.append(cell)
        return run_cell(session, cell)

    monkeypatch.setattr(Session, "judged", run_until)
    monkeypatch.setattr("conformance.cli.run.lanes_of_host", lambda: 1)  # one cell after another
    return cli.main(["run", "--backend", "plain_backend:Plain", "--profile", profile, "--out", str(out)])


def test_a_full_disk_ends_the_run_with_a_line_and_a_report(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(the_disk_is_full, profile, tmp_path / "out", monkeypatch, after=1) == 3
    error = capsys.readouterr().err
    assert "parity: stopped after 1 of 2 cells: nothing can be written: [Errno 28] No space left on device" in error
    assert "Traceback" not in error
    summary = read(tmp_path / "out" / "summary.json")
    assert (summary["verdict"], summary["finished"]) == ("incomplete", None)
    assert (summary["counts"]["conforms"], summary["counts"]["not_run"]) == (1, 1)
    assert "Incomplete" in (tmp_path / "out" / "report.md").read_text()


def test_an_output_folder_that_is_removed_ends_the_run_with_a_line(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(somebody_removes_the_folder, profile, tmp_path / "out", monkeypatch) == 3
    error = capsys.readouterr().err
    assert "parity: stopped after 0 of 2 cells: " in error
    assert "out was removed while cells ran" in error
    assert "Traceback" not in error
    assert not (tmp_path / "out" / "summary.json").exists()


def test_a_bug_is_not_told_as_wrong_usage(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(a_defect, profile, tmp_path / "out", monkeypatch) == 3
    assert "Traceback" in capsys.readouterr().err
    assert read(tmp_path / "out" / "summary.json")["verdict"] == "incomplete"


@pytest.mark.parametrize(
    "module",
    [
        *("cli/main", "cli/run", "cli/doctor", "suite/plugin", "suite/conftest"),
        *("runner/session", "runner/attempt", "runner/preflight", "runner/placement"),
    ],
)
def test_only_a_usage_error_is_taken_for_wrong_usage(module: str) -> None:
    tree = ast.parse((Path(conformance.__file__).parent / f"{module}.py").read_text())
    handlers = [node.type for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.type]
    names = [name.id for handler in handlers for name in ast.walk(handler) if isinstance(name, ast.Name)]
    assert "ValueError" not in names


def test_closed_pipe_is_no_pass(tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 2.0)):
        lines = [json.dumps({"step": step, "loss": factor / step}) for step in range(1, 9)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    command = [sys.executable, "-m", "conformance.cli.main", "diff", *map(str, sorted(tmp_path.iterdir()))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=300) in (1, 141)
