"""``parity compare A B``: two runs cell by cell, with the margin of every stage, states and versions."""

import json
import re
from pathlib import Path

import pytest
from nights import LENT, NIGHTLY, VERSIONS, night
from report_sample import CONFORMS, DIFFERS, PARTLY, RESUMED, UNSUPPORTED, edit, entry_of

from conformance.cli import main as cli
from conformance.results.verdict import margin
from reports.wording import plain


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("two")
    newer = {**VERSIONS, "torch": "2.14.0"}
    return night(root / "a", 14, crashed=[PARTLY]), night(
        root / "b", 15, versions=newer, wrong=[DIFFERS], without=[RESUMED]
    )


def compared(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = cli.main(["compare", *map(str, two), *options])
    return code, capsys.readouterr().out


def test_two_runs_are_set_side_by_side(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, text = compared(two, capsys)
    assert code == 1
    assert f"| A | `{two[0]}` | 2026-08-14T03:12:00+00:00 | incomplete |\n| B | `{two[1]}` | 2026-08-15" in text
    assert "Versions that changed: torch 2.13.0 → 2.14.0.\n" in text
    assert f"3 cells of {len(NIGHTLY)} changed.\n" in text
    for cell, change in (
        (DIFFERS, "pass, now fail"),
        (RESUMED, "pass, now not in the run"),
        (PARTLY, "infrastructure failure, now pass"),
    ):
        assert f"\n- `{cell}`: {change}" in text
    before, now = (entry_of(out, DIFFERS).verdict.worst for out in two)
    (row,) = re.findall(rf"\n\| `{re.escape(DIFFERS)}` \| (.*) \|", text)
    squares = row.split(" | ")
    assert squares[:2] == ["✓ pass", "✗ fail"]
    changed = [stage for stage in before if margin(before[stage].ratio) != margin(now[stage].ratio)]
    assert "gradients" in changed
    for stage in changed:
        assert plain(f"{margin(before[stage].ratio)} → {margin(now[stage].ratio)}") in squares
    assert f"`{UNSUPPORTED}` |" not in text  # nothing of it was compared


def test_the_same_run_twice_is_alike(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, text = compared((two[0], two[0]), capsys)
    assert code == 0
    assert "No version changed." in text
    assert "0 cells of" in text
    assert " → " not in text


def test_runs_that_were_judged_by_other_oracles_are_not_alike(
    two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = night(tmp_path / "other", 16, crashed=[PARTLY], lent=[RESUMED])
    code, text = compared((two[0], other), capsys)
    assert code == 1
    assert "0 cells of" in text
    told = plain(f"the suite's own reference, now second-class reference, {LENT}")
    assert f"1 cell judged by another reference.\n\n- `{RESUMED}`: {told}\n" in text
    values = json.loads(compared((two[0], other), capsys, "--json")[1])
    assert values["oracles"] == [{"cell": RESUMED, "before": "", "now": LENT}]


def test_the_numbers_are_there_as_json(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads(compared(two, capsys, "--json")[1])
    cells = {cell["cell"]: cell for cell in values["cells"]}
    worst = entry_of(two[1], CONFORMS).verdict.worst
    assert cells[CONFORMS]["ratios"]["loss"] == [worst["loss"].ratio] * 2
    assert cells[RESUMED]["now"] is None
    assert cells[RESUMED]["ratios"]["loss"][1] is None
    assert values["versions"] == [{"name": "torch", "before": "2.13.0", "now": "2.14.0"}]


def test_a_folder_that_cannot_be_believed_is_compared_with_nothing(
    two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = night(tmp_path / "other", 16)
    edit(other / entry_of(other, CONFORMS).folder / "verdict.json", state="differs")
    assert cli.main(["compare", str(two[0]), str(other)]) == 2
    assert "says differs, the summary says conforms" in capsys.readouterr().err
