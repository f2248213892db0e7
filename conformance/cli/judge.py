"""Judges the records of an earlier run again (`parity judge`), and merges several runs (`parity merge`)."""

import argparse
import os
import shlex
import sys
from functools import partial

from conformance.cli.report import finish
from conformance.cli.run import output_folder
from conformance.core.errors import UsageError
from conformance.core.io import owned
from conformance.judge.rejudge import rejudge
from conformance.judge.side_by_side import write_side_by_side
from conformance.matrix.options import Kept
from conformance.results.history import read_baseline
from conformance.results.output_folders import merge, slim
from conformance.results.run_results import read_run
from conformance.results.verdict import STATES
from conformance.spec.objectives import objective_class


def judge_command(options: argparse.Namespace) -> int:
    """Judges the records of an earlier run again."""
    for kind in options.objective:
        objective_class(kind)
    with owned(options.out, owner="parity judge"):
        return _judge(options)


def _judge(options: argparse.Namespace) -> int:
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


def merge_command(options: argparse.Namespace) -> int:
    """Merges the output folders of several shards or jobs of a run."""
    if len({os.path.realpath(folder) for folder in options.outs}) < len(options.outs):
        raise UsageError("a folder is given twice; give the folder of each shard or job once")
    out = output_folder(options.out)
    baseline = partial(read_baseline, options.baseline) if options.baseline else None
    merge(options.outs, out, command=shlex.join(["parity", "merge", *options.arguments]), baseline=baseline)
    write_side_by_side(out, parts=options.outs)
    if Kept.from_options(options).keep != "all":
        slim(out)
    return finish(out, as_json=options.json)
