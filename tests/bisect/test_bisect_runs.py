"""A run bisects its first differing cells by itself, tells it everywhere, and believes nothing that it reads back."""

import base64
import contextlib
import gzip
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plain_profile import SCENARIO

from conformance.bisect.explain import describe
from conformance.bisect.run import bisect_run
from conformance.cli import main as cli
from conformance.core.process import Stop, Stopped
from conformance.matrix.options import Selection
from conformance.matrix.profile import select_cells
from conformance.results.bisection import BISECTION, Bisection, read_bisection, write_bisection
from conformance.results.trust import CheckedCell, read_cells
from conformance.runner.placement import SessionConfig
from conformance.runner.session import Session
from reports.load import read_report
from reports.wording import details

pytestmark = pytest.mark.slow

PROFILE = """
description = "a layout that conforms and one that differs, in two precisions"
[[cells]]
scenarios = ["{scenario}"]
models = ["llama"]
layouts = ["dp1", "dp2"]
precisions = ["fp32", "exact"]
"""
EXACT, FP32 = "tiny/llama/wrongmlp/dp2/exact", "tiny/llama/wrongmlp/dp2/fp32"
ANSWER = "step 0: first wrong module, forward: model.layers.1.mlp"


def asked(folder: Path, backend: str) -> list[str]:
    (folder / "tiny.toml").write_text(SCENARIO)
    (folder / "profile.toml").write_text(PROFILE.format(scenario=folder / "tiny.toml"))
    return ["--profile", str(folder / "profile.toml"), "--backend", f"plain_traced:{backend}"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output folder of a run with two cells that differ, and what the run has said."""
    folder = tmp_path_factory.mktemp("run")
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        assert cli.main(["run", *asked(folder, "WrongMlp"), "--out", str(folder / "out")]) == 1
    return folder / "out", said.getvalue()


@pytest.fixture
def out(ended: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(ended[0], tmp_path / "out", symlinks=True))


def cell(out: Path, name: str) -> CheckedCell:
    return next(one for one in read_cells(out)[1] if one.entry.cell == name)


def file_of(out: Path, name: str) -> Path:
    return out / "cells" / name.replace("/", "_") / BISECTION


def test_the_first_differing_cell_of_each_group_is_bisected(ended: tuple[Path, str]) -> None:
    out, said = ended
    assert [name.parent.name for name in sorted(out.glob(f"cells/*/{BISECTION}"))] == [
        name.replace("/", "_") for name in (EXACT, FP32)
    ]
    found = cell(out, EXACT).bisection
    assert found
    (main,) = found.models
    assert (main.where, found.traced, found.step, found.stage) == ("model.layers.1.mlp", EXACT, 0, "log-probs")
    assert main.forward
    assert (main.forward.wrong.ranks, main.forward.wrong.hold) == ((1,), (0, 1))
    assert main.forward.wrong.would_be_right == "it is 2 times the reference"
    assert found.collectives
    assert found.collectives.conforming == "tiny/llama/wrongmlp/dp1/exact"
    assert said.count(f"bisect {EXACT}: {ANSWER}") == 1


def test_nothing_of_it_is_left_but_the_result(ended: tuple[Path, str]) -> None:
    assert not [*ended[0].glob("cells/*/traced")]
    assert len([*ended[0].glob("cells/*")]) == 4


def test_a_cell_in_another_precision_is_told_by_its_exact_twin(ended: tuple[Path, str]) -> None:
    found = cell(ended[0], FP32).bisection
    assert found
    assert (found.cell, found.traced, found.models) == (FP32, EXACT, cell(ended[0], EXACT).bisection.models)  # type: ignore[union-attr]
    assert ("traced", f"{EXACT}, because noise hides what is right in any other precision") in describe(found).facts


def test_all_reports_show_what_is_stored(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("report", "judge"):
        assert cli.main([command, str(out)]) == 1
        assert f"bisect {EXACT}: {ANSWER}" in capsys.readouterr().out
    assert f"Bisected: **{ANSWER.replace('_', chr(92) + '_')}**" in (out / "report.md").read_text()
    report = read_report(out)
    number = next(n for n, one in enumerate(report.cells) if one.id == EXACT)
    assert f"bisected: {ANSWER}" in details(report.cells[number])
    packed = re.search(r'id="block-0"[^>]*>([^<]*)<', (out / "report.html").read_text())
    assert packed
    shown: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed[1])))[number]["bisection"]
    assert shown["answer"] == ANSWER
    assert ["ranks", "wrong on 1 of 0, 1"] in shown["facts"]
    assert ["collectives", "there, forward: none"] in shown["facts"]
    assert ["conforming", "tiny/llama/wrongmlp/dp1/exact, there: none"] in shown["facts"]


@pytest.mark.exhaustive
def test_a_cell_that_is_run_again_with_no_bisect_has_none_any_more(ended: tuple[Path, str], out: Path) -> None:
    asked_before = asked(ended[0].parent, "WrongMlp")
    assert cli.main(["run", *asked_before, "--resume", str(out), "--rerun", "failed", "--no-bisect"]) == 1
    assert (cell(out, EXACT).bisection, cell(out, FP32).bisection) == (None, None)


@pytest.mark.exhaustive
def test_a_defect_that_needs_the_precision_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "tiny/llama/wronginfp32/dp2/fp32"
    assert cli.main(["bisect", name, *asked(tmp_path, "WrongInFp32"), "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert (values["cell"], values["state"], values["where"]) == (name, "differs", "model.layers.1.mlp")
    assert values["bisection"]["traced"] == name
    assert "the exact tier agrees with the reference, so the defect is in code that only fp32 runs" in values["text"][1]


def test_a_bisection_that_fails_is_a_line_and_no_error(ended: tuple[Path, str], out: Path) -> None:
    file_of(out, EXACT).unlink()
    shutil.rmtree(file_of(out, EXACT).parent / "legs")
    before = (out / "summary.json").read_text()
    arguments = cli._parser().parse_args(["run", *asked(ended[0].parent, "WrongMlp"), "--cells", EXACT])
    said: list[str] = []
    with Session(SessionConfig(out=out)) as session:
        bisect_run(session, select_cells(Selection.from_options(arguments)), say=said.append)
    assert len(said) == 1
    assert said[0].startswith(f"bisect {EXACT}: not bisected: RecordError: ")
    assert (out / "summary.json").read_text() == before


@pytest.mark.parametrize("made", ["a finding", "a failure"])
def test_what_a_library_makes_of_a_signal_is_neither_written_nor_said(
    made: str, ended: tuple[Path, str], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = cell(ended[0], EXACT).bisection
    assert known
    file_of(out, EXACT).unlink()
    arguments = cli._parser().parse_args(["run", *asked(ended[0].parent, "WrongMlp"), "--cells", EXACT])
    said: list[str] = []
    stop = Stop(signal.SIGTERM)

    def bisect_judged(*_: object) -> Bisection:
        stop.number = signal.SIGTERM
        if made == "a failure":
            raise TypeError
        return known

    monkeypatch.setattr("conformance.bisect.run.bisect_judged", bisect_judged)
    with Session(SessionConfig(out=out), check=stop.check) as session, pytest.raises(Stopped):
        bisect_run(session, select_cells(Selection.from_options(arguments)), say=said.append)
    assert said == []
    assert not file_of(out, EXACT).exists()


DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "of another cell": ({"cell": "a/b/c/d/exact"}, "belongs to another run of the cell, or to another cell"),
    "of other records": ({"records": ["0" * 64]}, "belongs to another run of the cell, or to another cell"),
    "of another version": ({"schema": 99}, "not as the suite wrote it (schema"),
    "without a result": ({"models": []}, "holds no result"),
    "with a wrong type": ({"step": "1"}, "not as the suite wrote it (step"),
    "with ranks that are none": ({"collectives": {"issued": [[]], "conforming": "", "there": []}}, "not as the suite"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_stored_bisection_is_not_believed(damage: str, out: Path) -> None:
    changed, why = DAMAGE[damage]
    file = file_of(out, EXACT)
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    found = cell(out, EXACT).bisection
    assert found
    assert why in describe(found).answer
    assert found.models == ()


def test_a_stored_bisection_that_is_no_json_or_no_file_is_not_believed(out: Path) -> None:
    file = file_of(out, EXACT)
    file.write_text("{")
    assert "is not valid JSON" in describe(cell(out, EXACT).bisection).answer  # type: ignore[arg-type]
    file.unlink()
    file.symlink_to("/etc/hostname")
    assert "is a link" in describe(cell(out, EXACT).bisection).answer  # type: ignore[arg-type]


def test_what_is_written_is_what_is_read(ended: tuple[Path, str], tmp_path: Path) -> None:
    stored = cell(ended[0], EXACT).bisection
    assert stored
    write_bisection(tmp_path, stored)
    assert read_bisection(tmp_path, cell=stored.cell, records=stored.records) == stored


def test_a_cell_that_does_not_differ_has_none(out: Path) -> None:
    shutil.copy(file_of(out, EXACT), file_of(out, "tiny/llama/wrongmlp/dp1/exact"))
    assert cell(out, "tiny/llama/wrongmlp/dp1/exact").bisection is None


@pytest.mark.exhaustive
def test_the_pytest_plugin_does_the_same(ended: tuple[Path, str], tmp_path: Path) -> None:
    profile, backend = (asked(ended[0].parent, "WrongMlp")[at] for at in (1, 3))
    chosen = ["--parity-profile", profile, "--parity-backend", backend, "--parity-cells", EXACT]
    for more, expected in (([], ANSWER), (["--parity-no-bisect"], "")):
        out = tmp_path / f"out{len(more)}"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "conformance.suite", *chosen]
        here = Path(__file__).parents[1] / "support"
        done = subprocess.run(
            [*command, *more, "--parity-out", str(out)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(here.parent), str(here)])},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1, done.stdout
        assert (f"bisect {EXACT}: {ANSWER}" in done.stdout) == bool(expected)
        assert bool(cell(out, EXACT).bisection) == bool(expected)
