"""The command ``parity diff``: training logs against each other; conformance/core/plugins.py finds it.

What it does is imported when it is run: the other commands need none of it.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.core.errors import UsageError

if TYPE_CHECKING:
    from reports.logdiff.comparison import Comparison, Side

AGREE, PART, NOT_COMPARABLE = 0, 1, 3
THRESHOLD = 0.05
RECORD = "record.jsonl"  # in a folder that parity.record wrote
HELP_OF_LOGS = (
    "two or more logs or records, each held against the first; of a wandb panel with several runs, panel.csv#RUN"
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
            type=float,
            help=f"relative difference that is allowed of two runs (default: {THRESHOLD}); of more, their spread",
        )
        parser.add_argument(
            "--metric", action="append", default=[], metavar="NAME", help="only this one, such as loss; repeatable"
        )
        parser.add_argument("--out", type=Path, help="folder for diff.html and diff.md")
        parser.add_argument("--json", action="store_true", help="machine-readable output")

    def run(self, options: argparse.Namespace) -> int:
        sides = _sides(options)
        records = [name for side in sides for name in side if (Path(name) / RECORD).exists()]
        if records:
            return _compare_records(options, sides, records)

        from reports.logdiff.comparison import compare

        threshold = THRESHOLD if options.threshold is None else options.threshold
        first, *others = _named(sides)
        comparisons = [
            compare(first, other, by=options.by, threshold=threshold, chosen=options.metric) for other in others
        ]
        _tell(comparisons, options)
        if any(one.differs for one in comparisons):
            return PART
        return AGREE if all(one.comparable for one in comparisons) else NOT_COMPARABLE


DIFF = Diff()


def _sides(options: argparse.Namespace) -> list[list[str]]:
    """The logs of each side. Raises UsageError for what does not make two sides."""
    if options.logs and options.side:
        raise UsageError("give the logs either with --side or without it, not both")
    sides: list[list[str]] = options.side or [[log] for log in options.logs]
    if len(sides) < 2:
        raise UsageError("diff needs two logs or more, such as: parity diff A.jsonl B.jsonl")
    if options.threshold is not None:
        if not 0 < options.threshold < float("inf"):
            raise UsageError(f"--threshold {options.threshold:g} is no positive number, such as 0.05")
        if any(len(side) > 1 for side in sides):
            raise UsageError("--threshold is for one run a side; with several, their spread is the band: leave it out")
    return sides


def _named(sides: Sequence[Sequence[str]]) -> "list[Side]":
    """The sides with their runs read; a run is named as it was given, without the folders that all have in common."""
    from reports.logdiff.comparison import Side
    from reports.logdiff.readers import read_log
    from reports.logdiff.run import run_of

    names = [name for side in sides for name in side]
    if len({Path(name).resolve() for name in names}) < len(names):
        raise UsageError("the same log is given twice")
    parts = [Path(name).parts for name in names]
    shared = 0
    while all(len(part) > shared + 1 for part in parts) and len({part[shared] for part in parts}) == 1:
        shared += 1
    short = {name: str(Path(*part[shared:])) for name, part in zip(names, parts, strict=True)}
    read = [tuple(run_of(read_log(name), name=short[name]) for name in side) for side in sides]
    letters = [short[side[0]] if len(side) == 1 else f"side {chr(65 + place)}" for place, side in enumerate(sides)]
    return [Side(name=letter, runs=runs) for letter, runs in zip(letters, read, strict=True)]


def _compare_records(options: argparse.Namespace, sides: list[list[str]], records: list[str]) -> int:
    """Folders of parity.record are compared parameter by parameter, by the package that wrote them."""
    if len(records) < sum(map(len, sides)) or options.side:
        raise UsageError("records are compared with records, one a side: parity diff RECORD RECORD")
    if options.metric or options.out or options.by != "step":
        raise UsageError("--metric, --out and --by are for logs; a record is compared whole, step by step")
    from conformance.records.record_format import dumps
    from parity.compare import compare_records

    found = compare_records([Path(name) for name in records], threshold=options.threshold)
    print(dumps(found.to_json()) if options.json else found.text())
    if found.differs:
        return PART
    return AGREE if found.comparable else NOT_COMPARABLE


def _tell(comparisons: "Sequence[Comparison]", options: argparse.Namespace) -> None:
    from conformance.records.record_format import dumps
    from reports.logdiff.output import to_text

    if options.out:
        _write(comparisons, options.out)
    if options.json:
        from reports.logdiff.output import to_json

        print(dumps(to_json(comparisons)))
    else:
        print(to_text(comparisons))
        if options.out:
            print(f"\n{options.out / 'diff.html'}")


def _write(comparisons: "Sequence[Comparison]", out: Path) -> None:
    from conformance.core.io import write_file
    from reports.logdiff.output import to_markdown

    try:
        from reports.logdiff.page import to_html
    except ModuleNotFoundError as error:
        raise UsageError(f"--out needs {error.name}; run: pip install 'backend-parity[report]'") from None
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out} cannot be a folder: {error.strerror}") from None
    write_file(out / "diff.html", to_html(comparisons))
    write_file(out / "diff.md", to_markdown(comparisons))
