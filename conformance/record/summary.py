"""Summary: what can be said about a run from its ``summary.json`` alone, without the files of its cells."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.record.results import SUMMARY, read_output_json
from conformance.record.states import STATES, State
from conformance.validation import UsageError


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """The lines for the terminal, from the values of ``summary.json``: verdict, counts, unmet demands, gains."""
    counts = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in summary["counts"].items() if count)
    gained = summary["coverage"]["gained"]
    since = f"coverage gained since {summary['floor']['against']}: {len(gained)}"
    return [f"{summary['verdict']}: {counts}", *summary["unmet"], *([since] if gained else [])]


def read_states(path: Path) -> dict[str, State]:
    """The states of the cells of an earlier run by id. ``path``: its output folder or its ``summary.json``.

    Raises UsageError for a file that is not a summary.
    """
    file = path / SUMMARY if path.is_dir() else path
    try:
        states = {str(cell["id"]): cell["state"] for cell in read_output_json(file)["cells"]}
    except (KeyError, TypeError) as error:
        raise UsageError(f"{file} lacks {error}: it was not written by `parity run`, or edited") from None
    if unknown := sorted({str(state) for state in states.values() if str(state) not in STATES}):
        raise UsageError(f"{file} has states {', '.join(unknown)}; known: {', '.join(STATES)}. Update backend-parity")
    return states
