"""Reporters: functions that turn an output folder into files for readers, found by entry point as backends are.

conformance depends on none of them. A function in the entry-point group ``parity.reporters`` takes the output folder,
writes a file and returns its path. A function in ``parity.comparisons`` takes the output folder and returns a text that
compares the backends; it also takes the TwoRuns of two folders (conformance.record.two_runs), and compares these.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

from conformance.record.files import Unwritable
from conformance.record.two_runs import TwoRuns

REPORTERS, COMPARISONS = "parity.reporters", "parity.comparisons"


def write_reports(out: Path) -> list[str]:
    """Call all reporters; returns one line for the user about each, the HTML report last.

    If files cannot be written, raises Unwritable after all reporters were called.
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


def compare(what: Path | TwoRuns) -> str:
    """The text of the first installed comparison: of the backends in an output folder, or of two runs.

    Raises LookupError if none is installed.
    """
    for entry in entry_points(group=COMPARISONS):
        to_text: Callable[[Path | TwoRuns], str] = entry.load()
        return to_text(what)
    raise LookupError(f"nothing is announced under the entry-point group {COMPARISONS!r}")
