"""Writes report.html: one file that opens offline, starts with the verdict, and shows every cell after one click.

The page shows gradients and updates, not only loss curves. Every state has its own symbol and words, so that an
incomplete cell never looks green. Verdict, counts, matrix and reasons are readable without JavaScript. The script
(templates/*.js) unpacks and draws the cells that a reader opens, and adds filter, keyboard, tooltips, copy and
download.
"""

import base64
import hashlib
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from conformance.bisect.explain import describe
from conformance.core.errors import visible
from conformance.core.io import MIB, parse_json, read_text, write_file
from conformance.core.timeline import table
from conformance.records.record_format import dumps
from conformance.results.baseline import by_backend, counts_text
from conformance.results.changes import KINDS
from conformance.results.requirements import leased, used
from conformance.results.verdict import STATES, margin
from reports import side_by_side, summary, tables, wording
from reports.load import MENTION, Cell, Report, findings, read_report
from reports.page_data import BEYOND, SHADES, Shared, cell_data, pack
from reports.summary import causes, headline

TEMPLATES = Path(__file__).with_name("templates")
LARGE = 500  # cells; errors of passing cells of a larger run are within 6 %, so that the page stays small
PER_BLOCK = 32  # cells that are packed together, because they have much in common
FIRST = 5  # causes that are shown above the matrix; a reader unfolds more
STYLES = ("style", "earlier")
SCRIPTS = (  # in the order in which they run
    *("make", "words", "data", "charts", "curves", "zoom", "heatmap", "strips", "evidence", "bisect", "cell", "sides"),
    *("tip", "filter", "keyboard", "page"),
)


