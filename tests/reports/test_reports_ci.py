"""What other programs read of a run, CTRF and badges, says what the report says, and is never greener."""

import json
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
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
    PARTLY,
    UNSUPPORTED,
    change,
    entries_of,
    folder_of,
    only_conforming,
    rewrite,
)

from conformance.results.verdict import RunVerdict
from reports.ci_formats import COLOURS, STATUSES, write_badge, write_ctrf
from reports.load import read_report
from reports.markdown import annotations
from reports.summary import causes

SVG = "{http://www.w3.org/2000/svg}"


def ctrf(out: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The results, and the tests by name."""
    values = json.loads(write_ctrf(out).read_text())
    assert (values["reportFormat"], values["specVersion"]) == ("CTRF", "1.0.0")
    results: dict[str, Any] = values["results"]
    return results, {test["name"]: test for test in results["tests"]}


def test_every_cell_is_a_test_with_a_status_of_the_specification(out: Path) -> None:
    results, tests = ctrf(out)
    assert list(tests) == [entry.cell for entry in entries_of(out)]
    statuses = {name: tests[name]["status"] for name in (CONFORMS, PARTLY, EXPECTED, UNSUPPORTED)}
    assert list(statuses.values()) == ["passed", "passed", "skipped", "skipped"]
    for cell, words in ((DIFFERS, "gradients: "), (CRASHED, "--- rank-0"), (NOT_RUN, "the time budget of the run")):
        assert tests[cell]["status"] == "failed"
        assert words in tests[cell]["trace"]
    summary = results["summary"]
    for status in STATUSES:
        assert summary[status] == sum(test["status"] == status for test in tests.values())
    assert summary["tests"] == len(tests)
    assert summary["stop"] - summary["start"] == 80_100
    assert {type(test["duration"]) for test in tests.values()} == {int}
    assert results["environment"]["extra"]["torch"] == "2.13.0+cpu"


def test_a_run_that_did_not_finish_has_a_test_that_failed(out: Path) -> None:
    only_conforming(out, finished=None)
    results, tests = ctrf(out)
    assert results["summary"]["failed"] == 1
    assert tests["the whole run"]["status"] == "failed"
    assert "did not finish" in tests["the whole run"]["trace"]


def test_a_cell_that_passes_when_it_is_run_again_is_flaky(out: Path) -> None:
    change(out, CONFORMS, before=("differs", "infrastructure"))
    change(out, DIFFERS, before=("differs",))
    results, tests = ctrf(out)
    assert (tests[CONFORMS]["retries"], tests[CONFORMS]["flaky"]) == (2, True)
    assert (tests[DIFFERS]["retries"], tests[DIFFERS]["flaky"]) == (1, False)
    assert results["summary"]["flaky"] == 1
    assert tests[CONFORMS]["message"].endswith("(run again; before: fail, then infrastructure failure)")


def test_reporters_share_what_was_read_until_a_file_changes(out: Path) -> None:
    report = read_report(out)
    write_ctrf(out)
    assert read_report(out) is report
    record = next(folder_of(out, CONFORMS).glob("legs/0/record/record.jsonl"))
    status = record.stat()
    record.write_bytes(record.read_bytes().replace(b'"step": 2', b'"step": 7'))  # of the same length
    os.utime(record, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert ctrf(out)[1][CONFORMS]["status"] == "failed"


@pytest.mark.parametrize(
    ("kept", "run", "verdict", "message"),
    [
        (CELLS, {}, "differs", "3 cells fail"),
        ((CONFORMS,), {}, "conforms", "1 cell passes"),
        ((CONFORMS, PARTLY), {}, "partly_observed", "1 cell partly observed"),
        ((CONFORMS,), {"finished": None}, "incomplete", "incomplete"),
    ],
)
def test_a_badge_says_the_verdict_and_only_a_pass_is_green(
    out: Path, kept: Sequence[str], run: dict[str, Any], verdict: RunVerdict, message: str
) -> None:
    rewrite(out, [entry for entry in entries_of(out) if entry.cell in kept], **run)
    picture = ET.parse(write_badge(out)).getroot()
    assert [text.text for text in picture.iter(f"{SVG}text")] == ["backend parity", message]
    assert picture.get("aria-label") == f"backend parity: {message}"
    name, colour = COLOURS[verdict]
    assert [rect.get("fill") for rect in picture.iter(f"{SVG}rect")][1] == colour
    endpoint = json.loads((out / "badge.json").read_text())
    is_error = verdict in ("differs", "incomplete")
    said = {"schemaVersion": 1, "label": "backend parity", "message": message, "color": name, "isError": is_error}
    assert endpoint == said
    assert ("green" in name) == (not is_error)


@pytest.mark.parametrize("colour", [number for _, number in COLOURS.values()])
def test_white_text_on_a_badge_can_be_read(colour: str) -> None:
    """WCAG 2.2 asks for a contrast of 4.5 (success criterion 1.4.3)."""
    channels = [int(part, 16) / 255 for part in re.findall("[0-9a-f]{2}", colour)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    assert 1.05 / (luminance + 0.05) >= 4.5


def test_annotations_hold_no_line_and_no_property_of_their_own(out: Path) -> None:
    change(out, CRASHED, verdict={"reason": "rank 1: 100% lost,\n::warning::x"})
    lines = annotations(read_report(out))
    assert len(lines) == len(causes(read_report(out)))
    assert f"::error title={CRASHED}::rank 1: 100%25 lost," in lines
