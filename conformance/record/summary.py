"""Summary: what the terminal says about a run, from its ``summary.json`` alone, without the files of its cells."""

from collections.abc import Mapping
from typing import Any

from conformance.record.verdict import NOT_SEEN


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """The lines for the terminal, from the values of ``summary.json``: verdict, counts, unmet demands, and what has
    changed since earlier runs."""
    counts = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in summary["counts"].items() if count)
    since = summary["since"]["text"] if summary["since"] else ()
    lent = sum(bool(cell["second_class"]) for cell in summary["cells"])
    whose = f"second-class oracle: {lent} judged by transformers' own implementation; {NOT_SEEN}"
    return [f"{summary['verdict']}: {counts}", *summary["unmet"], *since, *([whose] if lent else [])]
