"""Reports runs from their output folders: one (`parity report`), its backends side by side or two runs
(`parity compare`), and summaries of many (`parity history`). Nothing here imports torch.
"""

import argparse
import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from conformance.bisect.explain import describe
from conformance.cli import EXIT
from conformance.cli.terminal import print_summary
from conformance.core import packages
from conformance.core.errors import UsageError
from conformance.core.packages import write_reports
from conformance.records.record_format import dumps
from conformance.results.baseline import by_backend, counts_text, lent_of
from conformance.results.changes import version_changes
from conformance.results.history import HISTORY, RUNS, Summary, open_history, summarise
from conformance.results.output_folders import compare_runs
from conformance.results.requirements import summary_lines
from conformance.results.run_results import SIDE_BY_SIDE, SUMMARY, cell_summary, read_output_json, summary_of
from conformance.results.trust import read_cells
from conformance.results.verdict import named


def report_command(options: argparse.Namespace) -> int:
    return finish(options.out, as_json=options.json)


def finish(out: Path, *, as_json: bool) -> int:
    """Writes the reports, prints the summary of the cells as far as they can be trusted, and returns the exit code."""
    lines = write_reports(out)
    run, cells = read_cells(out)
    summary = {**read_output_json(out / SUMMARY), **summary_of(run, [cell_summary(cell.entry) for cell in cells])}
    if as_json:
        print(dumps(summary))
    else:
        found = [f"bisect {cell.entry.cell}: {describe(cell.bisection).answer}" for cell in cells if cell.bisection]
        print_summary(summary["verdict"], [*summary_lines(summary), *found, *lines])
    if advice := run.how_to_end(out):
        print(f"parity: {advice}", file=sys.stderr)
    return EXIT[summary["verdict"]]


def compare_command(options: argparse.Namespace) -> int:
    """Prints the backends of a run side by side, or two runs, as Markdown."""
    runs = compare_runs(options.out, options.other) if options.other else None
    try:
        text = packages.compare(runs or options.out)
    except (LookupError, ImportError) as error:
        raise UsageError(f"no comparison: {error}; run: pip install 'backend-parity[report]'") from None
    if runs:
        print(dumps(runs.to_json()) if options.json else text)
        return EXIT["conforms" if runs.is_unchanged else "differs"]
    values = read_output_json(options.out / SIDE_BY_SIDE)
    print(dumps(values) if options.json else text)
    states = {group["state"] for group in values["groups"]}
    return EXIT["differs" if "differs" in states else "incomplete" if "infrastructure" in states else "conforms"]


def history_command(options: argparse.Namespace) -> int:
    for name in ("keep", "last"):
        if (number := getattr(options, name)) is not None and number < 1:
            raise UsageError(f"--{name} {number}; give a number of runs, 1 or more")
    added = [summarise(out) for out in options.add]  # before anything changes
    change = bool(added or (options.keep and os.path.lexists(options.folder / HISTORY)))
    with open_history(options.folder, change=change) as history:
        for summary in added:
            history.add(summary)
        if options.keep:
            history.prune(options.keep)
        shown = {selection: history.runs(selection, last=options.last or RUNS) for selection in history.selections()}
    if options.json:
        print(json.dumps({selection: [_values(run) for run in runs] for selection, runs in shown.items()}))
    else:
        print("\n".join(line for selection, runs in shown.items() for line in _lines(selection, runs)))
    return 0


def _lines(selection: str, runs: list[Summary]) -> list[str]:
    """Formats the runs of one selection as a table: a row per run, a column per backend, and the changed versions."""
    backends = list(dict.fromkeys(backend for run in runs for backend in by_backend(run.cells)))
    head = ["started (UTC)", "verdict", *backends, "changed versions"]
    rows = [head]
    for before, run in pairwise([None, *runs]):
        assert run
        counts = by_backend(run.cells)
        lent = lent_of(run.cells)
        columns = [counts_text(counts.get(backend, {})) + _by_others(lent.get(backend, 0)) for backend in backends]
        changed = version_changes(before.versions, run.versions) if before else ()
        when, verdict = f"{run.started:%Y-%m-%d %H:%M}", named(run.verdict)
        rows.append([when, verdict, *columns, "; ".join(map(str, changed))])
    widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
    table = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [f"{selection}:", *(f"  {line}" for line in table)]


def _by_others(count: int) -> str:
    return f", {count} by a second-class reference" if count else ""


def _values(run: Summary) -> dict[str, Any]:
    return {
        "started": run.started.isoformat(timespec="seconds"),
        "seconds": run.seconds,
        "verdict": run.verdict,
        "versions": run.versions,
        "backends": by_backend(run.cells),
        "second_class": lent_of(run.cells),
    }
