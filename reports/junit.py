"""JUnit XML of a run, for GitHub, GitLab and Jenkins: one test case per cell.

Serves claim 9: a cell that could not be judged is an error, never a pass. A cell that differs is a failure with its
findings in causal order. Unsupported cells and expected differences are skipped, with the reason. A partly observed
cell passes and says so. A run that is incomplete although no cell is an error, or that judged less than was demanded,
has one additional test case.
"""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from conformance.record.files import write_file
from conformance.record.states import NO_ANSWER, STATES
from reports.headline import incomplete_as_a_whole
from reports.load import Cell, read_report
from reports.words import WHOLE_RUN, details, explain


def write_junit(out: Path) -> Path:
    """Write ``out/junit.xml`` for the run in ``out``. Raises UsageError for a folder that cannot be trusted, and
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
    facts = {"verdict": report.verdict, "device": report.run.device, **report.run.environment}
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
        ET.SubElement(case, "failure", type="differs", message=message).text = _clean(details(cell))
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
    """The text with U+FFFD in the place of characters that XML does not allow."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", str(value))
