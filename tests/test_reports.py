"""The reports say what the output folder says, whole and in order, and never make a run look better than it was."""

import math
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from report_sample import (
    CELLS,
    CONFORMS,
    CRASHED,
    DIFFERS,
    EXPECTED,
    NOT_RUN,
    UNSUPPORTED,
    edit,
    folder_of,
    only_conforming,
    set_state,
    write_json,
    write_sample,
)

from reports import markdown, words
from reports.html import write_html
from reports.junit import write_junit
from reports.load import STATES, Quantity, read_report
from reports.markdown import write_markdown


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never written to by a test, but for the reports."""
    return write_sample(tmp_path_factory.mktemp("sample") / "out")


@pytest.fixture
def out(sample: Path, tmp_path: Path) -> Path:
    """A copy of the sample that a test may damage."""
    return Path(shutil.copytree(sample, tmp_path / "out"))


# Reading


def test_a_conforming_run_conforms_and_names_the_cell_closest_to_its_tolerance(out: Path) -> None:
    only_conforming(out)
    report = read_report(out)
    title, text = words.headline(report)
    assert report.verdict == "conforms"
    assert title == "16 cells of 16 conform"
    assert re.search(r"Closest to its tolerance: sft-.*, 0\.\d+ of what is allowed", text)


def test_a_truncated_record_is_incomplete_and_never_green(out: Path) -> None:
    only_conforming(out)
    record = folder_of(out, CONFORMS) / "record" / "record.jsonl"
    record.write_bytes(b"".join(record.read_bytes().splitlines(keepends=True)[:4]))
    report = read_report(out)
    cell = next(c for c in report.cells if c.id == CONFORMS)
    assert (report.verdict, cell.state) == ("incomplete", "infrastructure")
    assert "no footer, so it stopped after step 1" in cell.reason
    page = write_html(out).read_text(encoding="utf-8")
    assert "Incomplete: not a pass" in page
    assert f'class="cell infrastructure" id="cell-{CONFORMS}"' in page
    assert ET.parse(write_junit(out)).getroot().get("errors") == "1"
    assert write_markdown(out).read_text().startswith("## ⚠️ Incomplete")


def test_an_edited_record_is_not_trusted(out: Path) -> None:
    record = folder_of(out, CONFORMS) / "record" / "record.jsonl"
    record.write_text(record.read_text().replace('"step": 2', '"step":  2'))
    cell = next(c for c in read_report(out).cells if c.id == CONFORMS)
    assert cell.state == "infrastructure"
    assert "does not match its own digest" in cell.reason


@pytest.mark.parametrize("part", ["record", "quantities"])
def test_a_pass_that_rests_on_nothing_is_not_a_pass(out: Path, part: str) -> None:
    edit(folder_of(out, CONFORMS) / "verdict.json", **{part: None if part == "record" else []})
    assert next(c for c in read_report(out).cells if c.id == CONFORMS).state == "infrastructure"


def test_a_run_that_did_not_finish_is_incomplete(out: Path) -> None:
    only_conforming(out)
    edit(out / "summary.json", finished=None)
    report = read_report(out)
    assert report.verdict == "incomplete"
    assert "did not finish" in words.headline(report)[1]
    cases = list(ET.parse(write_junit(out)).iter("testcase"))
    assert [case[0].tag for case in cases if len(case)] == ["error"]


def test_a_damaged_record_does_not_hide_a_difference(out: Path) -> None:
    shutil.rmtree(folder_of(out, DIFFERS) / "record")
    assert next(c for c in read_report(out).cells if c.id == DIFFERS).state == "differs"
    assert "The record of this cell is damaged" in write_html(out).read_text(encoding="utf-8")


def test_cells_that_never_ran_need_no_folder(out: Path) -> None:
    for cell in (UNSUPPORTED, NOT_RUN, CRASHED):
        shutil.rmtree(folder_of(out, cell))
    states = {c.id: (c.state, c.reason) for c in read_report(out).cells}
    assert states[UNSUPPORTED] == ("unsupported", "megatron has no context parallelism for this attention; use sp1")
    assert states[NOT_RUN][0] == "not_run"
    assert states[CRASHED][0] == "infrastructure"


def _other_cell(out: Path) -> None:
    edit(folder_of(out, CONFORMS) / "verdict.json", cell=DIFFERS)


def _passed_by_hand(out: Path) -> None:
    set_state(out, DIFFERS, "conforms")


def _outside(out: Path) -> None:
    edit(folder_of(out, CONFORMS) / "verdict.json", record="../../..")


def _unknown_state(out: Path) -> None:
    set_state(out, CONFORMS, "fine")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda out: shutil.rmtree(out), "there is no folder"),
        (lambda out: (out / "summary.json").unlink(), "holds no summary.json"),
        (lambda out: (out / "summary.json").write_text('{"schema": 1, "ce'), "cut short or edited"),
        (lambda out: write_json(out / "summary.json", {"tests": 3}), "has schema None"),
        (lambda out: edit(out / "summary.json", schema=2), "has schema 2, this version reads 1"),
        (lambda out: edit(out / "summary.json", counts={"conforms": 22}), "counts 22 cells as conforms but lists 16"),
        (lambda out: edit(out / "summary.json", verdict="conforms"), "says conforms, its cells do not"),
        (lambda out: shutil.rmtree(folder_of(out, CONFORMS)), "holds no verdict of sft-packed/qwen3"),
        (_other_cell, "was edited or comes from another run"),
        (_passed_by_hand, "outside its tolerance"),
        (_outside, "lies outside of"),
        (_unknown_state, "has state 'fine'"),
    ],
)
def test_a_folder_that_cannot_be_trusted_is_refused_with_the_reason(out: Path, damage: Any, message: str) -> None:
    damage(out)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_report(out)


def test_reporting_needs_neither_torch_nor_a_backend() -> None:
    code = "import sys, reports.html, reports.junit, reports.markdown; print({'torch', 'impl'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


# Words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1e-5, "<0.01"),
        (0.314, "0.31"),
        (12.3, "12"),
        (1, "1.0"),
        (0.9999, "<1"),
        (1.0001, ">1"),
        (234567, "2e5"),
        (math.inf, "∞"),
    ],
)
def test_ratios_are_short_and_never_rounded_onto_the_tolerance(value: float, text: str) -> None:
    assert words.ratio(value) == text


@pytest.mark.parametrize(
    ("observed", "allowed", "ratio"),
    [(math.nan, 1.0, math.inf), (1e-9, 0.0, math.inf), (0.0, 0.0, 0.0), (2.0, 4.0, 0.5)],
)
def test_what_is_not_a_number_or_not_allowed_is_outside_of_any_tolerance(
    observed: float, allowed: float, ratio: float
) -> None:
    assert Quantity(stage="loss", tensor="loss", step=0, observed=observed, allowed=allowed).ratio == ratio


# JUnit


def test_junit_has_one_case_per_cell_with_its_state(sample: Path) -> None:
    root = ET.parse(write_junit(sample)).getroot()
    suite = root[0]
    expected = {"tests": "22", "failures": "2", "errors": "2", "skipped": "2"}
    for element in (root, suite):
        assert {key: element.get(key) for key in expected} == expected
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert list(cases) == list(CELLS)
    assert [child.tag for child in cases[DIFFERS]] == ["failure"]
    assert "gradients: model.layers.1.self_attn.o_proj.bias, at step 0: observed" in (cases[DIFFERS][0].text or "")
    assert [child.tag for child in cases[CRASHED]] == [child.tag for child in cases[NOT_RUN]] == ["error"]
    assert "NCCL communicator was aborted" in (cases[CRASHED][0].text or "")
    assert cases[UNSUPPORTED][0].tag == cases[EXPECTED][0].tag == "skipped"
    assert "use sp1" in (cases[UNSUPPORTED][0].get("message") or "")
    assert len(cases[CONFORMS]) == 0
    assert cases[CONFORMS].get("classname") == "parity.fsdp2.sft-packed"


def test_junit_stays_valid_whatever_a_log_holds(out: Path) -> None:
    (folder_of(out, CRASHED) / "logs" / "rank-0.log").write_bytes(b"\x00\x08 ]]> & \xff\xfe")
    assert any("]]> &" in (error.text or "") for error in ET.parse(write_junit(out)).iter("error"))


# Markdown


def test_markdown_puts_failures_first(sample: Path) -> None:
    text = write_markdown(sample).read_text(encoding="utf-8")
    assert text.startswith("## ❌ 2 cells of 22 differ")
    order = [text.index(f"### {STATES[state].symbol}") for state in STATES]
    assert order == sorted(order)
    assert "| gradients | `model.layers.1.self_attn.o_proj.bias` | 0 |" in text
    assert all(f"`{cell}`" in text for cell in CELLS)


def test_markdown_is_cut_at_the_end_of_a_block_before_the_limit(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown, "LIMIT", 3000)
    text = write_markdown(sample).read_text(encoding="utf-8")
    assert len(text.encode()) < 3000
    assert f"`{DIFFERS}`" in text
    assert re.search(r"\*\*Cut short here:\*\* \d+ parts left out\. All of it is in `report\.html`\.\n$", text)
