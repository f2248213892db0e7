"""Reporters: what turns an output folder into files for a reader, found by entry point as backends are.

conformance knows none of them. Each is a function that takes the output folder: those under ``parity.reporters`` write
a file and return its path, those under ``parity.comparisons`` return a text about the backends side by side.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

from conformance.record.files import Unwritable

REPORTERS, COMPARISONS = "parity.reporters", "parity.comparisons"


def write_reports(out: Path) -> list[str]:
    """Have all reporters write; returns a line for the user about each, the report to open last.

    Raises Unwritable, after the others, for one whose file cannot be written.
    """
    lines, failed = [], []
    for entry in sorted(entry_points(group=REPORTERS), key=lambda entry: (entry.name == "html", entry.name)):
        try:
            write: Callable[[Path], Path] = entry.load()
        except ImportError as error:
            missing = f"{error.name} is not installed" if isinstance(error, ModuleNotFoundError) else str(error)
            lines.append(f"no {entry.name} report: {missing}; run: pip install 'backend-parity[report]'")
        else:
            try:
                lines.append(f"{'report' if entry.name == 'html' else entry.name}: {write(out)}")
            except Unwritable as error:
                failed.append(str(error))
    if failed:
        raise Unwritable("; ".join(failed))
    return lines or ["no report: no reporter is installed"]


def compare_backends(out: Path) -> str:
    """The comparison of the run's backends as text, by the first installed comparison. Raises LookupError without
    one.
    """
    for entry in entry_points(group=COMPARISONS):
        compare: Callable[[Path], str] = entry.load()
        return compare(out)
    raise LookupError(f"nothing is announced under the entry-point group {COMPARISONS!r}")
