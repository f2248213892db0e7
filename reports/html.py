"""The report a person acts on: one HTML file that opens offline, verdict first, every cell one click away.

Serves claims 1 and 8: gradients and updates are shown before curves are believed, and every state has its own symbol
and words, so that nothing that stopped half-way looks green. Works without JavaScript (a cell opens by its link); the
script adds filter, keyboard, read-outs, copy and download.
"""

import base64
import gzip
import hashlib
import json
import math
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from reports import curves, grid, heatmap, side_by_side, words
from reports.load import STAGES, STATES, Cell, Quantity, Report, Run, read_report, stage_order

TEMPLATES = Path(__file__).with_name("templates")
WORST = 15
STRIP = (-4.0, 4.0)  # exponents of the ratio axis of the stage strip; what lies beyond stands at its end
COLUMNS = ["cell", "stage", "tensor", "step", "observed", "allowed", "ratio"]


def write_html(out: Path) -> Path:
    """Write ``out/report.html`` from the output folder ``out``; raises ValueError for one that cannot be trusted."""
    report = read_report(out)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=words.number, ratio=words.ratio, plural=words.plural, linked=linked, place=words.place
    )
    environment.globals.update(STATES=STATES, anchor=anchor, explain=words.explain, bar=bar)
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    title, text = words.headline(report)
    groups = side_by_side.read_groups(out, report)
    cells = {cell.id: cell for cell in report.cells}
    page = environment.get_template("page.html").render(
        report=report,
        title=title,
        text=text,
        attention=words.attention(report),
        known=[c for c in report.cells if c.state == "expected_difference"],
        matrix=matrix(report),
        sections=[section(cell) for cell in report.cells],
        sides=None if groups is None else [grid.side(group, cells) for group in groups],
        style=Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=packed(report),
    )
    file = out / "report.html"
    file.write_text(page, encoding="utf-8")
    return file


def anchor(cell: str) -> str:
    """A cell's id as the target of a link; readable, so that it can be typed."""
    return "cell-" + re.sub(r"[^A-Za-z0-9._/-]", "-", cell)


def matrix(report: Report) -> dict[str, Any]:
    """Rows of (backend, layout), columns of (scenario, model, precision), both in order of first appearance."""
    cells = report.cells
    scenarios = list(dict.fromkeys(c.scenario for c in cells))
    models = list(dict.fromkeys(c.model for c in cells))
    backends = list(dict.fromkeys(c.backend for c in cells))
    columns = sorted(
        dict.fromkeys((c.scenario, c.model, c.variant) for c in cells),
        key=lambda column: (scenarios.index(column[0]), models.index(column[1])),
    )
    rows = sorted(dict.fromkeys((c.backend, c.layout) for c in cells), key=lambda row: backends.index(row[0]))
    table = {(c.backend, c.layout, c.scenario, c.model, c.variant): c for c in cells}
    groups = []
    for backend, group in groupby(rows, key=lambda row: row[0]):
        lines = [(layout, [table.get((backend, layout, *column)) for column in columns]) for _, layout in group]
        states = [c.state for c in cells if c.backend == backend]
        groups.append({"name": backend, "conform": states.count("conforms"), "total": len(states), "rows": lines})
    return {
        "scenarios": [(name, len(list(group))) for name, group in groupby(columns, key=lambda column: column[0])],
        "models": [(name[1], len(list(group))) for name, group in groupby(columns, key=lambda column: column[:2])],
        "columns": columns,
        "backends": groups,
        "ranks": {c.layout: c.world_size for c in cells if c.world_size},
    }


def section(cell: Cell) -> dict[str, Any]:
    """Everything that the section of one cell shows."""
    first = words.first_finding(cell)
    outside = [f for f in cell.findings if first and f.stage == first.stage and f.step == first.step]
    maps = [
        ("Gradients", heatmap.heat_map(cell, "gradients")),
        ("Update, first step", heatmap.heat_map(cell, "clipped update")),
        ("Weights, later steps", heatmap.heat_map(cell, "weights after N steps")),
    ]
    return {
        "cell": cell,
        "first": first,
        "first_stage": sorted(outside, key=lambda f: -f.ratio),
        "later": stage_order(list(dict.fromkeys(f.stage for f in cell.findings if first and f.stage != first.stage))),
        "stages": [(name, cell.stages.get(name)) for name in stage_order([*STAGES, *cell.stages])],
        "charts": curves.charts([cell]),
        "zeros": any(
            q.observed == 0 for stage, _, tensor in curves.DRAWN for q in curves.error_points(cell, stage, tensor)
        ),
        "maps": [(title, drawn) for title, drawn in maps if drawn],
        "worst": worst_quantities(cell),
        "config": configuration(cell.run, cell.oracle),
    }


def worst_quantities(cell: Cell) -> list[Quantity]:
    """The quantities nearest to, or furthest beyond, their tolerance."""
    ratios = pd.Series([q.ratio for q in cell.quantities], dtype=float)
    return [cell.quantities[i] for i in ratios.sort_values(ascending=False, kind="stable").index[:WORST]]


def configuration(run: Run | None, oracle: Run | None) -> list[tuple[str, str, str]]:
    """(key, cell's value, oracle's value) of the resolved configuration, keys that differ first."""
    ours, theirs = (_flat(r.header if r else {}) for r in (run, oracle))
    rows = [(key, ours.get(key, ""), theirs.get(key, "")) for key in (ours | theirs) if key not in ("type", "schema")]
    return sorted(rows, key=lambda row: row[1] == row[2])


def packed(report: Report) -> str:
    """Every compared quantity as gzipped JSON in base64; the page unpacks it for the CSV and JSON downloads."""
    data = [
        [cell.id, q.stage, q.tensor, q.step, *map(_number, (q.observed, q.allowed, q.ratio))]
        for cell in report.cells
        for q in cell.quantities
    ]
    text = json.dumps({"columns": COLUMNS, "data": data}, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def bar(ratio: float) -> str:
    """Width, in percent, of a bar on the log axis of ratios."""
    low, high = STRIP
    exponent = low if ratio <= 0 else high if math.isinf(ratio) else min(max(math.log10(ratio), low), high)
    return f"{100 * (exponent - low) / (high - low):.1f}"


def linked(text: str) -> Markup:
    """``text``, escaped, with its web addresses as links."""
    parts = re.split(r"(https?://[^\s<>\"']*[^\s<>\"'.,;:)])", text)
    links = [Markup('<a href="{0}" rel="noreferrer">{0}</a>').format(part) for part in parts[1::2]]
    return Markup("").join([*(x for pair in zip(parts[::2], links, strict=False) for x in pair), parts[-1]])


def _number(value: float) -> float | str:
    """Six significant digits; JSON has no NaN and no infinity."""
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return flat