def write_html(out: Path) -> Path:
    """Writes ``out/report.html`` for the run in ``out``. Raises UsageError for a folder that cannot be trusted, and
    Unwritable.

    A folder of `parity engine` gets the page of its engines.
    """
    file = out / "report.html"
    if (out / ENGINES).exists():
        style = (TEMPLATES / "style.css").read_text(encoding="utf-8")
        write_file(file, _engine_page(out, environment(), style))
        return file
    report = read_report(out)
    script = "\n".join((TEMPLATES / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    title = headline(report)[0]
    shared, found = Shared(), causes(report)
    cause_of = {cell.id: cause for cause in found for cell in cause.cells}
    large = len(report.cells) > LARGE
    data = [cell_data(cell, shared, cause_of.get(cell.id), large=large) for cell in report.cells]
    blocks = [pack(dumps(data[first : first + PER_BLOCK])) for first in range(0, len(data), PER_BLOCK)]
    groups = side_by_side.read_groups(out, report)
    reasons = [*(cell.reason for cell in report.cells), *(group.text for group in groups or ())]
    page = _template().render(
        report=report,
        title=title,
        text=summary.first_screen(report),
        trends=summary.trends(report),
        causes=found,
        score=tables.mutation_score(report),
        findings=findings(reasons),
        known=[c for c in report.cells if c.state == "expected_difference"],
        leased=leased(report.run.leased),
        used=used(report.run.cpu_seconds, report.run.gpu_active, cells=len(report.cells)),
        phases=table(report.run.phases),
        matrix=matrix(report),
        conventions=_conventions(report),
        handed=(handed := tables.tables(report)),
        transfers_first=2 * sum(len(table.cells) for table in handed) > len(report.cells),
        numbers={cell.id: number for number, cell in enumerate(report.cells)},
        terms=Markup(pack(dumps(wording.layout_terms(cell.entry.layout for cell in report.cells)))),
        sides=None if groups is None else [_side(group, report) for group in groups],
        style=Markup("\n".join((TEMPLATES / f"{name}.css").read_text(encoding="utf-8") for name in STYLES)),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        shared=pack(shared.to_json()),
        found=pack(dumps(_found(report))),
        blocks=blocks,
        per_block=PER_BLOCK,
    )
    write_file(file, page)
    return file


@cache
def _template() -> jinja2.Template:
    own = environment()
    own.filters.update(number=wording.number, margin=margin, plural=wording.plural, linked=linked, share=wording.share)
    own.filters.update(likely_causes=wording.likely_causes)
    own.globals.update(
        APART=side_by_side.APART, FIRST=FIRST, STATES=STATES, KINDS=KINDS, SHADES=SHADES, BEYOND=BEYOND, anchor=anchor
    )
    own.globals.update(explain=wording.explain, in_square=wording.in_square, level=_level)
    own.globals.update(describe=describe)
    return own.get_template("page.html")


def environment() -> jinja2.Environment:
    """Returns the environment of all templates: missing names are errors, values are escaped, controls are visible."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: visible(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def anchor(cell: str) -> str:
    """Returns the HTML id of a cell; readable, so that users can type links to it."""
    return "cell-" + re.sub(r"[^A-Za-z0-9._/-]", "-", cell)


def matrix(report: Report) -> dict[str, Any]:
    """Returns the matrix of all cells: ``backends`` with how many cells conform, and ``scenarios`` with their rows.

    A row is a model and a variant, with the cells of each backend, all in the order of first appearance. Every scenario
    needs few layouts of all that occur, so a column for each layout would be empty but for a few squares.
    """
    backends = {name: counts_text(counts).partition(",")[0] for name, counts in by_backend(report.outcomes).items()}
    scenarios: dict[str, dict[tuple[str, str], dict[str, list[Cell]]]] = {c.entry.scenario: {} for c in report.cells}
    models = list(dict.fromkeys(cell.entry.model for cell in report.cells))
    for cell in sorted(report.cells, key=lambda cell: models.index(cell.entry.model)):
        entry = cell.entry
        row = scenarios[entry.scenario].setdefault((entry.model, entry.variant), {name: [] for name in backends})
        row[entry.backend].append(cell)
    return {"backends": backends, "scenarios": scenarios}


def _level(cell: Cell) -> Markup:
    """Returns the colour of a passing cell by its margin, as an attribute: 1 for two digits or more, to 4 for none."""
    if cell.state not in ("conforms", "partly_observed") or not cell.closest:
        return Markup()
    return Markup(' data-m="{}"').format(1 + bisect_left(SHADES, cell.closest.ratio))


def _conventions(report: Report) -> dict[str, str]:
    """Returns the conventions that show in a cell, with what the library does."""
    entries = [cell.entry for cell in report.cells]
    return {str(c): c.words for one in entries for c in one.conventions if str(c) in one.verdict.conventions}


def linked(text: str) -> Markup:
    """Escapes ``text`` as HTML. Web addresses become links, and names of findings link to the end of the page."""
    parts = re.split(rf"(https?://[^\s<>\"']*[^\s<>\"'.,;:)]|{MENTION.pattern.replace('(', '(?:')})", text)
    return Markup("").join(_link(part) if place % 2 else part for place, part in enumerate(parts))


def _link(part: str) -> Markup:
    if finding := MENTION.fullmatch(part):
        return Markup('<a href="#finding-{}">{}</a>').format(finding[1], part)
    return Markup('<a href="{0}" rel="noreferrer">{0}</a>').format(part)


def _found(report: Report) -> dict[str, Any]:
    """Returns the names of tensors outside their tolerance, for the filter: all names, and their numbers by cell."""
    shared = Shared()
    cells = {
        number: sorted({shared.string(text) for f in cell.findings for text in (f.tensor, f.stage)})
        for number, cell in enumerate(report.cells)
        if cell.state == "differs"
    }
    return {"cells": cells, "strings": shared.strings}


def _side(group: side_by_side.Group, report: Report) -> dict[str, Any]:
    """Returns the template's values for one group, with the packed data for its details."""
    return {
        "group": group,
        "words": side_by_side.words_of(group),
        "furthest": tables.furthest(group),
        "block": pack(dumps(tables.group_data(group, report))),
    }


ENGINES = "engine.json"  # in the output folder, as `parity engine --json` prints it
WIDTH, HEIGHT, EDGE = 320, 220, 44
BINS = 41


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Holds a chart: marks in SVG on axes, whose ends are labelled."""

    title: str
    marks: Markup
    x: tuple[str, str]
    y: tuple[str, str]


def _engine_page(out: Path, environment: jinja2.Environment, style: str) -> str:
    """Returns the page of the engines in ``out``."""
    engines = parse_json(read_text(out / ENGINES, limit=64 * MIB), str(out / ENGINES))
    for engine in engines:
        for check in engine["checks"]:
            check["charts"] = charts(check["points"]) if check["points"] else []
    states = {engine["state"] for engine in engines}
    state = "differs" if "differs" in states else "conforms" if states == {"conforms"} else "incomplete"
    template = environment.get_template("engine.html")
    return template.render(
        engines=engines, state=state, style=Markup(style), width=WIDTH, height=HEIGHT, edge=EDGE, title=_title(engines)
    )


def _title(engines: Sequence[dict[str, Any]]) -> str:
    return "; ".join(f"{one['engine']} {one['state']} in {one['precision']}" for one in engines)


def charts(points: Sequence[Sequence[float]]) -> list[Chart]:
    """Draws tokens, each with its position and the log-probs of trainer and engine."""
    differences = [trainer - engine for _, trainer, engine in points]
    by_position: dict[float, list[float]] = {}
    for (position, *_), difference in zip(points, differences, strict=True):
        by_position.setdefault(position, []).append(abs(difference))
    means = [(position, sum(own) / len(own)) for position, own in sorted(by_position.items())]
    return [
        _dots("log-probs: trainer (right) against engine (up)", [(x, y) for _, x, y in points], diagonal=True),
        _histogram("tokens by importance ratio, trainer / engine", differences),
        _dots("mean |trainer - engine| by position", means),
    ]


def _dots(title: str, points: Sequence[tuple[float, float]], *, diagonal: bool = False) -> Chart:
    xs, ys = _ends(x for x, _ in points), _ends(y for _, y in points)
    if diagonal:
        xs = ys = _ends((*xs, *ys))
    marks = [f'<path class="axis" d="M{EDGE} {HEIGHT - EDGE}L{WIDTH - EDGE} {EDGE}"/>'] if diagonal else []
    for x, y in points:
        at = _at(x, xs, WIDTH), HEIGHT - _at(y, ys, HEIGHT)
        marks.append(
            f'<circle class="mark ours" cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="2">'
            f"<title>{x:.6g}, {y:.6g}</title></circle>"
        )
    return Chart(title=title, marks=Markup("".join(marks)), x=_labels(xs), y=_labels(ys))


def _histogram(title: str, log_ratios: Sequence[float]) -> Chart:
    """Counts ratios in bins of equal width of their logarithm."""
    ends = _ends(log_ratios)
    counts = [0] * BINS
    for one in log_ratios:
        counts[min(BINS - 1, int((one - ends[0]) / (ends[1] - ends[0]) * BINS))] += 1
    width, marks = (WIDTH - 2 * EDGE) / BINS, []
    for place, count in enumerate(counts):
        height = (HEIGHT - 2 * EDGE) * count / max(counts)
        box = (
            f'x="{EDGE + place * width:.1f}" y="{HEIGHT - EDGE - height:.1f}" width="{width:.1f}" height="{height:.1f}"'
        )
        marks.append(f'<rect class="mark ours" {box}><title>{count} tokens</title></rect>')
    ratios = tuple(f"{math.exp(one):.9g}" for one in ends)
    return Chart(title=title, marks=Markup("".join(marks)), x=(ratios[0], ratios[1]), y=("0", str(max(counts))))


def _ends(values: Iterable[float]) -> tuple[float, float]:
    known = [*values]
    low, high = min(known), max(known)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _at(value: float, ends: tuple[float, float], size: int) -> float:
    return EDGE + (size - 2 * EDGE) * (value - ends[0]) / (ends[1] - ends[0])


def _labels(ends: tuple[float, float]) -> tuple[str, str]:
    return f"{ends[0]:.3g}", f"{ends[1]:.3g}"
