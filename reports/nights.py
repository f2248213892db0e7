"""Publishes a history of runs as a static site: `parity publish HISTORY [OUT ...] --to DIR`.

``index.html`` has a row for each run, and the cells by night. ``nights`` has a page for each run, named after its time
and commit, and the full report of the runs whose output folders were given; ``cells`` has a page for each cell with its
errors by stage and night. Addresses do not change, so earlier pages and reports in DIR stay valid. ``badges`` has a
badge for each selection, and ``nights.json`` all numbers.
"""

import math
import re
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path

from markupsafe import Markup

from conformance.core.errors import UsageError
from conformance.core.io import read_file, write_file
from conformance.records.record_format import dumps
from conformance.results.baseline import COMMIT, Outcome, by_backend, counts_text, make_baseline
from conformance.results.changes import KINDS, Since, VersionChange, compare, version_changes
from conformance.results.history import RUNS, Summary, open_history, summarise
from conformance.results.verdict import PASSES, STATES, named, number, size_off
from reports.ci_formats import COLOURS, badge_json, badge_svg
from reports.html import STYLES, TEMPLATES, anchor, environment
from reports.wording import plural, share

SHOWN = 30  # nights in the grid of cells
LONGEST_REPORT = 2**28  # bytes
NIGHT, HEIGHT = 14, 22  # px of a night in a sparkline, and its height
MOST, LEAST = 0.0, -17.0  # powers of ten at the top and at the bottom of a sparkline


@dataclass(frozen=True, kw_only=True)
class Night:
    """Holds one run and what changed since the runs before it. earlier: the run before; None for the first."""

    run: Summary
    since: Since
    earlier: Summary | None

    @cached_property
    def name(self) -> str:
        """Returns the name of its page: time, commit, and a digest of the selection."""
        commit = re.sub(r"[^\w.-]", "-", self.run.versions.get(COMMIT, "unknown"))
        return f"{self.run.started:%Y-%m-%d-%H%M}-{commit}-{zlib.crc32(self.run.selection.encode()):08x}"

    @property
    def when(self) -> str:
        return f"{self.run.started:%Y-%m-%d %H:%M}"

    @property
    def counts(self) -> dict[str, str]:
        return {backend: counts_text(counts) for backend, counts in by_backend(self.run.cells).items()}

    @property
    def changed(self) -> tuple[VersionChange, ...]:
        return version_changes(self.earlier.versions, self.run.versions) if self.earlier else ()

    @property
    def news(self) -> list[str]:
        """Returns how many cells changed since the run before, by kind, and how many are flaky, drift or are slower."""
        kinds = self.since.last.by_kind if self.since.last else {}
        found = [f"{len(changes)} {KINDS[kind]}" for kind, changes in kinds.items()]
        rest = {"flaky": self.since.flaky, "drifting": self.since.grown, "slower": self.since.slower}
        return found + [f"{len(cells)} {word}" for word, cells in rest.items() if cells]


def publish(history: Path, outs: Sequence[Path], to: Path) -> int:
    """Writes the site of the history in ``history`` to ``to``, with the reports of ``outs``. Returns the exit code."""
    with open_history(history) as opened:
        runs = {selection: opened.runs(selection, last=10**6) for selection in opened.selections()}
    nights = {selection: nights_of(found) for selection, found in runs.items()}
    for folder in ("nights", "cells", "badges"):
        (to / folder).mkdir(parents=True, exist_ok=True)
    for out in outs:
        _copy_report(out, [night for found in nights.values() for night in found], to)
    pages = environment()
    pages.filters.update(number=number, off=size_off, plural=plural)
    pages.globals.update(STATES=STATES, KINDS=KINDS, anchor=anchor, file_of=file_of, worst=worst, trends=())
    pages.globals.update(has_report=lambda night: (to / _report(night)).is_file(), digits=digits, trend=trend)
    pages.globals.update(streak=streak, named=named, passes=lambda night: night.run.verdict in PASSES)
    template = pages.get_template("nights.html")
    write_file(to / "style.css", "\n".join((TEMPLATES / f"{name}.css").read_text(encoding="utf-8") for name in STYLES))
    write_file(to / "index.html", template.render(page="index", nights=nights, shown=SHOWN))
    for night in (night for found in nights.values() for night in found):
        write_file(to / "nights" / f"{night.name}.html", template.render(page="night", night=night, root="../"))
    for cell in (cells := sorted({cell for found in runs.values() for run in found for cell in run.cells})):
        every = [night for found in nights.values() for night in found if cell in night.run.cells]
        write_file(to / "cells" / file_of(cell), template.render(page="cell", cell=cell, nights=every, root="../"))
    for found in nights.values():
        _write_badge(found[-1], to / "badges" / re.sub(r"[^\w.]+", "-", found[-1].run.selection).strip("-"))
    write_file(to / "nights.json", dumps([_values(night) for found in nights.values() for night in found]))
    print(f"{to / 'index.html'}: {plural(sum(map(len, nights.values())), 'night')}, {plural(len(cells), 'cell')}")
    return 0


