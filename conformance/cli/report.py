"""Reports runs from their output folders: one (`parity report`), its backends side by side or two runs
(`parity compare`), and summaries of many (`parity history`). Nothing here imports torch.

``Terminal`` prints a line for each cell while `parity run` runs. Lines go to standard error. On a terminal, a bar below
them shows how many cells are done, the running cell, the activity of its ranks (their heartbeat), and an estimate of
the remaining time. In a pipe, or with ``CI`` set, there are only the lines. Colours follow NO_COLOR and FORCE_COLOR.
"""

import argparse
import contextlib
import json
import logging
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from conformance.bisect.explain import answers
from conformance.cli import EXIT
from conformance.core import packages
from conformance.core.errors import UsageError, visible
from conformance.core.io import visible_output
from conformance.core.packages import write_reports
from conformance.records.record_format import dumps
from conformance.results.baseline import by_backend, counts_text, lent_of
from conformance.results.changes import version_changes
from conformance.results.history import HISTORY, RUNS, Summary, open_history, summarise
from conformance.results.output_folders import compare_runs
from conformance.results.requirements import summary_lines
from conformance.results.run_results import SIDE_BY_SIDE, SUMMARY, cell_summary, read_output_json, summary_of
from conformance.results.trust import read_cells
from conformance.results.verdict import NO_FAULT, STATES, State, Verdict, margin, named

if TYPE_CHECKING:  # these import torch
    from conformance.matrix.cell import Cell
    from conformance.runner.placement import Activity

Loudness = Literal["quiet", "normal", "verbose"]

STYLES: dict[str, str] = {
    **{"conforms": "green", "partly_observed": "green", "expected_difference": "yellow", "unsupported": "dim"},
    **{"differs": "bold red", "infrastructure": "bold magenta", "not_run": "magenta", "incomplete": "bold magenta"},
}
REFRESHES = 4  # per second
_LEVELS = {"quiet": logging.ERROR, "normal": logging.INFO, "verbose": logging.DEBUG}


class Terminal:
    """Shows the progress of a run of ``total`` cells. Use it in a ``with`` statement. Another thread calls ``now``."""

    def __init__(self, *, total: int, now: "Callable[[], Activity | None]", loudness: Loudness = "normal") -> None:
        # Given, because rich replaces sys.stderr while the bar is shown, and would find the filter of visible_output.
        terminal = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
        self._console = Console(file=terminal, highlight=False, markup=False, emoji=False)
        self._others = contextlib.ExitStack()
        self._total, self._now, self._loudness = total, now, loudness
        self._took: list[tuple[Cell, float]] = []  # seconds of the cells that ran
        self._counts: dict[State, int] = defaultdict(int)
        self._handler = _Handler(self._log)
        is_watched = sys.stderr.isatty() and not self._console.is_dumb_terminal and "CI" not in os.environ
        self._live = (
            Live(
                console=self._console,
                get_renderable=self.picture,
                refresh_per_second=REFRESHES,
                transient=True,
                redirect_stdout=False,
            )
            if is_watched and loudness != "quiet"
            else None
        )

    def __enter__(self) -> Self:
        logger = logging.getLogger("conformance")
        logger.addHandler(self._handler)
        logger.setLevel(_LEVELS[self._loudness])
        if self._live:
            self._live.start()
            self._others.enter_context(visible_output())
        return self

    def __exit__(self, *_: object) -> None:
        self._others.close()
        if self._live:
            self._live.stop()
        logger = logging.getLogger("conformance")
        logger.removeHandler(self._handler)
        logger.setLevel(logging.NOTSET)

    @property
    def done(self) -> int:
        """Returns the number of cells that are done."""
        return sum(self._counts.values())

    def judged(self, cell: "Cell", verdict: Verdict, seconds: float) -> None:
        """Prints the line of a cell; with ``quiet``, only if the cell needs attention."""
        self._counts[verdict.state] += 1
        if verdict.state != "unsupported":
            self._took.append((cell, seconds))
        if self._loudness == "quiet" and verdict.state in (*NO_FAULT, "unsupported"):
            return
        closest = f"margin {margin(verdict.closest.ratio)} digits" if verdict.closest else ""
        text = closest if verdict.state == "conforms" else verdict.reason.partition("\n")[0]
        word = f"{STATES[verdict.state].word:<8}"
        self._print(
            Text.assemble(
                f"[{self.done}/{self._total}] {seconds:5.1f} s  ",
                (word, STYLES[verdict.state]),
                f" {cell}  {visible(text)}",
            )
        )

    def say(self, text: str) -> None:
        """Prints a line that is not the verdict of a cell."""
        self._print(Text(visible(text)))

    def _log(self, text: str) -> None:
        self._print(Text(visible(text), style="dim"))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)

    def picture(self) -> Group:
        """Returns the bar and the running cell."""
        now = self._now()
        found = [f"{n} {STATES[state].name}" for state, n in self._counts.items() if state not in NO_FAULT]
        left = f"about {duration(seconds)} left" if (seconds := self._seconds_left(now)) else ""
        bar = Table.grid(padding=(0, 1))
        text = " · ".join(part for part in (f"{self.done}/{self._total} cells", *found, left) if part)
        bar.add_row(ProgressBar(total=max(1, self._total), completed=self.done, width=24), Text(text))
        if now is None:
            return Group(bar)
        phase = f"  {now.phase}, {duration(time.monotonic() - now.since)}"
        line = Text.assemble((str(now.cell), "bold"), (phase, "cyan"), no_wrap=True, overflow="ellipsis")
        return Group(bar, line)

    def _seconds_left(self, now: "Activity | None") -> float | None:
        if now is None:
            return None
        left = seconds_left(self._took, (now.cell, *now.waiting))
        return left and max(1.0, left - (time.monotonic() - now.since))


