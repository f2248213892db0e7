"""Badge of a run: ``badge.svg``, and ``badge.json``, which https://shields.io/badges/endpoint-badge draws.

Both say the verdict in words, so that colour alone decides nothing; only a run that conforms is green (claim 9).
"""

import xml.etree.ElementTree as ET
from pathlib import Path

from conformance.record.files import write_file
from conformance.record.format import dumps
from conformance.record.states import PASSES, RunVerdict
from reports.load import Report, read_report
from reports.words import plural

LABEL = "backend parity"
COLOURS: dict[RunVerdict, tuple[str, str]] = {  # the name at shields.io, and the same as a number
    "conforms": ("brightgreen", "#2f7d0b"),  # darker than theirs, so that white text can be read
    "partly_observed": ("yellowgreen", "#6f7a10"),
    "differs": ("red", "#b3261e"),
    "incomplete": ("orange", "#a35200"),
}
HEIGHT, CHARACTER, PADDING = 20, 6.6, 12  # px; Verdana of 11 px is about this wide, and textLength makes it fit


def write_badge(out: Path) -> Path:
    """Write ``out/badge.svg`` and ``out/badge.json`` for the run in ``out``. Raises UsageError for a folder that cannot
    be trusted, and Unwritable."""
    report = read_report(out)
    text, (name, colour) = _message(report), COLOURS[report.verdict]
    endpoint = {"schemaVersion": 1, "label": LABEL, "message": text, "color": name}
    write_file(out / "badge.json", dumps(endpoint | {"isError": report.verdict not in PASSES}))
    file = out / "badge.svg"
    write_file(file, ET.tostring(_picture(text, colour), encoding="utf-8"))
    return file


def _message(report: Report) -> str:
    counts = report.counts
    if report.verdict == "differs":
        return f"{plural(counts['differs'], 'cell')} differ{'s' if counts['differs'] == 1 else ''}"
    if report.verdict == "incomplete":
        return "incomplete"
    if report.verdict == "partly_observed":
        return f"{plural(counts['partly_observed'], 'cell')} partly observed"
    return f"{plural(counts['conforms'], 'cell')} conform{'s' if counts['conforms'] == 1 else ''}"


def _picture(text: str, colour: str) -> ET.Element:
    left, right = (round(CHARACTER * len(part) + PADDING) for part in (LABEL, text))
    size = {"width": str(left + right), "height": str(HEIGHT)}
    said = {"role": "img", "aria-label": f"{LABEL}: {text}"}
    picture = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size, **said})
    ET.SubElement(picture, "title").text = f"{LABEL}: {text}"
    for part, start, width, fill in ((LABEL, 0, left, "#444"), (text, left, right, colour)):
        ET.SubElement(picture, "rect", x=str(start), width=str(width), height=str(HEIGHT), fill=fill)
        style = {"fill": "#fff", "font-family": "Verdana,DejaVu Sans,sans-serif", "font-size": "11"}
        place = {"x": str(start + PADDING // 2), "y": "14", "textLength": str(width - PADDING)}
        ET.SubElement(picture, "text", {**place, **style}).text = part
    return picture
