"""Draws the page of `parity engine`: its checks, and log-probs, ratios and mismatch by position beside a trainer."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from conformance.core.io import MIB, parse_json, read_text

FILE = "engine.json"  # in the output folder, as `parity engine --json` prints it
WIDTH, HEIGHT, EDGE = 320, 220, 44
BINS = 41


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Holds a chart: marks in SVG on axes, whose ends are labelled."""

    title: str
    marks: Markup
    x: tuple[str, str]
    y: tuple[str, str]


def page(out: Path, environment: jinja2.Environment, style: str) -> str:
    """Returns the page of the engines in ``out``."""
    engines = parse_json(read_text(out / FILE, limit=64 * MIB), str(out / FILE))
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
    apart = [trainer - engine for _, trainer, engine in points]
    by_position: dict[float, list[float]] = {}
    for (position, *_), difference in zip(points, apart, strict=True):
        by_position.setdefault(position, []).append(abs(difference))
    means = [(position, sum(own) / len(own)) for position, own in sorted(by_position.items())]
    return [
        _dots("log-probs: trainer (right) against engine (up)", [(x, y) for _, x, y in points], diagonal=True),
        _histogram("tokens by importance ratio, trainer / engine", apart),
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
