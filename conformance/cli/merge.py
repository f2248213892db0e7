"""Merges the output folders of several shards or jobs of a run (`parity merge`)."""

import argparse
import shlex
from functools import partial

from conformance.cli.report import finish
from conformance.cli.run import output_folder
from conformance.judge.side_by_side import write_side_by_side
from conformance.matrix.options import Kept
from conformance.results.history import read_baseline
from conformance.results.output_folders import merge, slim


def run(options: argparse.Namespace) -> int:
    out = output_folder(options.out)
    baseline = partial(read_baseline, options.baseline) if options.baseline else None
    merge(options.outs, out, command=shlex.join(["parity", "merge", *options.arguments]), baseline=baseline)
    write_side_by_side(out, parts=options.outs)
    if Kept.from_options(options).keep != "all":
        slim(out)
    return finish(out, as_json=options.json)
