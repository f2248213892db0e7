"""Runs the same training steps on several training backends and judges each of them by an independent reference.

Exit codes: 0 if all cells agree with the oracle (they conform, are partly observed, or differ as expected), 1 if a cell
differs, 2 for wrong usage, 3 if the run is incomplete (an infrastructure failure, no cell could be judged, fewer cells
were judged than demanded, or the output folder cannot be written to). A run that a signal stops ends with 128 + its
number: 130 after Ctrl-C, 143 after SIGTERM.
"""

import argparse
import dataclasses
import io
import json
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import conformance
from conformance.backends.faults import catalogue
from conformance.backends.protocol import registered_backends
from conformance.cli import doctor
from conformance.cli.history import HISTORY_COMMAND
from conformance.cli.parser import Parser, PrintCompletion
from conformance.cli.run import EXIT, finish, output_folder, run_command, stop_code
from conformance.core import plugins
from conformance.core.errors import UsageError
from conformance.core.io import Unwritable
from conformance.core.plugins import announced_commands
from conformance.judge.cross_backend import write_side_by_side
from conformance.judge.rejudge import rejudge
from conformance.matrix.options import (
    NO_BISECT,
    Again,
    Demands,
    Kept,
    Options,
    Output,
    Portion,
    Ranks,
    Selection,
)
from conformance.matrix.plan import make_plan
from conformance.matrix.profile import load_profile, profile_names, select_cells
from conformance.records.record_format import dumps
from conformance.results.history import read_baseline
from conformance.results.output_folders import compare_runs, merge, slim
from conformance.results.run_results import SIDE_BY_SIDE, read_output_json, read_run
from conformance.results.verdict import STATES, State
from conformance.runner.preflight import check_device, check_shared
from conformance.runner.session import Session
from conformance.runner.session_config import SessionConfig

