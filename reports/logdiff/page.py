"""Writes comparisons of training logs or records as one HTML file that opens offline: verdict, causes and curves."""

import base64
import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

import conformance
from conformance.records.record_format import dumps
from parity.compare import Comparison as RecordComparison
from parity.differences import Pair, Quantity, Stage
from parity.explain import described_run, exact, largest, likely_causes, where
from parity.explain import notes as record_notes
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
        comparisons=[_comparison_data(one) for one in found.pairs],
        curves=[[_drawn(one.shown[place], one) for place in _by_severity(one)] for one in found.pairs],
        next_command=found.next_command,
    )


def _by_severity(comparison: Comparison) -> list[int]:
    """Returns the places of the shown metrics: those outside the band come first, by their first position, then by how
    far outside they are; the others keep their order."""

    def rank(place: int) -> tuple[float, float]:
        first = comparison.shown[place].first
        return (first.position, -abs(first.difference) / (first.allowed or 1.0)) if first else (math.inf, 0.0)

    return sorted(range(len(comparison.shown)), key=rank)


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


def _comparison_data(comparison: Comparison) -> dict[str, Any]:
    return {
        "title": f"{comparison.sides[0].name} and {comparison.sides[1].name}",
        "headline": headline(comparison),
        "sides": sides(comparison),
        "band": band(comparison),
        "likely_causes": cause_texts(comparison),
        "rows": [rows(comparison)[place] for place in _by_severity(comparison)],
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


RECORD_HEADS = ("quantity", "stage", "difference", "allowed", "norm in A", "norm in B", "B / A")
ROWS = 1000  # of the parameters that differ


def records_to_html(comparison: RecordComparison) -> str:
    """Shows the stage that differs, its parameters and the curves of each pair of records."""
    differs = comparison.differs
    return render(
        title="The records diverge"
        if differs
        else "The records agree"
        if comparison.comparable
        else "Nothing to compare",
        state="differs" if differs else "conforms" if comparison.comparable else "incomplete",
        heads=RECORD_HEADS,
        comparisons=[_section(pair) for pair in comparison.pairs],
        curves=[_curves(pair) for pair in comparison.pairs],
        next_command=comparison.next_command,
    )


def _section(pair: Pair) -> dict[str, Any]:
    names, divergence = f"{pair.a.name} and {pair.b.name}", pair.divergence
    different = [] if divergence is None else [(divergence, quantity) for quantity in divergence.different]
    return {
        "title": names,
        "headline": f"{names} agree." if divergence is None else _headline(names, divergence),
        "sides": [
            f"{letter}: {run.name}, {described_run(run)}" for letter, run in zip("AB", (pair.a, pair.b), strict=True)
        ],
        "band": (
            f"Allowed is a relative difference of {pair.threshold:.1e} of gradients and updates, and of "
            f"{pair.loss_threshold:.1e} of the loss, because {pair.because}."
        ),
        "likely_causes": [] if divergence is None else [*likely_causes(pair, divergence), *exact(pair, divergence)],
        "rows": [_row(stage, quantity) for stage, quantity in [*different[:ROWS], *largest(pair)]],
        "notes": [*record_notes(pair), *([f"{len(different) - ROWS} more differ."] if len(different) > ROWS else [])],
    }


def _headline(names: str, divergence: Stage) -> str:
    count = f"{len(divergence.different)} of {len(divergence.quantities)} differ, most of all"
    return f"{names} diverge at {where(divergence)}: {count} {divergence.different[0].what}."


def _row(stage: Stage, quantity: Quantity) -> tuple[str, ...]:
    norms = [f"{norm:.6g}" for norm in quantity.norms or ()] or ["", ""]
    scale = "" if quantity.scale is None else f"{quantity.scale:.6g}"
    return (
        quantity.what, where(stage), quantity.description or f"{quantity.observed:.2e}", f"{quantity.allowed:.1e}",
        *norms, scale,
    )  # fmt: skip


def _curves(pair: Pair) -> list[dict[str, Any]]:
    """Give the largest difference of each kind of stage by step, beside the losses and the norms of the gradients."""
    stages: dict[str, list[Stage]] = defaultdict(list)
    for stage in pair.stages:
        if stage.step is not None and stage.worst is not None and stage.worst.allowed:
            stages[stage.name].append(stage)
    return [_curve(pair, name, found[:POINTS]) for name, found in stages.items() if len(found) > 1]


def _curve(pair: Pair, name: str, stages: list[Stage]) -> dict[str, Any]:
    steps = [stage.step for stage in stages if stage.step is not None]
    worst = [stage.worst for stage in stages if stage.worst is not None]
    field = {"loss": "loss", "gradients": "norm"}.get(name, "")
    runs = [
        {"side": side, "name": run.name, "values": [_number(run.steps[step][field]) for step in steps]}
        for side, run in enumerate((pair.a, pair.b) if field else ())
    ]
    return {
        "name": name,
        "unit": "step",
        "positions": steps,
        "runs": runs,
        "difference": [one.observed for one in worst],
        "allowed": [one.allowed for one in worst],
        "first": next((stage.step for stage in stages if stage.different), None),
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
