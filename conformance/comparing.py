"""parity compare: the backends of a run side by side, or two runs cell by cell, by an installed comparison."""

import argparse

from conformance import reporters
from conformance.record.format import dumps
from conformance.record.results import SIDE_BY_SIDE, read_output_json
from conformance.record.two_runs import compare_runs
from conformance.validation import UsageError


def run(options: argparse.Namespace) -> str:
    """Print the comparison; returns the word of its exit code (conformance.cli.EXIT). Raises UsageError."""
    runs = compare_runs(options.out, options.other) if options.other else None
    try:
        text = reporters.compare(runs or options.out)
    except (LookupError, ImportError) as error:
        raise UsageError(f"no comparison: {error}; run: pip install 'backend-parity[report]'") from None
    if runs:
        print(dumps(runs.to_json()) if options.json else text)
        return "differs" if runs.changed else "conforms"
    values = read_output_json(options.out / SIDE_BY_SIDE)
    print(dumps(values) if options.json else text)
    states = {group["state"] for group in values["groups"]}
    return "differs" if "differs" in states else "incomplete" if "infrastructure" in states else "conforms"
