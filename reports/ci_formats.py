"""Writes a run for CI systems: a badge, CTRF JSON and JUnit XML.

``badge.svg`` and ``badge.json`` (https://shields.io/badges/endpoint-badge) have the verdict in words, so that they do
not depend on colour; only a run that conforms is green.

CTRF (https://ctrf.io, specification 1.0.0) and JUnit have one test per cell. A cell that could not be judged is
``failed`` in CTRF, with its state as ``rawStatus``, and an error in JUnit, never a pass. A cell that differs has its
findings in causal order. Unsupported cells and expected differences are skipped, with the reason. A run that is
incomplete although no cell is an error, or that misses a minimum requirement, has one additional test. In CTRF, a cell
that failed and passes when it runs again is flaky.
"""

import math
import re
import xml.etree.ElementTree as ET
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

from conformance.core.errors import visible
from conformance.core.io import write_file
from conformance.records.record_format import dumps
from conformance.results.verdict import NO_ANSWER, PASSES, STATES, RunVerdict, named
from reports.load import Cell, Report, read_report
from reports.summary import incomplete_as_a_whole
from reports.wording import WHOLE_RUN, details, explain, plural

LABEL = "backend parity"
COLOURS: dict[RunVerdict, tuple[str, str]] = {  # name at shields.io, and colour of badge.svg
    "conforms": ("brightgreen", "#2f7d0b"),  # darker than theirs, so that white text can be read
    "partly_observed": ("yellowgreen", "#6f7a10"),
    "differs": ("red", "#b3261e"),
    "incomplete": ("orange", "#a35200"),
}
HEIGHT, CHARACTER, PADDING = 20, 6.6, 12  # px; approximate width of a character of Verdana, 11 px; textLength fits it


def write_badge(out: Path) -> Path:
    """Writes ``out/badge.svg`` and ``out/badge.json`` for the run in ``out``. Raises UsageError for a folder that
    cannot be trusted, and Unwritable."""
    report = read_report(out)
    text, (name, colour) = _message(report), COLOURS[report.verdict]
    write_file(out / "badge.json", badge_json(text, name, is_error=report.verdict not in PASSES))
    file = out / "badge.svg"
    write_file(file, ET.tostring(badge_svg(text, colour), encoding="utf-8"))
    return file


def badge_json(text: str, colour: str, *, label: str = LABEL, is_error: bool = False) -> str:
    """Returns the JSON of an endpoint badge of shields.io."""
    return dumps({"schemaVersion": 1, "label": label, "message": text, "color": colour, "isError": is_error})


def _message(report: Report) -> str:
    counts = report.counts
    if report.verdict == "differs":
        return f"{plural(counts['differs'], 'cell')} fail{'s' if counts['differs'] == 1 else ''}"
    if report.verdict == "incomplete":
        return "incomplete"
    if report.verdict == "partly_observed":
        return f"{plural(counts['partly_observed'], 'cell')} partly observed"
    return f"{plural(counts['conforms'], 'cell')} pass{'es' if counts['conforms'] == 1 else ''}"


