"""Backends side by side in the reports: what was compared is shown, in words first, and only of what lies here now."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from chromium import Browser
from report_sample import edit
from side_sample import GROUP, MEMBERS, NAMES, STEPS, cell_id, scaled, write_run

from conformance.core.errors import UsageError
from conformance.results.run_results import cell_summary, read_run, write_entry, write_summary
from conformance.results.verdict import State
from reports.html import write_html
from reports.markdown import write_markdown
from reports.side_by_side import APART, PAIRS, read_groups, to_markdown, words_of
from reports.tables import MATRIX

pytestmark = pytest.mark.slow

DEEPSPEED, FSDP2, FSDP2_TP, MEGATRON = MEMBERS
WRONG = scaled(f"gradient/{NAMES[1]}", 1.01)
STALE = "This comparison does not belong to the present verdicts and records"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four members that agree. Never written to by a test, but for the reports."""
    return write_run(tmp_path_factory.mktemp("side") / "out")


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four members, one of which has a wrong gradient. Never written to by a test, but for the reports."""
    return write_run(tmp_path_factory.mktemp("wrong") / "out", {DEEPSPEED: WRONG})


def summary(out: Path) -> str:
    """What the page says of the one group, before anything is opened."""
    found = re.search(r'<details class="side .*?</details>', write_html(out).read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found[0]


def open_side(browser: Browser, out: Path, *, width: int = 1280, dark: bool = False) -> None:
    browser.open(write_html(out).as_uri(), width=width, dark=dark)
    assert browser.run("document.querySelector('.side').open")
    browser.wait("document.querySelector('.side .chart') !== null")


# What is believed


def test_a_comparison_of_other_records_is_not_believed(out: Path) -> None:
    (group,) = json.loads((out / "side_by_side.json").read_text())["groups"]
    members = [{**member, "records": ["another"]} for member in group["members"]]
    edit(out / "side_by_side.json", groups=[{**group, "members": members}])
    assert STALE in summary(out)
    assert STALE in write_markdown(out).read_text()


def test_a_record_that_was_damaged_since_is_not_shown_as_agreeing(out: Path) -> None:
    record = out / "cells/04/legs/0/record/record.jsonl"
    record.write_text("".join(record.read_text().splitlines(keepends=True)[:-1]))
    assert STALE in summary(out)
    assert "not all compared" in summary(out)
    assert "0 of 1 group agree" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("state", ["not_run", "differs"])
def test_a_verdict_that_was_changed_since_is_not_shown_as_agreeing(out: Path, state: State) -> None:
    run, entries = read_run(out)
    changed = replace(entries[-1], verdict=replace(entries[-1].verdict, state=state))
    write_entry(out, changed)
    write_summary(out, run, [cell_summary(entry) for entry in (*entries[:-1], changed)])
    assert STALE in summary(out)


def test_a_comparison_of_cells_that_are_gone_is_shown_without_their_links(browser: Browser, out: Path) -> None:
    run, entries = read_run(out)
    write_summary(out, run, [cell_summary(entry) for entry in entries[:-1]])
    open_side(browser, out)
    assert STALE in browser.texts(".side .reason")[0]
    assert browser.texts(".sides a[href]") == ["dp2", "dp2", "dp2.tp2"]
    assert browser.problems == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"members": None}, "TypeError"),
        ({"members": [{"cell": "a/b/c/d"}]}, "KeyError('oracle')"),
        ({"columns": [1]}, "columns.0: Input should be a valid string"),
        ({"text": None}, "text: Input should be a valid string"),
        ({"state": "fine"}, "state: Input should be"),
        ({"state": "not_run"}, "state: Input should be"),
        ({"pairs": [{"members": [0, 9], "columns": {}}]}, "has pairs of unknown members"),
        ({"pairs": [{"members": [-1, 0], "columns": {}}]}, "has pairs of unknown members"),
        ({"pairs": [{"members": [0], "columns": {}}]}, "pairs.0.members.1: Field required"),
        ({"pairs": [{"members": [0, 1], "columns": {"loss": {"tensor": "loss"}}}]}, "pairs.0.columns.loss.observed"),
    ],
)
def test_a_comparison_of_other_types_is_refused(out: Path, changes: dict[str, object], words: str) -> None:
    (group,) = json.loads((out / "side_by_side.json").read_text())["groups"]
    edit(out / "side_by_side.json", groups=[{**group, **changes}])
    with pytest.raises(UsageError, match=f"is not as the suite wrote it .*{re.escape(words)}.*judge again"):
        read_groups(out)


@pytest.mark.parametrize("groups", [None, 1, [1], [[]], {"a": 1}])
def test_what_is_no_comparison_is_refused(out: Path, groups: object) -> None:
    edit(out / "side_by_side.json", groups=groups)
    with pytest.raises(UsageError, match="is not as the suite wrote it"):
        read_groups(out)


def test_a_group_that_contradicts_itself_is_refused(wrong: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(wrong, tmp_path / "out"))
    (group,) = json.loads((out / "side_by_side.json").read_text())["groups"]
    edit(out / "side_by_side.json", groups=[{**group, "state": "conforms"}])
    with pytest.raises(UsageError, match="but a pair is outside"):
        read_groups(out)


@pytest.mark.parametrize("missing", ["columns", "members", "text"])
def test_a_group_without_all_its_fields_is_refused(out: Path, missing: str) -> None:
    (group,) = json.loads((out / "side_by_side.json").read_text())["groups"]
    del group[missing]
    edit(out / "side_by_side.json", groups=[group])
    with pytest.raises(UsageError, match="is not as the suite wrote it"):
        read_groups(out)


def test_what_was_never_compared_is_said(out: Path) -> None:
    (out / "side_by_side.json").unlink()
    with pytest.raises(UsageError, match=re.escape(f"run: parity judge {out}")):
        to_markdown(out)
    assert "have not been compared with each other" in write_html(out).read_text(encoding="utf-8")


# As Markdown


def test_markdown_has_a_row_per_member_and_one_for_any_two(sample: Path) -> None:
    text = to_markdown(sample)
    assert f"#### `{GROUP}`: all agree ✅" in text
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`" in line]
    assert [row.split(" | ")[:2] for row in rows] == [
        [f"| {backend}", f"`{layout}`"] for backend, layout in (member.split("/") for member in MEMBERS)
    ]
    assert all(row.count("e-1") >= 2 for row in rows)
    assert "| *any two of them* | |" in text
    assert "torch 2.13.0+cpu" in text
    assert text.partition("####")[2].rpartition("<sub>")[0].strip() in write_markdown(sample).read_text()


def test_markdown_has_the_columns_that_were_compared(sample: Path) -> None:
    (group,) = json.loads((sample / "side_by_side.json").read_text())["groups"]
    assert f"| backend | layout | {' | '.join(group['columns'])} |" in to_markdown(sample)


def test_markdown_lists_pairs_that_are_too_far_apart(wrong: Path) -> None:
    rows = re.findall(
        r"\| deepspeed dp2 and (.*?) \| gradients: (.*?) \| 0 \| 0\.01 \| 2e-11 \| \*\*-8.7\*\* \|", to_markdown(wrong)
    )
    assert sorted(names for names, _ in rows) == ["fsdp2 dp2", "fsdp2 dp2.tp2", "megatron tp2"]
    assert len(rows) < PAIRS


def test_a_published_run_needs_no_records(sample: Path, tmp_path: Path) -> None:
    for name in ("summary.json", "side_by_side.json"):
        shutil.copy(sample / name, tmp_path)
    assert to_markdown(tmp_path) == to_markdown(sample)


def test_with_one_backend_there_is_nothing_to_compare(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out", members=(FSDP2, FSDP2_TP))
    with pytest.raises(UsageError, match=re.escape("and precision (backends that ran: fsdp2)")):
        to_markdown(out)


# On the page


def test_who_agrees_with_whom_is_readable_without_opening_anything(sample: Path, wrong: Path) -> None:
    assert "All 4 agree with the reference and with each other." in summary(sample)
    assert "1 of 1 group agree" in (sample / "report.html").read_text(encoding="utf-8")
    assert "deepspeed dp2 stands alone" in summary(wrong)
    assert "0 of 1 group agree" in (wrong / "report.html").read_text(encoding="utf-8")


def test_members_that_differ_alike_are_said_to_agree_with_each_other(sample: Path, wrong: Path) -> None:
    (group,), (apart,) = read_groups(sample) or (), read_groups(wrong) or ()
    differing = [tuple(replace(member, state="differs") for member in one.members) for one in (group, apart)]
    assert words_of(group) == "all agree"
    assert words_of(replace(group, state="differs", members=differing[0])) == APART
    assert (
        words_of(replace(group, state="differs")) == words_of(replace(apart, members=differing[1])) == "not all agree"
    )


def test_a_group_that_differs_as_expected_is_said_to_agree_but_for_that(wrong: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(wrong, tmp_path / "out"))
    run, (first, *others) = read_run(out)
    known = replace(first, verdict=replace(first.verdict, state="expected_difference"))
    write_entry(out, known)
    write_summary(out, run, [cell_summary(entry) for entry in (known, *others)])
    (group,) = json.loads((out / "side_by_side.json").read_text())["groups"]
    members = [
        {**member, "state": entry.verdict.state}
        for member, entry in zip(group["members"], (known, *others), strict=True)
    ]
    edit(out / "side_by_side.json", groups=[{**group, "state": "expected_difference", "members": members}])
    page = write_html(out).read_text(encoding="utf-8")
    assert "1 of 1 group agrees</a>, 1 of them but for known differences" in page


def test_the_configuration_of_members_is_held_against_each_other(browser: Browser, sample: Path) -> None:
    open_side(browser, sample)
    heads = ["key", *(member.replace("/", " ") for member in MEMBERS)]
    assert browser.texts(".side .config thead th") == heads * 2  # of keys that differ, and of others
    changed = browser.texts(".side .config .changed td:first-child")
    assert {"layout", "backend.name"} <= set(changed)
    assert not [key for key in changed if key.startswith("scenario")]


def test_an_opened_group_has_every_pair_and_the_curves_of_all_members(browser: Browser, sample: Path) -> None:
    open_side(browser, sample)
    assert len(browser.texts(".sides .square[data-tip]")) == 12  # each of six pairs twice
    assert browser.texts(".sides a[href]") == [member.split("/")[1] for member in MEMBERS]
    (group,) = json.loads((sample / "side_by_side.json").read_text())["groups"]
    assert browser.texts(".sides thead .value") == group["columns"]
    assert len(browser.texts(".side .chart:not(.key)")) == 4
    loss = "document.querySelector('.side .chart:not(.key)')"
    for kind, members in (("b0", 1), ("b1", 2), ("b2", 1)):
        assert browser.run(f"{loss}.querySelectorAll('.mark.{kind}').length") == members * STEPS
    assert browser.problems == []


def test_a_square_is_the_largest_difference_of_its_two_members(browser: Browser, sample: Path) -> None:
    open_side(browser, sample)
    (group,) = json.loads((sample / "side_by_side.json").read_text())["groups"]
    squares = browser.texts(".sides .square:not(.self)")
    for pair in group["pairs"]:
        a, b = pair["members"]
        largest = max(difference["observed"] for difference in pair["columns"].values())
        for row, column in ((a, b), (b, a)):
            square = squares[3 * row + column - (column > row)]  # a row of four has three others
            assert float(square) == pytest.approx(float(f"{largest:.0e}"))


def test_a_wrong_member_is_seen_in_the_squares_and_its_pairs_are_listed(browser: Browser, wrong: Path) -> None:
    open_side(browser, wrong)
    assert browser.texts(".sides .h6") == ["0.01"] * 6
    assert "Outside their tolerance" in browser.texts(".side h3")
    assert sum("deepspeed dp2 and" in name for name in browser.texts(".side td.left")) == 3


def test_a_pair_that_was_not_compared_in_all_columns_has_no_number(browser: Browser, tmp_path: Path) -> None:
    from conformance.judge.side_by_side import write_side_by_side

    out = write_run(tmp_path / "out")
    for file in (out / "cells/01/legs/0/record").glob("*.safetensors"):
        file.unlink()
    write_side_by_side(out)
    open_side(browser, out)
    squares = browser.texts(".sides .square:not(.self)")
    assert squares[:3] == ["?", "?", "?"]
    assert squares.count("?") == 6


def test_of_many_members_each_two_backends_show_their_furthest_pair(browser: Browser, tmp_path: Path) -> None:
    layouts = [f"dp{n}" for n in range(1, MATRIX)]
    members = (*(f"deepspeed/{layout}" for layout in layouts), *(f"fsdp2/{layout}" for layout in layouts))
    open_side(browser, write_run(tmp_path / "out", {members[3]: WRONG}, members=members))
    assert browser.texts(".square") == []
    found = browser.texts(".side td.left")
    for between in ("layouts of deepspeed", "deepspeed and fsdp2", "layouts of fsdp2"):
        assert between in found
    assert f"{2 * len(layouts) - 1 - PAIRS} more pairs in side_by_side.json." in browser.texts(".side .note")


def test_a_step_is_marked_in_all_charts_of_a_group(browser: Browser, sample: Path) -> None:
    open_side(browser, sample)
    browser.hover(".side .hover rect")
    assert browser.run("document.querySelectorAll('.side .hover.on').length") == 4
    assert "megatron tp2: 3" in browser.run("document.getElementById('tip').textContent")
    assert browser.problems == []


def test_of_several_groups_that_agree_each_is_drawn_when_it_is_opened(browser: Browser, out: Path) -> None:
    (group,) = json.loads((out / "side_by_side.json").read_text())["groups"]
    edit(out / "side_by_side.json", groups=[group, {**group, "group": "another"}])
    browser.open(write_html(out).as_uri())
    assert browser.texts(".side .chart") == []
    browser.click(".side:nth-of-type(2) summary")
    browser.wait("document.querySelector('.side .chart') !== null")
    browser.run("document.querySelectorAll('.side')[1].open = false")
    browser.click(".side:nth-of-type(2) summary")
    browser.wait("document.querySelectorAll('.side')[1].open")
    assert browser.run("[...document.querySelectorAll('.side')].map((e) => e.querySelectorAll('.sides').length)") == [
        0,
        1,
    ]


@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1024, True), (1440, False)])
def test_the_page_never_scrolls_sideways(browser: Browser, wrong: Path, width: int, dark: bool) -> None:
    open_side(browser, wrong, width=width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") <= width


def test_a_member_leads_to_its_cell(browser: Browser, sample: Path) -> None:
    open_side(browser, sample)
    browser.click(".sides tbody tr:nth-child(3) a")
    browser.wait(f"document.querySelector('.cell')?.dataset.cell === {json.dumps(cell_id(FSDP2_TP))}")