class _Handler(logging.Handler):
    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        self._write(record.getMessage())


def seconds_left(took: "Iterable[tuple[Cell, float]]", waiting: "Iterable[Cell]") -> float | None:
    """Estimates the seconds of the ``waiting`` cells by the average of similar cells (same backend, same number of
    ranks), or else of all cells. None before the first cell is done."""
    similar: dict[tuple[str, int] | None, list[float]] = defaultdict(list)
    for cell, seconds in took:
        similar[cell.backend, cell.world_size].append(seconds)
        similar[None].append(seconds)
    if not similar:
        return None
    found = (similar.get((cell.backend, cell.world_size), similar[None]) for cell in waiting)
    return sum(sum(seconds) / len(seconds) for seconds in found)


def duration(seconds: float) -> str:
    """Formats a duration: ``40 s``, ``12 min``, ``2.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def print_summary(verdict: str, lines: Sequence[str]) -> None:
    """Prints the lines of a run to standard output, the first line in the colour of its verdict."""
    console = Console(highlight=False, markup=False, emoji=False)
    for number, line in enumerate(lines):
        console.print(Text(visible(line), style="" if number else STYLES[verdict]), soft_wrap=True)


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
        print_summary(summary["verdict"], [*summary_lines(summary), *answers(cells), *lines])
    if advice := run.how_to_end(out):
        print(f"parity: {advice}", file=sys.stderr)
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


def history_command(options: argparse.Namespace) -> int:
    for name in ("keep", "last"):
        if (number := getattr(options, name)) is not None and number < 1:
            raise UsageError(f"--{name} {number}; give a number of runs, 1 or more")
    added = [summarise(out) for out in options.add]  # before anything changes
    change = bool(added or (options.keep and os.path.lexists(options.folder / HISTORY)))
    with open_history(options.folder, change=change) as history:
        for summary in added:
            history.add(summary)
        if options.keep:
            history.prune(options.keep)
        shown = {selection: history.runs(selection, last=options.last or RUNS) for selection in history.selections()}
    if options.json:
        print(json.dumps({selection: [_values(run) for run in runs] for selection, runs in shown.items()}))
    else:
        print("\n".join(line for selection, runs in shown.items() for line in _lines(selection, runs)))
    return 0


def _lines(selection: str, runs: list[Summary]) -> list[str]:
    """Formats the runs of one selection as a table: a row per run, a column per backend, and the changed versions."""
    backends = list(dict.fromkeys(backend for run in runs for backend in by_backend(run.cells)))
    head = ["started (UTC)", "verdict", *backends, "changed versions"]
    rows = [head]
    for before, run in pairwise([None, *runs]):
        assert run
        counts = by_backend(run.cells)
        lent = lent_of(run.cells)
        columns = [counts_text(counts.get(backend, {})) + _by_others(lent.get(backend, 0)) for backend in backends]
        changed = version_changes(before.versions, run.versions) if before else ()
        when, verdict = f"{run.started:%Y-%m-%d %H:%M}", named(run.verdict)
        rows.append([when, verdict, *columns, "; ".join(map(str, changed))])
    widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
    table = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [f"{selection}:", *(f"  {line}" for line in table)]


def _by_others(count: int) -> str:
    return f", {count} by a second-class reference" if count else ""


def _values(run: Summary) -> dict[str, Any]:
    return {
        "started": run.started.isoformat(timespec="seconds"),
        "seconds": run.seconds,
        "verdict": run.verdict,
        "versions": run.versions,
        "backends": by_backend(run.cells),
        "second_class": lent_of(run.cells),
    }
