"""Writes comparisons of training logs or records as one HTML file that opens offline: verdict, causes and curves."""

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

import conformance
from conformance.records.record_format import dumps
from reports.html import TEMPLATES, environment
from reports.logdiff.comparison import Compared, Comparison
from reports.logdiff.output import HEADS, Comparisons, band, cause_texts, headline, notes, rows, sides, title
from reports.page_data import pack

SCRIPTS = ("make", "words", "data", "charts", "tip", "runs")  # in the order in which they run
POINTS = 400  # of a curve that are drawn


def to_html(found: Comparisons) -> str:
    return render(
        title=title(found.pairs),
        state="differs" if found.differs else "conforms" if found.comparable else "incomplete",
        heads=HEADS,
        comparisons=[_said(one) for one in found.pairs],
        curves=[[_drawn(metric, one) for metric in one.shown] for one in found.pairs],
        next_command=found.next_command,
    )


def render(
    *,
    title: str,
    state: str,
    heads: Sequence[str],
    comparisons: Sequence[dict[str, Any]],
    curves: Sequence[Any],
    next_command: str,
) -> str:
    """Fill the page with one section for each comparison, with its curves and with the command to run next."""
    script = "\n".join((TEMPLATES / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    return (
        environment()
        .get_template("runs.html")
        .render(
            title=title,
            state=state,
            version=conformance.__version__,
            heads=heads,
            comparisons=comparisons,
            points=POINTS,
            style=Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),
            script=Markup(script),
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            curves=pack(dumps(curves)),
            next_command=next_command,
        )
    )


def _said(comparison: Comparison) -> dict[str, Any]:
    return {
        "title": f"{comparison.sides[0].name} and {comparison.sides[1].name}",
        "headline": headline(comparison),
        "sides": sides(comparison),
        "band": band(comparison),
        "likely_causes": cause_texts(comparison),
        "rows": rows(comparison),
        "notes": notes(comparison),
    }


def _drawn(metric: Compared, comparison: Comparison) -> dict[str, Any]:
    """A metric's curves, thinned to POINTS positions of which the first one outside the band is one."""
    count = len(metric.aligned.positions)
    kept = np.unique(np.linspace(0, count - 1, min(count, POINTS)).round().astype(int))
    if metric.first:
        kept = np.union1d(kept, np.searchsorted(metric.aligned.positions, [metric.first.position]))
    runs = [
        {"side": number, "name": run.name, "values": values[kept].tolist()}
        for number, (side, curves) in enumerate(zip(comparison.sides, metric.aligned.sides, strict=True))
        for run, values in zip(side.runs, curves, strict=True)
    ]
    return {
        "name": metric.name,
        "unit": comparison.alignment.by,
        "positions": metric.aligned.positions[kept].tolist(),
        "runs": runs,
        "difference": metric.judged.difference[kept].tolist(),
        "allowed": metric.judged.allowed[kept].tolist(),
        "first": metric.first.position if metric.first else None,
    }
