"""A run that cannot go on says why in one line, leaves what it has, and is neither a pass nor wrong usage."""

import ast
import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from plain_backend import Plain
from plain_profile import write_profile

import conformance
from conformance import cli
from conformance.backend import Support
from conformance.layout import Layout
from conformance.scenario import Scenario


class Second(Plain):
    """Something happens when the second cell is about to be run, after the first one was."""

    asked = 0

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Support:
        if layout.pp > 1:
            cls.asked += 1
            if cls.asked == 2:  # the first time is before any cell is run
                cls.happens()
        return super().supports(scenario, layout)

    @classmethod
    def happens(cls) -> None:
        raise NotImplementedError


class Full(Second):
    """The disk is full, and whoever writes to it says so."""

    @classmethod
    def happens(cls) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "record.jsonl")


class Removing(Second):
    """Somebody removes the output folder."""

    out = Path()

    @classmethod
    def happens(cls) -> None:
        shutil.rmtree(cls.out)


class Defective(Second):
    """A defect of the suite or of a backend, which happens to be a ValueError."""

    @classmethod
    def happens(cls) -> None:
        raise ValueError("not enough values to unpack")


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_profile(tmp_path_factory.mktemp("profile"))


def read(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(file.read_text())
    return values


def stopped(backend: type[Second], profile: str, out: Path) -> int:
    """The exit code of a run to which something happens after its first cell."""
    backend.asked = 0
    arguments = ["--backend", f"test_cli_stops:{backend.__name__}", "--profile", profile, "--out", str(out)]
    return cli.main(["run", *arguments])


def test_a_full_disk_ends_the_run_with_a_line_and_a_report(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stopped(Full, profile, tmp_path / "out") == 3
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
    monkeypatch.setattr(Removing, "out", tmp_path / "out")
    assert stopped(Removing, profile, tmp_path / "out") == 3
    error = capsys.readouterr().err
    assert "parity: stopped after 1 of 2 cells: " in error
    assert "out was removed while cells ran" in error
    assert "Traceback" not in error
    assert not (tmp_path / "out" / "summary.json").exists()


def test_a_bug_is_not_told_as_wrong_usage(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stopped(Defective, profile, tmp_path / "out") == 3
    assert "Traceback" in capsys.readouterr().err
    assert read(tmp_path / "out" / "summary.json")["verdict"] == "incomplete"


@pytest.mark.parametrize("module", ["cli", "pytest_plugin", "doctor", "suite/conftest", "run/session", "run/storage"])
def test_only_a_usage_error_is_taken_for_wrong_usage(module: str) -> None:
    tree = ast.parse((Path(conformance.__file__).parent / f"{module}.py").read_text())
    handlers = [node.type for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.type]
    names = [name.id for handler in handlers for name in ast.walk(handler) if isinstance(name, ast.Name)]
    assert "ValueError" not in names
