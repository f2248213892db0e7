"""The reports say what the output folder says, whole and in order, and never make a run look better than it was."""

import html
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from report_sample import (
    CELLS,
    CONFORMS,
    CRASHED,
    CRITIC,
    DIFFERS,
    EXPECTED,
    NOT_RUN,
    PARTLY,
    RESUMED,
    UNSUPPORTED,
    change,
    edit,
    entries_of,
    folder_of,
    only_conforming,
    rewrite,
    write_logs,
)

from conformance.core.errors import UsageError
from conformance.results.verdict import STATES, Quantity, Verdict, margin
from conformance.spec.observables import AGAINST_REBUILT, SHARE
from reports import markdown
from reports.ci_formats import write_junit
from reports.html import write_html
from reports.load import Cell, read_report
from reports.markdown import write_markdown
from reports.summary import headline


def cell_of(out: Path, cell: str) -> Cell:
    return next(c for c in read_report(out).cells if c.id == cell)


def truncate(record: Path) -> None:
    """What a run that was killed after step 1 leaves: header, weights as loaded, two steps."""
    record.write_bytes(b"".join(record.read_bytes().splitlines(keepends=True)[:4]))


# Reading


def test_a_conforming_run_conforms_and_names_the_cell_closest_to_its_tolerance(out: Path) -> None:
    only_conforming(out)
    report = read_report(out)
    title, text = headline(report)
    assert report.verdict == "conforms"
    assert title == "17 cells of 17 pass"
    assert re.search(r"Closest to its tolerance: \S+, .*, margin \+\d\.\d digits", text)


def test_known_differences_are_not_said_to_compute_what_the_oracle_computes(out: Path) -> None:
    rewrite(out, [entry for entry in entries_of(out) if entry.cell in (CONFORMS, EXPECTED)])
    report = read_report(out)
    assert report.verdict == "conforms"
    assert headline(report)[0] == "1 cell of 2 passes"
    assert "but for 1 known difference." in headline(report)[1]


def test_a_truncated_record_is_incomplete_and_never_green(out: Path) -> None:
    only_conforming(out)
    truncate(folder_of(out, CONFORMS) / "legs/0/record/record.jsonl")
    report = read_report(out)
    cell = cell_of(out, CONFORMS)
    assert (report.verdict, cell.state) == ("incomplete", "infrastructure")
    assert "has no footer: the cell stopped after step 1" in cell.reason
    assert [line["step"] for line in cell.steps] == [0, 1]  # what is left is shown all the same
    page = write_html(out).read_text(encoding="utf-8")
    assert "Incomplete: not a pass" in page
    assert f'class="box infrastructure" href="#cell-{CONFORMS}"' in page
    assert ET.parse(write_junit(out)).getroot().get("errors") == "1"
    assert write_markdown(out).read_text().startswith("## ⚠️ Incomplete")


@pytest.mark.parametrize("record", ["legs/0/record", "../../oracle/sft-packed-qwen3/float64"])
def test_an_edited_record_is_not_trusted(out: Path, record: str) -> None:
    file = folder_of(out, CONFORMS) / record / "record.jsonl"
    file.write_text(file.read_text().replace('"step": 2', '"step":  2'))
    cell = cell_of(out, CONFORMS)
    assert cell.state == "infrastructure"
    assert "does not match its own digest" in cell.reason


@pytest.mark.parametrize("record", ["legs/0/record", "legs/1/record", "../../oracle/sft-packed-qwen3/float64"])
def test_a_pass_without_all_its_records_is_not_a_pass(out: Path, record: str) -> None:
    shutil.rmtree(folder_of(out, RESUMED) / record)
    assert cell_of(out, RESUMED).state == "infrastructure"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"records": ()}, "there is no record of the cell"),
        ({"completed": False}, "did not run to its end"),
        ({"verdict": {"quantities": ()}}, "nothing was compared"),
        ({"records": ("legs/1/record", "legs/0/record")}, "are not consecutive"),
    ],
)
@pytest.mark.parametrize("state", ["conforms", "partly_observed", "expected_difference"])
def test_a_pass_that_rests_on_nothing_is_not_a_pass(out: Path, fields: dict[str, Any], reason: str, state: str) -> None:
    verdict = {"state": state, **fields.get("verdict", {})}
    change(out, RESUMED, **{**fields, "verdict": verdict})
    cell = cell_of(out, RESUMED)
    assert cell.state == "infrastructure"
    assert reason in cell.reason


