"""Prints the backends of a run side by side, or two runs, as Markdown (`parity compare`). Does not import torch."""

import argparse

from conformance.cli import EXIT
from conformance.core import packages
from conformance.core.errors import UsageError
from conformance.records.record_format import dumps
from conformance.results.output_folders import compare_runs
from conformance.results.run_results import SIDE_BY_SIDE, read_output_json


def run(options: argparse.Namespace) -> int:
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
