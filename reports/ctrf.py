"""CTRF JSON of a run (https://ctrf.io, specification 1.0.0), for dashboards and bots that read it: one test per cell.

Serves claim 9: CTRF has no word for a test that could not be judged, so such a cell is ``failed``, and ``rawStatus`` is
its own state. The rest is as in JUnit: unsupported cells and expected differences are skipped, and a run that is
incomplete as a whole has one additional test. A cell that failed and passes when it is run again is flaky.
"""

import math
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

from conformance.record.files import write_file
from conformance.record.format import dumps
from conformance.record.states import NO_ANSWER
from reports.headline import incomplete_as_a_whole
from reports.load import Cell, Report, read_report
from reports.words import WHOLE_RUN, details, explain

SPECIFICATION = "1.0.0"
STATUSES = ("passed", "failed", "skipped", "pending", "other")


def write_ctrf(out: Path) -> Path:
    """Write ``out/ctrf.json`` for the run in ``out``. Raises UsageError for a folder that cannot be trusted, and
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


def _timestamp(told: str) -> float:
    """0 for what a summary that somebody has changed may hold instead of a time."""
    try:
        return datetime.fromisoformat(told).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds) if math.isfinite(1000 * seconds) else 0