def test_the_record_of_another_cell_is_neither_believed_nor_shown(out: Path) -> None:
    record = folder_of(out, CONFORMS) / "legs/0/record"
    shutil.rmtree(record)
    shutil.copytree(folder_of(out, CRITIC) / "legs/0/record", record)
    cell = cell_of(out, CONFORMS)
    assert (cell.state, cell.phases) == ("infrastructure", ())
    assert f"is a record of {CRITIC} and not of {CONFORMS}" in cell.reason


def test_a_record_of_a_backend_is_no_oracle(out: Path) -> None:
    oracle = out / "oracle/sft-packed-qwen3/float64"
    shutil.rmtree(oracle)
    shutil.copytree(folder_of(out, CONFORMS) / "legs/0/record", oracle)
    cell = cell_of(out, CONFORMS)
    assert (cell.state, cell.oracle) == ("infrastructure", None)
    assert "should be the oracle's record in float64" in cell.reason


def test_a_log_that_is_no_file_is_told_as_that(out: Path) -> None:
    log = folder_of(out, CRASHED) / "legs/0/logs/rank-0.log"
    log.unlink()
    os.mkfifo(log)
    assert "is a named pipe and not a file" in cell_of(out, CRASHED).logs["rank-0"]


def test_a_run_that_did_not_finish_is_incomplete(out: Path) -> None:
    only_conforming(out, finished=None)
    report = read_report(out)
    assert report.verdict == "incomplete"
    assert "did not finish" in headline(report)[1]
    cases = list(ET.parse(write_junit(out)).iter("testcase"))
    assert [case[0].tag for case in cases if len(case)] == ["error"]


def test_a_run_without_an_answer_is_incomplete(out: Path) -> None:
    rewrite(out, [entry for entry in entries_of(out) if entry.cell == UNSUPPORTED])
    assert read_report(out).verdict == "incomplete"
    assert "No cell was judged" in headline(read_report(out))[1]


def test_a_damaged_record_does_not_hide_a_difference(out: Path) -> None:
    shutil.rmtree(folder_of(out, DIFFERS) / "legs")
    cell = cell_of(out, DIFFERS)
    assert cell.state == "differs"
    assert "holds no record.jsonl" in cell.problem


def test_the_steps_of_all_phases_are_one_training_run(sample: Path) -> None:
    assert [len(phase.steps) for phase in cell_of(sample, RESUMED).phases] == [2, 3]
    assert [line["step"] for line in cell_of(sample, RESUMED).steps] == list(range(5))


def test_logs_are_shown_of_every_phase_of_a_cell_that_does_not_conform(out: Path) -> None:
    for cell in (RESUMED, CONFORMS):
        write_logs(folder_of(out, cell) / "legs/0/logs")
    write_logs(folder_of(out, RESUMED) / "legs/1/logs")
    change(out, RESUMED, completed=False)
    assert list(cell_of(out, RESUMED).logs) == [
        "phase 0, rank-0",
        "phase 0, rank-1",
        "phase 1, rank-0",
        "phase 1, rank-1",
    ]
    assert list(cell_of(out, CRASHED).logs) == ["rank-0", "rank-1"]
    assert cell_of(out, CONFORMS).logs == {}


def _other_cell(out: Path) -> None:
    edit(folder_of(out, CONFORMS) / "verdict.json", cell=DIFFERS)


def _verdict(**changes: Any) -> Callable[[Path], None]:
    return lambda out: edit(folder_of(out, CONFORMS) / "verdict.json", **changes)


def _summary(**changes: Any) -> Callable[[Path], None]:
    return lambda out: edit(out / "summary.json", **changes)