NOT_HERE: dict[State, str] = {"not_run": "not here"}  # of a cell that another machine could run


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A UsageError is printed as one message to standard error."""
    options = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names may have bytes that are not UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code: int = options.command(options, list(sys.argv[2:] if argv is None else argv[1:]))
    except UsageError as error:
        print(f"parity: {error}", file=sys.stderr)
        return EXIT["usage"]
    except Unwritable as error:
        print(f"parity: {error}", file=sys.stderr)
        return EXIT["incomplete"]
    except KeyboardInterrupt as stopped:
        print("parity: interrupted", file=sys.stderr)
        return stop_code(stopped)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT["conforms"]
    except Exception:  # a defect of the suite or of a backend, not a difference: it must not exit with 1
        traceback.print_exc()
        return EXIT["incomplete"]
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="parity", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--version", action="version", version=f"backend-parity {conformance.__version__}")
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=("bash", "zsh"),
        help='print the script that makes a shell complete parity: eval "$(parity --print-completion bash)"',
    )
    own = ("list", "plan", "run", "merge", "judge", "report", "compare", "bisect", "doctor")
    announced = {name: plan for name, plan in announced_commands().items() if name not in own}
    announced = {"history": HISTORY_COMMAND, **announced}
    commands = parser.add_subparsers(required=True, metavar="|".join((*own, *announced)))

    listing = commands.add_parser("list", help="show backends, profiles, faults and the cells of a profile")
    _add_options(listing, Selection, Portion)
    _add_options(listing, Ranks, without="budget")
    listing.add_argument(
        "--coverage", action="store_true", help="measure what the data covers: positions, vocabulary, shards, masks"
    )
    listing.add_argument("--json", action="store_true", help="machine-readable output")
    listing.set_defaults(command=_list)

    planning = commands.add_parser("plan", help="estimate the memory, disk and time of the selected cells")
    _add_options(planning, Selection, Portion)
    _add_options(planning, Ranks, without="budget")
    planning.add_argument("--out", type=Path, default=Path("parity-out"), help="where a run would write")
    planning.set_defaults(command=_plan)

    run = commands.add_parser("run", help="run cells, judge them, write the report")
    _add_options(run, Selection, Demands, Portion, Again, Kept)
    run.add_argument("--fail-fast", action="store_true", help="end after the first cell that differs or fails")
    run.add_argument("--no-bisect", action="store_true", help=NO_BISECT)
    loudness = run.add_mutually_exclusive_group()
    loudness.set_defaults(loudness="normal")
    loudness.add_argument(
        "-q",
        "--quiet",
        dest="loudness",
        action="store_const",
        const="quiet",
        help="a line only for cells that need attention",
    )
    loudness.add_argument(
        "-v",
        "--verbose",
        dest="loudness",
        action="store_const",
        const="verbose",
        help="also say which worlds of ranks are retired as planned",
    )
    run.add_argument("--json", action="store_true", help="machine-readable output")
    _add_options(run, Ranks, Output)
    run.set_defaults(command=run_command)

    merging = commands.add_parser("merge", help="put the folders of several shards, or jobs, of a run together")
    merging.add_argument("outs", type=Path, nargs="+", metavar="OUT")
    _add_options(merging, Output, Kept)
    merging.add_argument("--baseline", **dict(Demands.options())["baseline"])
    merging.add_argument("--json", action="store_true", help="machine-readable output")
    merging.set_defaults(command=_merge)

    judge = commands.add_parser("judge", help="judge the records of an earlier run again")
    judge.add_argument("out", type=Path)
    judge.add_argument("--json", action="store_true")
    judge.set_defaults(command=_judge)

    report = commands.add_parser("report", help="write report.html, report.md and junit.xml of an earlier run")
    report.add_argument("out", type=Path)
    report.add_argument("--json", action="store_true")
    report.set_defaults(command=_report)

    compare = commands.add_parser("compare", help="print the backends of a run side by side, or two runs, as Markdown")
    compare.add_argument("out", type=Path)
    compare.add_argument(
        "other", type=Path, nargs="?", help="another run: cell by cell, states and worst ratios of both"
    )
    compare.add_argument("--json", action="store_true")
    compare.set_defaults(command=_compare)

    first = commands.add_parser("bisect", help="name the first wrong module of a cell, forward and backward")
    first.add_argument("cell", metavar="CELL", help="the id of a cell, as parity list and the report show it")
    _add_options(first, Selection, without="cells")
    _add_options(first, Ranks)
    first.add_argument("--json", action="store_true", help="machine-readable output")
    first.set_defaults(command=_bisect)

    check = commands.add_parser("doctor", help="check this machine and what is installed")
    check.add_argument("--json", action="store_true")
    check.set_defaults(command=_doctor)

    for name, announcement in announced.items():
        other = commands.add_parser(name, help=announcement.help)
        announcement.add_arguments(other)
        other.set_defaults(command=lambda options, _, announcement=announcement: announcement.run(options))
    return parser


def _add_options(parser: argparse.ArgumentParser, *kinds: type[Options], without: str = "") -> None:
    for name, about in (option for kind in kinds for option in kind.options()):
        if name != without:
            parser.add_argument(f"--{name}", **about)


def _list(options: argparse.Namespace, _: list[str]) -> int:
    selection = Selection.from_options(options)
    ranks = _where(options)
    cells = make_plan(selection, Demands(), Portion.from_options(options), ranks=ranks).cells
    with tempfile.TemporaryDirectory() as folder:
        config = SessionConfig(out=Path(folder), device=ranks.device, ranks_per_gpu=ranks.ranks_per_gpu)
        with Session(config) as session:
            refused = [session.refusal(cell) for cell in cells]
    rows = [
        {
            "id": str(cell),
            "world_size": cell.world_size,
            "refused": f"{NOT_HERE.get(why.state, STATES[why.state].name)}: {why.reason}" if why else "",
        }
        for cell, why in zip(cells, refused, strict=True)
    ]
    coverage = None
    if options.coverage:
        from conformance.data.coverage import measure_coverage  # loads transformers

        coverage = measure_coverage(cell for cell, why in zip(cells, refused, strict=True) if not why)
    if options.json:
        backends = {name: entry.target for name, entry in registered_backends().items()}
        known = {"backends": backends, "profiles": profile_names(), "faults": list(catalogue()), "cells": rows}
        print(json.dumps(known | ({"coverage": dataclasses.asdict(coverage)} if coverage else {})))
        return EXIT["conforms"]
    print(f"profiles: {', '.join(profile_names())}; faults: {', '.join(catalogue())}")
    print(f"{len(rows)} cells of {selection.profile} ({load_profile(selection.profile).description}):")
    for row in rows:
        print(f"  {row['id']}  [{row['world_size']} ranks] {row['refused']}")
    if coverage:
        print(f"\n{coverage}")
    return EXIT["conforms"]


def _where(options: argparse.Namespace) -> Ranks:
    """Of a command that runs no cells, and so has no budget."""
    return Ranks(device=options.device or "cpu", ranks_per_gpu=options.ranks_per_gpu or 1)


def _plan(options: argparse.Namespace, _: list[str]) -> int:
    from conformance.cli import plan  # loads what a session needs

    ranks = _where(options)
    check_shared(ranks)
    portion = Portion.from_options(options)
    cells = make_plan(Selection.from_options(options), Demands(), portion, ranks=ranks).cells
    lines, fits = plan.run(cells, options.out, ranks=ranks)
    print("\n".join(lines))
    return EXIT["conforms" if fits else "usage"]


def _merge(options: argparse.Namespace, arguments: list[str]) -> int:
    out = output_folder(options.out)
    baseline = partial(read_baseline, options.baseline) if options.baseline else None
    merge(options.outs, out, command=shlex.join(["parity", "merge", *arguments]), baseline=baseline)
    write_side_by_side(out, parts=options.outs)
    if Kept.from_options(options).keep != "all":
        slim(out)
    return finish(out, as_json=options.json)


def _judge(options: argparse.Namespace, _: list[str]) -> int:
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


def _report(options: argparse.Namespace, _: list[str]) -> int:
    return finish(options.out, as_json=options.json)


def _compare(options: argparse.Namespace, _: list[str]) -> int:
    runs = compare_runs(options.out, options.other) if options.other else None
    try:
        text = plugins.compare(runs or options.out)
    except (LookupError, ImportError) as error:
        raise UsageError(f"no comparison: {error}; run: pip install 'backend-parity[report]'") from None
    if runs:
        print(dumps(runs.to_json()) if options.json else text)
        return EXIT["conforms" if runs.are_alike else "differs"]
    values = read_output_json(options.out / SIDE_BY_SIDE)
    print(dumps(values) if options.json else text)
    states = {group["state"] for group in values["groups"]}
    return EXIT["differs" if "differs" in states else "incomplete" if "infrastructure" in states else "conforms"]


def _bisect(options: argparse.Namespace, _: list[str]) -> int:
    from conformance.cli.bisect import run

    options.cells = [options.cell]
    selection, ranks = Selection.from_options(options), Ranks.from_options(options)
    check_device(ranks)
    cells = select_cells(selection)
    if len(cells) != 1:
        raise UsageError(f"{options.cell} is {len(cells)} cells; give the id of one, as parity list shows it")
    state = run(cells[0], ranks=ranks, as_json=options.json)
    return EXIT[{"infrastructure": "incomplete", "differs": "differs"}.get(state, "conforms")]


def _doctor(options: argparse.Namespace, _: list[str]) -> int:
    checks = doctor.examine()
    if options.json:
        print(json.dumps([vars(check) for check in checks]))
    else:
        for check in checks:
            print(f"{check.state:<8} {check.name}: {check.message}")
    return EXIT["incomplete"] if any(check.state == "problem" for check in checks) else EXIT["conforms"]


if __name__ == "__main__":
    sys.exit(main())
