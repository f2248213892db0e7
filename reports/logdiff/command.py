"""Compares training logs, or records of ``parity.record``, with the first of them (``parity diff``, ``parity.diff``).

conformance/core/packages.py finds the command. What it does is imported when it is run: other commands need none of it.
"""

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.core.errors import UsageError

if TYPE_CHECKING:
    from parity.compare import Comparison as RecordComparison
    from reports.logdiff.comparison import Comparison, Side
    from reports.logdiff.output import Comparisons

AGREE, PART, NOT_COMPARABLE = 0, 1, 3
THRESHOLD = 0.05
RECORD = "record.jsonl"  # in a folder that parity.record wrote
HELP_OF_LOGS = (
    "two or more logs or records, each held against the first; of a log with several runs LOG#RUN, or the log alone for"
    " all its runs; panels of the same runs, one for each metric, together; files of one run as A+B;"
    " a run that was resumed after step 30 with a new counter as LOG@30;"
    " wandb:ENTITY/PROJECT/RUN where wandb is installed"
)
HELP_OF_SIDE = "logs of one side, differing by their seeds; give it twice or more, instead of LOG"


class Diff:
    help = "compare training logs, or records of parity.record: where they part, and what that looks like"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("logs", nargs="*", metavar="LOG", help=HELP_OF_LOGS)
        parser.add_argument("--side", action="append", nargs="+", metavar="LOG", help=HELP_OF_SIDE)
        parser.add_argument("--by", choices=("step", "tokens"), default="step", help="what curves are aligned by")
        parser.add_argument(
            "--threshold",
            type=_threshold,
            help=f"relative difference that is allowed of two runs, as 0.05 or 5%% (default: {THRESHOLD}); of more,"
            " their spread",
        )
        parser.add_argument(
            "--metric", action="append", default=[], metavar="NAME", help="only this one, such as loss; repeatable"
        )
        parser.add_argument("--out", type=Path, help="folder for diff.html and diff.md")
        parser.add_argument("--json", action="store_true", help="machine-readable output")

    def run(self, options: argparse.Namespace) -> int:
        if options.logs and options.side:
            raise UsageError("give the logs either with --side or without it, not both")
        sides: list[list[str]] = options.side or [[log] for log in options.logs]
        found = compare_sides(sides, by=options.by, threshold=options.threshold, metrics=options.metric)
        if options.out:
            _write(found, options.out)
        if options.json:
            from conformance.records.record_format import dumps

            print(dumps(found.to_json()))
        else:
            print(found.text())
            if options.out:
                print(f"\n{options.out / 'diff.html'}")
        if found.differs:
            return PART
        return AGREE if found.comparable else NOT_COMPARABLE


DIFF = Diff()


def _threshold(text: str) -> float:
    number, percent = text.removesuffix("%"), text.endswith("%")
    try:
        return float(number) / 100 if percent else float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number such as 0.05 or 5%, got {text!r}") from None


def compare_sides(
    sides: Sequence[Sequence[str]], *, by: str = "step", threshold: float | None = None, metrics: Sequence[str] = ()
) -> "Comparisons | RecordComparison":
    """Compare the logs of each side, or records, with those of the first. Raises UsageError for unusable input."""
    sides = _runs_of_panels(sides) or sides
    if len(sides) < 2:
        raise UsageError("diff needs two logs or more, such as: parity diff A.jsonl B.jsonl")
    if threshold is not None and not 0 < threshold < float("inf"):
        raise UsageError(f"--threshold {threshold:g} must be a positive number, such as 0.05")
    if threshold is not None and any(len(side) > 1 for side in sides):
        raise UsageError("--threshold is for one run a side; with several, their spread is the band: leave it out")
    if records := _records(sides):
        if len(records) < sum(map(len, sides)) or any(len(side) > 1 for side in sides):
            raise UsageError("records are compared with records, one a side: parity diff RECORD RECORD")
        if metrics or by != "step":
            raise UsageError("--metric and --by are for logs; a record is compared whole, step by step")
        from parity.compare import compare_records

        return compare_records([Path(name) for name in records], threshold=threshold)

    from reports.logdiff.comparison import compare
    from reports.logdiff.output import Comparisons

    allowed = THRESHOLD if threshold is None else threshold
    first, *others = _named(sides)
    pairs = tuple(compare(first, one, by=by, threshold=allowed, chosen=metrics) for one in others)
    return Comparisons(pairs=pairs, next_command=_next_command(sides, pairs, by=by, threshold=allowed))