WRONG_TYPES = [
    (_verdict(layout="dp9"), "but names other parts of this id: it was edited or comes from another run"),
    (_verdict(folder="cells/elsewhere"), "was edited or comes from another run"),
    (_verdict(state=["conforms"]), "has state ['conforms']"),
    (_verdict(world_size="many"), "(world_size: Input should be a valid integer"),
    (_verdict(reproduce={}), "(reproduce: Input should be a valid string"),
    (_verdict(records="legs"), "(records: Input should be a valid tuple"),
    (_verdict(expected={"stage": "loss"}), "(expected: Input should be a valid tuple"),
    (
        _verdict(expected=[{"reason": "", "link": "", "defects": [{"kind": "none"}]}]),
        "(expected.0.defects.0: Input tag",
    ),
    (_verdict(observables=[{"key": 1}]), "(observables.0.key: Input should be a valid string"),
    (_verdict(quantities={"columns": ["stage"], "data": [["loss"]]}), "(data.0.1: Field required"),
    (_verdict(quantities=None), "(Input should be a dictionary"),
    (_summary(cells=[{"id": "x"}]), "(0.folder: Field required"),
    (_summary(cells=None), "(Input should be a valid tuple"),
    (_summary(environment=[]), "(environment: Input should be"),
    (_summary(finished=3), "(finished: Input should be a valid string"),
]


def _log_elsewhere(out: Path) -> None:
    log = folder_of(out, CRASHED) / "legs/0/logs/rank-0.log"
    log.rename(out.parent / "elsewhere.log")
    log.symlink_to(out.parent / "elsewhere.log")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda out: shutil.rmtree(out), "give the complete --out folder"),
        (lambda out: (out / "summary.json").unlink(), "give the complete --out folder"),
        (lambda out: (out / "summary.json").write_text('{"schema": 2, "ce'), "cut short or edited"),
        (lambda out: (out / "summary.json").write_text('{"tests": 3}'), "has schema None"),
        (lambda out: edit(out / "summary.json", schema=1), "has schema 1, this version reads 2"),
        (lambda out: shutil.rmtree(folder_of(out, CONFORMS)), "verdict.json; give the complete"),
        (_other_cell, "was edited or comes from another run"),
        (lambda out: change(out, DIFFERS, verdict={"state": "conforms"}), "is outside its tolerance"),
        (lambda out: change(out, DIFFERS, verdict={"state": "partly_observed"}), "is outside its tolerance"),
        (lambda out: edit(out / "summary.json", floor={}), "lacks 'require'"),
        (lambda out: change(out, CONFORMS, records=("../../..",)), "lies outside of"),
        (lambda out: change(out, CONFORMS, oracle="../../../.."), "lies outside of"),
        (_log_elsewhere, "lies outside of"),
        *WRONG_TYPES,
    ],
)
def test_a_folder_that_cannot_be_trusted_is_refused_with_the_reason(out: Path, damage: Any, message: str) -> None:
    damage(out)
    with pytest.raises(UsageError, match=re.escape(message)):
        read_report(out)


def test_every_reporter_that_is_announced_writes_into_the_folder(out: Path) -> None:
    groups = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["entry-points"]
    written = [EntryPoint(name, target, "").load()(out) for name, target in groups["parity.reporters"].items()]
    names = ["badge.svg", "ctrf.json", "report.html", "junit.xml", "report.md"]
    assert [file.relative_to(out).as_posix() for file in written] == names
    assert all(file.stat().st_size for file in written)
    for name, target in groups["parity.comparisons"].items():
        with pytest.raises(UsageError, match="have not been compared"):
            EntryPoint(name, target, "").load()(out)


def test_repeated_oracle_runs_are_told(out: Path) -> None:
    sentence = "the oracle's bf16 run of sft-packed/llama/fsdp2/dp2/bf16 was repeated: rank 0 was killed"
    edit(out / "summary.json", repeated=[sentence])
    for write in (write_html, write_markdown):
        assert sentence in html.unescape(write(out).read_text(encoding="utf-8")).replace("\\", "")


def test_reporting_needs_neither_torch_nor_a_backend() -> None:
    code = (
        "import sys, reports.ci_formats, reports.html, reports.markdown; print({'torch', 'impl'} & sys.modules.keys())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


# Words


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0, "="),
        (1e-5, "+5.0"),
        (0.314, "+0.5"),
        (12.3, "-1.1"),
        (1, "+0.0"),
        (0.9999, "+0.0"),
        (1.0001, "-0.0"),
        (2e11, "-11"),
        (math.inf, "-∞"),
    ],
)
def test_sign_of_a_margin_says_on_which_side_of_the_tolerance(ratio: float, text: str) -> None:
    assert margin(ratio) == text