def badge_svg(text: str, colour: str, *, label: str = LABEL) -> ET.Element:
    left, right = (round(CHARACTER * len(part) + PADDING) for part in (label, text))
    size = {"width": str(left + right), "height": str(HEIGHT)}
    named = {"role": "img", "aria-label": f"{label}: {text}"}
    picture = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size, **named})
    ET.SubElement(picture, "title").text = f"{label}: {text}"
    for part, start, width, fill in ((label, 0, left, "#444"), (text, left, right, colour)):
        ET.SubElement(picture, "rect", x=str(start), width=str(width), height=str(HEIGHT), fill=fill)
        style = {"fill": "#fff", "font-family": "Verdana,DejaVu Sans,sans-serif", "font-size": "11"}
        place = {"x": str(start + PADDING // 2), "y": "14", "textLength": str(width - PADDING)}
        ET.SubElement(picture, "text", {**place, **style}).text = part
    return picture


SPECIFICATION = "1.0.0"
STATUSES = ("passed", "failed", "skipped", "pending", "other")


def write_ctrf(out: Path) -> Path:
    """Writes ``out/ctrf.json`` for the run in ``out``. Raises UsageError for a folder that cannot be trusted, and
    Unwritable."""
    report = read_report(out)
    tests = [_test(cell) for cell in report.cells]
    if why := incomplete_as_a_whole(report):
        title, text = why
        tests.append({"name": WHOLE_RUN, "status": "failed", "duration": 0, "message": title, "trace": text})
    values = {
        "reportFormat": "CTRF",
        "specVersion": SPECIFICATION,
        "generatedBy": "backend-parity",
        "timestamp": report.run.finished or report.run.started,
        "results": {
            "tool": {"name": "backend-parity", "version": report.version},
            "summary": _summary(report, tests),
            "tests": tests,
            "environment": {"extra": {"device": report.run.device, **report.run.environment}},
            "extra": {"verdict": report.verdict, "command": report.run.command},
        },
    }
    file = out / "ctrf.json"
    write_file(file, dumps(values))
    return file


def _summary(report: Report, tests: list[dict[str, Any]]) -> dict[str, int]:
    start = _milliseconds(_timestamp(report.run.started))
    counts = Counter(test["status"] for test in tests)
    return {
        "tests": len(tests),
        **{status: counts[status] for status in STATUSES},
        "flaky": sum(bool(test.get("flaky")) for test in tests),
        "start": start,
        "stop": start + _milliseconds(report.run.seconds),
    }


def _test(cell: Cell) -> dict[str, Any]:
    entry = cell.entry
    test: dict[str, Any] = {
        "name": cell.id,
        "status": _status(cell),
        "rawStatus": cell.state,
        "duration": _milliseconds(entry.seconds),
        "suite": ["parity", entry.backend, entry.scenario],
        "message": explain(cell),
        "parameters": {"model": entry.model, "layout": entry.layout, "variant": entry.variant},
    }
    if test["status"] == "failed":
        test["trace"] = details(cell)
    if entry.before:
        test |= {"retries": len(entry.before), "flaky": test["status"] == "passed"}
    return test


def _status(cell: Cell) -> str:
    if cell.state == "differs" or cell.state in NO_ANSWER:
        return "failed"
    return "passed" if cell.state in ("conforms", "partly_observed") else "skipped"


def _timestamp(text: str) -> float:
    """Parses a time; 0 for an invalid time in an edited summary."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds) if math.isfinite(1000 * seconds) else 0


def write_junit(out: Path) -> Path:
    """Writes ``out/junit.xml`` for the run in ``out``. Raises UsageError for a folder that cannot be trusted, and
    Unwritable."""
    report = read_report(out)
    cases = [_case(cell) for cell in report.cells]
    if why := incomplete_as_a_whole(report):
        cases.append(_whole_run(*why))
    totals = {
        "name": "backend-parity",
        "tests": str(len(cases)),
        "failures": str(sum(case.find("failure") is not None for case in cases)),
        "errors": str(sum(case.find("error") is not None for case in cases)),
        "skipped": str(sum(case.find("skipped") is not None for case in cases)),
        "time": _seconds(report.run.seconds),
    }
    root = ET.Element("testsuites", totals)
    suite = ET.SubElement(root, "testsuite", totals)
    suite.set("timestamp", report.run.started[:19])
    properties = ET.SubElement(suite, "properties")
    facts = {"verdict": named(report.verdict), "device": report.run.device, **report.run.environment}
    for key, value in facts.items():
        ET.SubElement(properties, "property", name=_clean(key), value=_clean(value))
    suite.extend(cases)
    ET.indent(root)
    file = out / "junit.xml"
    write_file(file, ET.tostring(root, encoding="utf-8", xml_declaration=True))
    return file


def _case(cell: Cell) -> ET.Element:
    group = f"parity.{cell.entry.backend}.{cell.entry.scenario}"
    case = ET.Element("testcase", classname=_clean(group), name=_clean(cell.id), time=_seconds(cell.entry.seconds))
    message = _clean(explain(cell))
    if cell.state == "differs":
        ET.SubElement(case, "failure", type=STATES[cell.state].name, message=message).text = _clean(details(cell))
    elif cell.state in NO_ANSWER:
        ET.SubElement(case, "error", type=cell.state, message=message).text = _clean(details(cell))
    elif cell.state == "partly_observed":
        ET.SubElement(case, "system-out").text = f"{STATES[cell.state].name}: {message}"
    elif cell.state != "conforms":
        ET.SubElement(case, "skipped", message=f"{STATES[cell.state].name}: {message}")
    return case


def _whole_run(title: str, text: str) -> ET.Element:
    case = ET.Element("testcase", classname="parity", name=WHOLE_RUN, time="0.000")
    ET.SubElement(case, "error", type="incomplete", message=_clean(title)).text = _clean(text)
    return case


def _seconds(value: float) -> str:
    return f"{value:.3f}"


def _clean(value: object) -> str:
    """Makes control characters visible; replaces others that XML does not allow by U+FFFD."""
    return re.sub("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", visible(str(value)))
