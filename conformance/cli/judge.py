"""Judges the records of an earlier run again (`parity judge`)."""

import argparse
import sys

from conformance.cli.report import finish
from conformance.judge.rejudge import rejudge
from conformance.judge.side_by_side import write_side_by_side
from conformance.results.run_results import read_run
from conformance.results.verdict import STATES
from conformance.spec.objectives import objective_class


def run(options: argparse.Namespace) -> int:
    for kind in options.objective:
        objective_class(kind)
    if slim_cells := rejudge(options.out):
        print(
            f"parity: {slim_cells} cells keep their verdicts, because their tensors were not kept (parity run --keep "
            f"all keeps them)",
            file=sys.stderr,
        )
    write_side_by_side(options.out)
    for entry in read_run(options.out)[1]:
        if entry.verdict.state != "conforms":
            word, reason = STATES[entry.verdict.state].word, entry.verdict.reason.partition("\n")[0]
            print(f"{word:<8} {entry.cell}  {reason}", file=sys.stderr)
    return finish(options.out, as_json=options.json)