@pytest.mark.parametrize("name", [f"weight{AGAINST_REBUILT}", f"update{SHARE}that are 0"])
@pytest.mark.parametrize("is_outside", [False, True])
def test_what_is_no_error_is_closest_only_if_it_differs(name: str, is_outside: bool) -> None:
    computed = Quantity(stage="update", tensor="weight", step=0, observed=3e-14, allowed=1e-11)
    other = replace(computed, tensor=name, observed=2.0 if is_outside else 0.5, allowed=1.0)
    closest = name if is_outside else "weight"
    for quantities in ((computed, other), (other, computed)):
        verdict = Verdict(state="conforms", reason="", quantities=quantities)
        assert verdict.closest == verdict.worst["update"]
        assert verdict.closest is not None
        assert verdict.closest.tensor == closest


@pytest.mark.parametrize(
    ("observed", "allowed", "ratio"),
    [(math.nan, 1.0, math.inf), (1e-9, 0.0, math.inf), (0.0, 0.0, 0.0), (2.0, 4.0, 0.5)],
)
def test_what_is_not_a_number_or_not_allowed_is_outside_of_any_tolerance(
    observed: float, allowed: float, ratio: float
) -> None:
    assert Quantity(stage="loss", tensor="loss", step=0, observed=observed, allowed=allowed).ratio == ratio


def test_stage_error_is_largest_error_and_nan_is_largest() -> None:
    def at(stage: str, tensor: str, observed: float) -> Quantity:
        return Quantity(stage=stage, tensor=tensor, step=0, observed=observed, allowed=1e-9)

    updates = [
        at("update", "w", 1e-13),
        at("update", "w against rebuilt", 1e-10),
        at("update", "v", 1e-14),
        at("update", f"update{SHARE}that are 0", 0.5),
    ]
    gradients = [at("gradients", "w", 1e-3), at("gradients", "v", math.nan), at("gradients", "u", 1e-2)]
    errors = Verdict(state="differs", reason="", quantities=(*updates, *gradients)).errors
    assert errors["update"] == 1e-13
    assert math.isnan(errors["gradients"])


# JUnit


def test_junit_has_one_case_per_cell_with_its_state(sample: Path) -> None:
    root = ET.parse(write_junit(sample)).getroot()
    suite = root[0]
    expected = {"tests": "25", "failures": "3", "errors": "2", "skipped": "2"}
    for element in (root, suite):
        assert {key: element.get(key) for key in expected} == expected
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert list(cases) == list(CELLS)
    assert [child.tag for child in cases[DIFFERS]] == ["failure"]
    assert "gradients: model.layers.1.self_attn.o_proj.bias, at step 0: " in (cases[DIFFERS][0].text or "")
    assert [child.tag for child in cases[CRASHED]] == [child.tag for child in cases[NOT_RUN]] == ["error"]
    assert "NCCL communicator was aborted" in (cases[CRASHED][0].text or "")
    assert cases[UNSUPPORTED][0].tag == cases[EXPECTED][0].tag == "skipped"
    assert "use sp1" in (cases[UNSUPPORTED][0].get("message") or "")
    assert len(cases[CONFORMS]) == 0
    assert [child.tag for child in cases[PARTLY]] == ["system-out"]  # passes, and says what was not seen
    assert (cases[PARTLY][0].text or "").endswith("not observed: log-probs")
    assert cases[CONFORMS].get("classname") == "parity.fsdp2.sft-packed"


def test_junit_stays_valid_whatever_a_log_holds(out: Path) -> None:
    (folder_of(out, CRASHED) / "legs/0/logs/rank-0.log").write_bytes(b"\x00\x08 ]]> & \xff\xfe")
    assert any("]]> &" in (error.text or "") for error in ET.parse(write_junit(out)).iter("error"))


# Markdown


def test_markdown_puts_failures_first(sample: Path) -> None:
    text = write_markdown(sample).read_text(encoding="utf-8")
    assert text.startswith("## ❌ 3 cells of 25 fail")
    order = [text.index(f"### {STATES[state].symbol}") for state in STATES]
    assert order == sorted(order)
    assert "| gradients | `model.layers.1.self_attn.o_proj.bias` | 0 |" in text
    assert all(f"`{cell}`" in text for cell in CELLS)


def test_markdown_is_cut_at_the_end_of_a_block_before_the_limit(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown, "LIMIT", 3000)
    text = write_markdown(sample).read_text(encoding="utf-8")
    assert len(text.encode()) < 3000
    assert f"`{DIFFERS}`" in text
    assert re.search(r"\*\*Cut short here:\*\* \d+ parts omitted\. `report\.html` has everything\.\n$", text)