def _runs_of_panels(sides: Sequence[Sequence[str]]) -> list[list[str]]:
    """One side for each run, if the logs are panels of the same several runs, or one log that holds several runs."""
    from reports.logdiff.readers import runs_in, runs_of_panel

    panels = [name for side in sides for name in side]
    if not panels or len(panels) > len(sides) or _records(sides):
        return []
    runs = runs_of_panel(panels[0]) if len(panels) > 1 else runs_in(panels[0])
    if len(runs) < 2 or any(sorted(runs_of_panel(panel)) != sorted(runs) for panel in panels[1:]):
        return []
    return [["+".join(f"{panel}#{run}" for panel in panels)] for run in runs]


def _next_command(sides: Sequence[Sequence[str]], pairs: "Sequence[Comparison]", *, by: str, threshold: float) -> str:
    """The command that tells more, with a word on what it does."""
    several = any(len(side) > 1 for side in sides)
    logs = [f"--side {shlex.join(side)}" if several else shlex.join(side) for side in sides]
    command = f"parity diff {' '.join(logs)}{f' --by {by}' * (by != 'step')}"
    differing = next((one for one in pairs if one.differs), None)
    if differing and differing.first:
        return f"{command} --metric {shlex.quote(differing.first.name)} --out diff   (draws its curves: diff/diff.html)"
    if not all(one.comparable for one in pairs):
        counted = all(run.tokens for one in pairs for side in one.sides for run in side.runs)
        if by == "step" and counted and not all(one.metrics and not one.too_few for one in pairs if one.obstacle):
            return f"{command} --by tokens   (the logs have too few steps in common, but both count tokens)"
        if any(one.too_few for one in pairs):
            return "parity diff --help   (log both runs at the same steps, such as every tenth)"
        return "parity diff --help   (the first line and the notes say what the logs lack)"
    if several:
        return f"{command} --out diff   (draws the curves and the band: diff/diff.html)"
    return f"{command} --threshold {threshold / 5:g}   (a narrower band)"


def _records(sides: Sequence[Sequence[str]]) -> list[str]:
    return [name for side in sides for name in side if (Path(name) / RECORD).exists()]


def _named(sides: Sequence[Sequence[str]]) -> "list[Side]":
    """The sides with their runs read; a run is named as it was given, without the folders that all have in common."""
    from reports.logdiff.comparison import Side
    from reports.logdiff.readers import read_log
    from reports.logdiff.run import run_of

    names = [name for side in sides for name in side]
    if len({os.path.realpath(name) for name in names}) < len(names):
        raise UsageError("the same log is given twice")
    parts = [Path(_label(name)).parts for name in names]
    shared = 0
    while all(len(part) > shared + 1 for part in parts) and len({part[shared] for part in parts}) == 1:
        shared += 1
    short = {name: str(Path(*part[shared:])) for name, part in zip(names, parts, strict=True)}
    read = [tuple(run_of(read_log(name), name=short[name]) for name in side) for side in sides]
    letters = [short[side[0]] if len(side) == 1 else f"side {chr(65 + place)}" for place, side in enumerate(sides)]
    return [Side(name=letter, runs=runs) for letter, runs in zip(letters, read, strict=True)]


def _label(name: str) -> str:
    """The run alone, if the name joins panels of one run."""
    runs = {part.rpartition("#")[2] for part in name.split("+") if "#" in part}
    return runs.pop() if "+" in name and len(runs) == 1 and not Path(name).exists() else name


def _write(found: "Comparisons | RecordComparison", out: Path) -> None:
    from conformance.core.io import make_folder, write_file
    from reports.logdiff.output import Comparisons, to_markdown

    try:
        from reports.logdiff.page import records_to_html, to_html
    except ModuleNotFoundError as error:
        raise UsageError(f"--out needs {error.name}; run: pip install 'backend-parity[report]'") from None
    if isinstance(found, Comparisons):
        html, markdown = to_html(found), to_markdown(found)
    else:
        html, markdown = records_to_html(found), found.text()
    make_folder(out)
    write_file(out / "diff.html", html)
    write_file(out / "diff.md", markdown)