def nights_of(runs: Sequence[Summary]) -> list[Night]:
    """Returns the runs of one selection, from the earliest to the latest, each compared with the RUNS before it."""
    facts = [(f"{run.started:%Y-%m-%dT%H:%M:%S+00:00}", run.verdict, run.versions, run.cells) for run in runs]
    found = []
    for place, run in enumerate(runs):
        baseline = make_baseline("the nights before", facts[max(0, place - RUNS) : place])
        since = compare(baseline, run.cells, started=facts[place][0], versions=run.versions)
        found.append(Night(run=run, since=since, earlier=runs[place - 1] if place else None))
    return found


def worst(outcome: Outcome) -> tuple[str, float]:
    """Returns the stage with the largest error, and the error; no stage if the cell has no errors."""
    return max(outcome.errors.items(), key=lambda pair: (math.isnan(pair[1]), pair[1]), default=("", math.nan))


def digits(outcome: Outcome, error: float) -> str:
    """Formats the largest error of a cell as the number of digits that agree, or in percent if the cell differs."""
    if outcome.state == "differs" or not 0 < error < math.inf:
        return share(error) if error else "="
    return f"{-math.log10(error):.1f}"


def streak(nights: Sequence[Night]) -> Night:
    """Returns the night since which every run passes, or since which none does."""
    passes = nights[-1].run.verdict in PASSES
    return list(takewhile(lambda night: (night.run.verdict in PASSES) == passes, reversed(nights)))[-1]


def trend(nights: Sequence[Night], cell: str) -> Markup:
    """Draws the largest error of each night on a log axis from 1e-17 to 1; a night that does not pass is a cross."""
    points, marks = [], []
    for place, ended in enumerate(night.run.cells.get(cell) for night in nights):
        x = place * NIGHT + NIGHT / 2
        error = worst(ended)[1] if ended else math.nan
        power = MOST if error >= 1 else LEAST if error <= 10**LEAST else math.log10(error) if error > 0 else math.nan
        y = HEIGHT - 3 - (HEIGHT - 6) * (power - LEAST) / (MOST - LEAST)
        if ended and ended.state in ("differs", "infrastructure"):
            y = y if math.isfinite(y) else 3
            marks.append(f'<path class="nan" d="M{x - 3:.0f} {y - 3:.1f}l6 6m0 -6l-6 6"/>')
        elif math.isfinite(y):
            marks.append(f'<circle cx="{x:.0f}" cy="{y:.1f}" r="1.8"/>')
        if math.isfinite(y):
            points.append(f"{x:.0f},{y:.1f}")
    width = NIGHT * len(nights)
    line = f'<polyline points="{" ".join(points)}"/>'
    return Markup(
        f'<svg class="chart spark" width="{width}" height="{HEIGHT}" viewBox="0 0 {width} {HEIGHT}" aria-hidden="true">'
        f"{line}{''.join(marks)}</svg>"
    )


def file_of(cell: str) -> str:
    """Returns the name of the page of a cell."""
    return re.sub(r"[^\w.-]", "-", cell.replace("/", "_")) + ".html"


def _report(night: Night) -> str:
    return f"nights/{night.name}-report.html"


def _copy_report(out: Path, nights: Sequence[Night], to: Path) -> None:
    run = summarise(out)
    same = [one for one in nights if (one.run.selection, one.run.started) == (run.selection, run.started)]
    if not same:
        raise UsageError(f"the history has no run of {out}; add it first: parity history HISTORY --add {out}")
    write_file(to / _report(same[0]), read_file(out / "report.html", limit=LONGEST_REPORT))


def _write_badge(night: Night, path: Path) -> None:
    name, colour = COLOURS[night.run.verdict]
    text = f"{named(night.run.verdict)}, {night.run.started:%Y-%m-%d}"
    write_file(path.with_suffix(".json"), badge_json(text, name, is_error=night.run.verdict not in PASSES))
    write_file(path.with_suffix(".svg"), ET.tostring(badge_svg(text, colour), encoding="utf-8"))


def _values(night: Night) -> dict[str, object]:
    cells = {cell: {"state": o.state, "seconds": o.seconds, "errors": o.errors} for cell, o in night.run.cells.items()}
    run = {name: getattr(night.run, name) for name in ("selection", "verdict", "seconds", "versions")}
    return {
        "page": f"nights/{night.name}.html",
        "started": night.when,
        **run,
        "since": night.since.text,
        "cells": cells,
    }
