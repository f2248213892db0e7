"""Writes report.html: one file that opens offline, starts with the verdict, and shows every cell after one click.

The page shows gradients and updates, not only loss curves. Every state has its own symbol and words, so that an
incomplete cell never looks green. Verdict, counts, matrix and reasons are readable without JavaScript. The script
(templates/*.js) unpacks and draws the cells that a reader opens, and adds filter, keyboard, tooltips, copy and
download.
"""

import base64
import hashlib
import re
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from conformance.core.io import write_file
from conformance.records.record_format import dumps
from conformance.results.changes import KINDS
from conformance.results.requirements import leased
from conformance.results.verdict import STATES
from reports import side_by_side, summary, tables, wording
from reports.load import MENTION, Report, findings, read_report
from reports.page_data import SHADES, Shared, cell_data, pack
from reports.summary import causes, headline

TEMPLATES = Path(__file__).with_name("templates")
STYLES = ("style", "earlier")
SCRIPTS = (  # in the order in which they run
    *("make", "words", "data", "charts", "curves", "zoom", "heatmap", "strips", "told", "bisect", "cell", "sides"),
    *("tip", "filter", "keyboard", "page", "print"),
)


def write_html(out: Path) -> Path:
    """Writes ``out/report.html`` for the run in ``out``. Raises UsageError for a folder that cannot be trusted, and
    Unwritable."""
    report = read_report(out)
    script = "\n".join((TEMPLATES / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    title, text = headline(report)
    shared = Shared()
    blocks = [pack(dumps(cell_data(cell, shared))) for cell in report.cells]
    groups = side_by_side.read_groups(out, report)
    reasons = [*(cell.reason for cell in report.cells), *(group.text for group in groups or ())]
    page = _template().render(
        report=report,
        title=title,
        text=text,
        trends=summary.trends(report),
        causes=causes(report),
        score=tables.mutation_score(report),
        findings=findings(reasons),
        known=[c for c in report.cells if c.state == "expected_difference"],
        leased=leased(report.run.leased),
        matrix=matrix(report),
        handed=tables.tables(report),
        numbers={cell.id: number for number, cell in enumerate(report.cells)},
        sides=None if groups is None else [_side(group, report) for group in groups],
        style=Markup("\n".join((TEMPLATES / f"{name}.css").read_text(encoding="utf-8") for name in STYLES)),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        shared=pack(shared.to_json()),
        found=pack(dumps(_found(report))),
        blocks=blocks,
    )
    file = out / "report.html"
    write_file(file, page)
    return file


@cache
def _template() -> jinja2.Template:
    own = environment()
    own.filters.update(number=wording.number, ratio=wording.ratio, plural=wording.plural, linked=linked)
    own.globals.update(STATES=STATES, KINDS=KINDS, SHADES=SHADES, anchor=anchor, explain=wording.explain)
    return own.get_template("page.html")


def environment() -> jinja2.Environment:
    """Returns the environment of all templates: missing names are errors, and values are escaped."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def anchor(cell: str) -> str:
    """Returns the HTML id of a cell; readable, so that users can type links to it."""
    return "cell-" + re.sub(r"[^A-Za-z0-9._/-]", "-", cell)


def matrix(report: Report) -> dict[str, Any]:
    """Returns the matrix of all cells. Rows are (backend, layout), columns are (scenario, model, variant), both in the
    order of first appearance."""
    cells = [(cell.entry, cell) for cell in report.cells]
    scenarios, models = (list(dict.fromkeys(getattr(e, part) for e, _ in cells)) for part in ("scenario", "model"))
    backends = list(dict.fromkeys(entry.backend for entry, _ in cells))
    columns = sorted(
        dict.fromkeys((entry.scenario, entry.model, entry.variant) for entry, _ in cells),
        key=lambda column: (scenarios.index(column[0]), models.index(column[1])),
    )
    rows = sorted(dict.fromkeys((e.backend, e.layout) for e, _ in cells), key=lambda row: backends.index(row[0]))
    table = {(e.backend, e.layout, e.scenario, e.model, e.variant): cell for e, cell in cells}
    groups = []
    for backend, group in groupby(rows, key=lambda row: row[0]):
        lines = [(layout, [table.get((backend, layout, *column)) for column in columns]) for _, layout in group]
        states = [cell.state for entry, cell in cells if entry.backend == backend]
        groups.append({"name": backend, "conform": states.count("conforms"), "total": len(states), "rows": lines})
    return {
        "scenarios": [(name, len(list(group))) for name, group in groupby(columns, key=lambda column: column[0])],
        "models": [(name[1], len(list(group))) for name, group in groupby(columns, key=lambda column: column[:2])],
        "columns": columns,
        "backends": groups,
        "ranks": {entry.layout: entry.world_size for entry, _ in cells if entry.world_size},
    }


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
        "words": side_by_side.WORDS[group.state],
        "furthest": tables.furthest(group),
        "block": pack(dumps(tables.group_data(group, report))),
    }
