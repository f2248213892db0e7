"""HTML: one file that opens offline, begins with the verdict, and shows every cell after one click.

Serves claims 1 and 9: gradients and updates are shown, not only loss curves, and every state has its own symbol and
words, so that a cell that stopped half-way never looks green. Verdict, counts, matrix and reasons are readable without
JavaScript. The script (templates/*.js) unpacks and draws what a reader opens, and adds filter, keyboard, read-outs,
copy and download.
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

from conformance.record.files import write_file
from conformance.record.format import dumps
from conformance.record.since import KINDS
from conformance.record.states import STATES
from reports import earlier, grid, handover, side_by_side, words
from reports.heatmap import SHADES
from reports.load import Report, read_report
from reports.packing import Shared, cell_data, pack

TEMPLATES = Path(__file__).with_name("templates")
STYLES = ("style", "earlier")
# In the order in which they run.
SCRIPTS = ("make", "words", "data", "curves", "heatmap", "strips", "bisect", "cell", "sides", "tip", "page")


def write_html(out: Path) -> Path:
    """Write ``out/report.html`` for the run in ``out``. Raises UsageError for a folder that cannot be trusted, and
    Unwritable."""
    report = read_report(out)
    script = "\n".join((TEMPLATES / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    title, text = words.headline(report)
    shared = Shared()
    blocks = [pack(dumps(cell_data(cell, shared))) for cell in report.cells]
    groups = side_by_side.read_groups(out, report)
    page = _template().render(
        report=report,
        title=title,
        text=text,
        attention=words.attention(report),
        trends=earlier.trends(report),
        known=[c for c in report.cells if c.state == "expected_difference"],
        matrix=matrix(report),
        handed=handover.tables(report),
        numbers={cell.id: number for number, cell in enumerate(report.cells)},
        sides=None if groups is None else [_side(group, report) for group in groups],
        style=Markup("\n".join((TEMPLATES / f"{name}.css").read_text(encoding="utf-8") for name in STYLES)),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        shared=pack(shared.to_json()),
        blocks=blocks,
    )
    file = out / "report.html"
    write_file(file, page)
    return file


@cache
def _template() -> jinja2.Template:
    own = environment()
    own.filters.update(number=words.number, ratio=words.ratio, plural=words.plural, linked=linked)
    own.globals.update(STATES=STATES, KINDS=KINDS, SHADES=SHADES, anchor=anchor, explain=words.explain)
    return own.get_template("page.html")


def environment() -> jinja2.Environment:
    """Of every page: names that are missing are errors, and what comes from outside is escaped."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def anchor(cell: str) -> str:
    """The HTML id of a cell, from the cell's id; readable, so that users can type links to it."""
    return "cell-" + re.sub(r"[^A-Za-z0-9._/-]", "-", cell)


def matrix(report: Report) -> dict[str, Any]:
    """The matrix of all cells. Rows are (backend, layout) and columns (scenario, model, variant), both in the order of
    first appearance."""
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
    """``text`` as escaped HTML in which web addresses are links."""
    parts = re.split(r"(https?://[^\s<>\"']*[^\s<>\"'.,;:)])", text)
    links = [Markup('<a href="{0}" rel="noreferrer">{0}</a>').format(part) for part in parts[1::2]]
    return Markup("").join([*(x for pair in zip(parts[::2], links, strict=False) for x in pair), parts[-1]])


def _side(group: side_by_side.Group, report: Report) -> dict[str, Any]:
    """The template's values for one group, with the packed data that the page draws when the group is opened."""
    return {
        "group": group,
        "words": side_by_side.WORDS[group.state],
        "furthest": grid.furthest(group),
        "block": pack(dumps(grid.group_data(group, report))),
    }
