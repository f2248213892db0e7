"""A history of nights: a run is compared with those before, and every report says what changed, and the suspects."""

import html
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from nights import LENT, SELECTION, VERSIONS, night
from report_sample import CONFORMS, DIFFERS, LATE, PARTLY, RESUMED, edit

from conformance.cli import main as cli
from conformance.core.errors import UsageError
from conformance.matrix.options import Demands, Portion, Ranks, Selection
from conformance.matrix.plan import make_plan
from conformance.results.baseline import Outcome
from conformance.results.history import RUNS, Summary, open_history, read_baseline
from conformance.results.output_folders import check_parts, read_part
from conformance.results.run_results import read_output_json, read_run
from reports.html import write_html
from reports.load import read_report
from reports.markdown import write_markdown

pytestmark = pytest.mark.slow

NEW_TORCH = {**VERSIONS, "torch": "2.14.0"}


def history(folder: Path, *options: object) -> int:
    return cli.main(["history", str(folder), *map(str, options)])


@pytest.fixture(scope="module")
def nightly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three nights. In the second a rank dies; in the third torch is another, two cells differ and one is refused."""
    root = tmp_path_factory.mktemp("nightly")
    kept = root / "history"
    assert history(kept, "--add", night(root / "one", 14)) == 0
    assert history(kept, "--add", night(root / "two", 15, against=kept, crashed=[RESUMED])) == 0
    night(root / "three", 16, against=kept, versions=NEW_TORCH, wrong=[DIFFERS, LATE], refused=[PARTLY])
    return root


def test_the_report_of_the_third_night_says_what_broke_and_names_the_new_torch(nightly: Path) -> None:
    text = write_markdown(nightly / "three").read_text()
    last, green = text.partition("### Since the last green run (2026-08-14 03:12, pass)")[::2]
    assert "### Since the last run (2026-08-15 03:12, incomplete)" in last
    for part in (last, green):
        assert "Suspects, because they changed in between: torch 2.13.0 → 2.14.0\n" in part
        assert f"**Newly failing: 2 cells**\n\n- `{DIFFERS}`: pass, now fail\n- `{LATE}`: " in part
        assert f"**Newly unsupported: 1 cell**\n\n- `{PARTLY}`: pass, now unsupported\n" in part
    assert f"**Fixed: 1 cell**\n\n- `{RESUMED}`: infrastructure failure, now pass\n" in last
    assert "Fixed" not in green.partition("### Flaky")[0]
    issue = (nightly / "three/issue.md").read_text()
    assert issue.startswith(f"# Parity: {DIFFERS} and 1 more cell newly fail\n\n")
    assert issue.count("### ✗") == 2
    warning = f"::warning title={RESUMED}::flaky: pass on 2026-08-14 03%3A12"
    assert warning.replace("%3A", ":") in (nightly / "three/annotations.txt").read_text()
    write_markdown(nightly / "one")
    assert not (nightly / "one/issue.md").exists()
    page = write_html(nightly / "three").read_text()
    for words in (
        "Since the last run (2026-08-15 03:12, incomplete)",
        "Since the last green run (2026-08-14 03:12, pass)",
        '<b class="suspect">torch 2.13.0 → 2.14.0</b>',
        "newly failing: 2 cells",
        f"<code>{DIFFERS}</code> pass, now fail",
        'data-tip="2026-08-15 03:12: 0 of 1 pass, 1 infrastructure failure"',
    ):
        assert words in page, words


def test_terminal_and_summary_say_the_same(nightly: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(nightly / "three")]) == 1
    said = capsys.readouterr().out.splitlines()
    kept = nightly / "history"
    assert said[0].startswith("fail: 2 fail, 2 unsupported, ")
    assert said[1:6] == [
        f"coverage lost since {kept}: {PARTLY} (unsupported)",
        f"since the last run (2026-08-15 03:12, incomplete): newly failing: {DIFFERS}, {LATE}; "
        f"newly unsupported: {PARTLY}; fixed: {RESUMED}",
        "  changed in between: torch 2.13.0 → 2.14.0",
        f"since the last green run (2026-08-14 03:12, pass): newly failing: {DIFFERS}, {LATE}; "
        f"newly unsupported: {PARTLY}",
        "  changed in between: torch 2.13.0 → 2.14.0",
    ]
    since = read_output_json(nightly / "three" / "summary.json")["since"]
    assert since["text"] == said[2 : 2 + len(since["text"])]
    assert since["green"]["suspects"] == [{"name": "torch", "before": "2.13.0", "now": "2.14.0"}]
    assert {change["kind"] for change in since["last"]["changes"]} == {"new", "refused", "fixed"}


def test_a_cell_that_failed_for_one_night_without_a_change_of_versions_is_flaky(nightly: Path) -> None:
    since = read_report(nightly / "three").since
    assert since
    why = "pass on 2026-08-14 03:12, infrastructure failure on 2026-08-15 03:12, with the same versions"
    assert [(flaky.cell, flaky.why) for flaky in since.flaky] == [(RESUMED, why)]


def test_the_trend_of_each_backend_is_drawn_night_by_night(nightly: Path) -> None:
    page = write_html(nightly / "three").read_text()
    trend = page[page.index('<table class="trend">') : page.index("</table>", page.index('<table class="trend">'))]
    assert trend.count("<tr>") == len({entry.backend for entry in read_run(nightly / "three")[1]})
    assert trend.count("<g ") == 3 * trend.count("<tr>")
    assert trend.count("<text ") == 3  # the night of the rank that died, and two backends that differ in the third


def test_the_history_shows_every_night_and_what_changed(nightly: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert history(nightly / "history") == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head == f"{SELECTION}:"
    assert [row.split()[:3] for row in rows[1:]] == [
        ["2026-08-14", "03:12", "pass"],
        ["2026-08-15", "03:12", "incomplete"],
    ]
    assert "1 infrastructure failure" in rows[2]
    assert history(nightly / "history", "--last", "1", "--json") == 0
    (runs,) = json.loads(capsys.readouterr().out).values()
    assert [run["verdict"] for run in runs] == ["conforms", "incomplete"]  # the last green one is never left out
    assert runs[0]["backends"]["megatron"] == {"unsupported": 1, "conforms": 2}


def test_a_cell_whose_oracle_is_another_is_told_although_it_conforms_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "history"
    assert history(kept, "--add", night(tmp_path / "one", 14)) == 0
    out = night(tmp_path / "two", 15, against=kept, lent=[RESUMED])
    change = f"the suite's own reference, now second-class reference, {LENT}"
    capsys.readouterr()
    assert cli.main(["report", str(out)]) == 0  # nothing else changed
    assert f"  judged by another reference: {change}: {RESUMED}" in capsys.readouterr().out.splitlines()
    (told,) = read_output_json(out / "summary.json")["since"]["last"]["oracles"]
    assert told == {"cell": RESUMED, "before": "", "now": LENT}
    assert f"**Judged by another reference: 1 cell**\n\n- `{RESUMED}`: {change}\n" in write_markdown(out).read_text()
    page = html.unescape(write_html(out).read_text())
    assert f"<code>{RESUMED}</code> {change}" in page
    assert history(kept, "--add", out) == 0
    capsys.readouterr()
    assert history(kept) == 0
    assert "1 by a second-class reference" in capsys.readouterr().out.splitlines()[-1]
    back = read_report(night(tmp_path / "three", 16, against=kept)).since
    assert back
    assert back.last
    assert [str(change) for change in back.last.oracles] == [
        f"second-class reference, {LENT}, now the suite's own reference"
    ]


def test_a_run_is_compared_with_one_folder_as_with_a_history(nightly: Path, tmp_path: Path) -> None:
    for given in (nightly / "one", nightly / "one" / "summary.json"):
        baseline = read_baseline(str(given), "another")
        assert [run.verdict for run in baseline.runs] == ["conforms"]
        assert baseline.demanded[DIFFERS] == "conforms"
    since = read_report(night(tmp_path / "now", 16, against=nightly / "one", without=[CONFORMS])).since
    assert since
    assert since.last
    assert since.green is None  # it is the last one
    assert [(change.kind, change.cell) for change in since.last.changes] == [("gone", CONFORMS)]


@pytest.mark.parametrize("name", ["nohist", "empty", "one.json"])
def test_a_baseline_that_is_not_there_says_what_to_do(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    given = str(tmp_path / name)
    with pytest.raises(UsageError) as refused:
        read_baseline(given, SELECTION)
    said = str(refused.value)
    assert said.startswith(f"--baseline {given}: there is no {given}")
    assert f"parity history {given} --add OUT starts" in said
    assert "omit --baseline in the first run" in said


def test_other_selections_are_no_baseline(nightly: Path) -> None:
    baseline = read_baseline(str(nightly / "history"), "--profile quick")
    assert baseline.runs == ()
    assert baseline.demanded == {}


def test_a_run_without_an_earlier_one_says_so(nightly: Path, tmp_path: Path) -> None:
    out = night(tmp_path / "now", 16)
    assert read_report(out).since is None
    assert "Since" not in write_html(out).read_text()
    values = read_output_json(out / "summary.json")
    values["floor"]["baseline"] = {"path": "nights", "cells": [], "runs": []}
    (out / "summary.json").write_text(json.dumps(values))
    assert "### No earlier run of these cells in `nights`" in write_markdown(out).read_text()
    assert "There is no earlier run of these cells." in write_html(out).read_text()


def test_the_same_run_is_kept_once(nightly: Path, tmp_path: Path) -> None:
    kept = tmp_path / "history"
    for _ in range(2):
        assert history(kept, "--add", nightly / "two", "--add", nightly / "one") == 0
    assert [run.started[:10] for run in read_baseline(str(kept), SELECTION).runs] == [
        "2026-08-14",
        "2026-08-15",
    ]


@pytest.fixture
def month(tmp_path: Path) -> Path:
    """A history of thirty nights, of which only the third passed."""
    with open_history(tmp_path / "month", change=True) as opened:
        for day in range(1, 31):
            opened.add(
                Summary(
                    selection=SELECTION,
                    started=datetime(2026, 9, day, tzinfo=UTC),
                    seconds=1.0,
                    verdict="conforms" if day == 3 else "differs",
                    versions={"torch": "2.13.0"},
                    cells={CONFORMS: Outcome(state="conforms", seconds=2.5), f"new-{day}": Outcome(state="differs")},
                )
            )
    return tmp_path / "month"


def days(month: Path) -> list[int]:
    return [int(run.started[8:10]) for run in read_baseline(str(month), SELECTION).runs]


def test_a_baseline_is_the_last_two_weeks_and_the_last_night_that_passed(month: Path) -> None:
    assert days(month) == [3, *range(31 - RUNS, 31)]


def test_old_runs_are_pruned_but_for_the_last_that_passed(month: Path) -> None:
    before = (month / "history.sqlite").stat().st_size
    assert history(month, "--keep", 2) == 0
    assert days(month) == [3, 29, 30]
    assert (month / "history.sqlite").stat().st_size <= before
    assert read_baseline(str(month), SELECTION).cells == (CONFORMS, "new-3", "new-29", "new-30")


@pytest.mark.parametrize("number", ["0", "-1"])
def test_a_number_of_runs_is_at_least_one(nightly: Path, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert history(nightly / "history", "--keep", number) == 2
    assert "1 or more" in capsys.readouterr().err


def _shard(values: dict[str, Any]) -> None:
    values["floor"] |= {"shards": ["1/2"], "whole": False}


def _old(values: dict[str, Any]) -> None:
    del values["selection"]


def _timeless(values: dict[str, Any]) -> None:
    values["started"] = "yesterday"


def _lying(values: dict[str, Any]) -> None:
    values["cells"][0]["state"] = "differs"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_shard, "only shard 1/2; merge all shards first: parity merge"),
        (_old, "does not say what was selected"),
        (_timeless, "has no valid start time ('yesterday')"),
        (_lying, "the summary says differs"),
    ],
)
def test_a_folder_that_cannot_be_believed_is_not_added(
    damage: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = night(tmp_path / "out", 14)
    values = read_output_json(out / "summary.json")
    damage(values)
    (out / "summary.json").write_text(json.dumps(values))
    assert history(tmp_path / "history", "--add", out) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "history").exists()


def test_the_shards_of_a_run_are_compared_when_they_are_merged(
    nightly: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard, kept, out = night(tmp_path / "shard", 16, wrong=[DIFFERS]), nightly / "history", tmp_path / "out"
    edit(shard / "summary.json", selected="same")
    assert cli.main(["merge", str(shard), "--baseline", str(kept), "--out", str(out)]) == 1
    assert f"newly failing: {DIFFERS}; fixed: {RESUMED}\n" in capsys.readouterr().out
    with pytest.raises(
        UsageError, match="--baseline concerns the cells of all shards together: give it to parity merge"
    ):
        make_plan(Selection(), Demands(baseline=str(kept)), Portion(shard="1/2"), ranks=Ranks())


def test_jobs_of_one_run_have_one_baseline(nightly: Path, tmp_path: Path) -> None:
    one, other = night(tmp_path / "a", 16, against=nightly / "one"), night(tmp_path / "b", 16, against=nightly / "two")
    for out in (one, other):
        edit(out / "summary.json", selected="same")
    with pytest.raises(UsageError, match=r"do not belong together: baseline \(digest\)"):
        check_parts([read_part(one), read_part(other)])
