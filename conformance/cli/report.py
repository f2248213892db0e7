"""Writes the reports of a run from its output folder and prints its summary (`parity report`), without torch."""

import argparse
from pathlib import Path

from conformance.bisect.explain import describe
from conformance.cli import EXIT
from conformance.cli.terminal import print_summary
from conformance.core.packages import write_reports
from conformance.records.record_format import dumps
from conformance.results.requirements import summary_lines
from conformance.results.run_results import SUMMARY, cell_summary, read_output_json, summary_of
from conformance.results.trust import read_cells


def run(options: argparse.Namespace) -> int:
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
