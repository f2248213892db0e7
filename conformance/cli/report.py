"""Reports a run from its output folder (`parity report`), and compares its backends or two runs (`parity compare`).

Nothing here imports torch.
"""

import argparse
from pathlib import Path

from conformance.bisect.explain import describe
from conformance.cli import EXIT
from conformance.cli.terminal import print_summary
from conformance.core import packages
from conformance.core.errors import UsageError
from conformance.core.packages import write_reports
from conformance.records.record_format import dumps
from conformance.results.output_folders import compare_runs
from conformance.results.requirements import summary_lines
from conformance.results.run_results import SIDE_BY_SIDE, SUMMARY, cell_summary, read_output_json, summary_of
from conformance.results.trust import read_cells


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
