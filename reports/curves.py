"""Curves of one cell or of several together, as inline SVG: a value over the oracle's, and its error on a log axis
with the tolerance band.

Serves claim 1: two loss curves that lie on each other prove little, so the difference is always drawn beside them.
Nothing is smoothed. An error of exactly 0 has no place on a log axis; it is drawn at the floor, hollow, and said so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from markupsafe import Markup, escape

from reports.load import Cell, Quantity
from reports.words import number, ratio

WIDTH, HEIGHT = 300, 176
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 8, 24
DRAWN = (("loss", "loss", "loss"), ("gradient norm", "grad_norm", "reported"))  # stage, key of a step, tensor
KINDS = ("b0", "b1", "b2", "b3")  # backends; a fifth is drawn as the first
LINES = 12  # of a read-out
HOVERS = 60  # read-outs per chart; more would weigh more than they help


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Maps steps and values to the drawing; ``low`` and ``high`` are exponents of ten on a log axis."""

    first: int
    last: int
    low: float
    high: float

    def x(self, step: float) -> float:
        span = self.last - self.first
        inset = 10
        width = WIDTH - LEFT - RIGHT - 2 * inset
        return LEFT + inset + (width * (step - self.first) / span if span else width / 2)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.low) / (self.high - self.low)


def charts(cells: Sequence[Cell]) -> list[tuple[str, str, Markup]]:
    """(title, remark, drawing) of all that can be drawn of these cells, in one chart together."""
    drawn = []
    for stage, key, tensor in DRAWN:
        drawn.append((stage, "per step", value_chart(cells, key, stage)))
        drawn.append((f"{stage}: error", "relative, log axis", error_chart(cells, stage, tensor)))
    return [chart for chart in drawn if chart[2]]


def value_chart(cells: Sequence[Cell], key: str, label: str) -> Markup:
    """The records' ``key`` per step, the oracle's as a broad pale line under it."""
    ours = [_series(cell.run.steps if cell.run else (), key) for cell in cells]
    theirs = next((found for c in cells if (found := _series(c.oracle.steps if c.oracle else (), key))), {})
    values = [v for series in (*ours, theirs) for v in series.values() if math.isfinite(v)]
    if not values:
        return Markup("")
    steps = sorted({step for series in (*ours, theirs) for step in series})
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    axes = Axes(first=steps[0], last=steps[-1], low=low - margin, high=high + margin)
    ticks = [(axes.y(t), f"{t:g}") for t in _nice(axes.low, axes.high)]
    body = [_frame(axes, ticks)]
    body.append(_line([(axes.x(s), axes.y(v)) for s, v in theirs.items() if math.isfinite(v)], "oracle"))
    for kind, series in zip(kinds(cells), ours, strict=True):
        body.append(_line([(axes.x(s), axes.y(v)) for s, v in series.items() if math.isfinite(v)], kind))
        for step, value in series.items():
            known = math.isfinite(value)
            body.append(_mark(kind, axes.x(step), axes.y(value)) if known else _cross(axes.x(step), TOP + 6))
    tips = {
        s: [f"{_who(c, cells)}: {_exact(series.get(s))}" for c, series in zip(cells, ours, strict=True)] for s in steps
    }
    body.append(_hovers(axes, {s: [*_some(lines), f"oracle: {_exact(theirs.get(s))}"] for s, lines in tips.items()}))
    return _svg(body, f"{label} per step of {_what(cells)}, over the oracle's")


def error_chart(cells: Sequence[Cell], stage: str, tensor: str) -> Markup:
    """The judged error of one scalar per step on a log axis, with what is allowed as a band."""
    series = [error_points(cell, stage, tensor) for cell in cells]
    every = sorted((q for points in series for q in points), key=lambda q: q.step or 0)
    positive = [v for q in every for v in (q.observed, q.allowed) if 0 < v < math.inf]
    if not positive:
        return Markup("")
    zeros = any(q.observed == 0 for q in every)
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    high = max(high, low + 1)
    axes = Axes(first=every[0].step or 0, last=every[-1].step or 0, low=low - 0.7 * zeros, high=high + 0.15)
    stride = math.ceil((high - low) / 6)
    ticks = [(axes.y(e), _power(e)) for e in range(low, high + 1, stride)]
    if zeros:
        ticks.append((axes.y(axes.low), "0"))
    body = [_band(axes, every), _frame(axes, ticks)]
    tips: dict[int, list[tuple[float, str]]] = {}
    for cell, kind, points in zip(cells, kinds(cells), series, strict=True):
        for drawable, run in groupby(points, key=_drawable):  # no line across a step that has no place on the axis
            if drawable:
                body.append(_line([(axes.x(q.step or 0), axes.y(math.log10(q.observed))) for q in run], kind))
        for quantity in points:
            body.append(_point(axes, quantity, kind))
            text = _judged(quantity) if len(cells) == 1 else f"{_who(cell, cells)}: {_short(quantity)}"
            tips.setdefault(quantity.step or 0, []).append((-quantity.ratio, text))
    body.append(_hovers(axes, {step: _some([text for _, text in sorted(found)]) for step, found in tips.items()}))
    return _svg(body, f"relative error of the {stage} per step of {_what(cells)} on a log axis, with the tolerance")


def error_points(cell: Cell, stage: str, tensor: str) -> list[Quantity]:
    """The judged quantities that ``error_chart`` draws, by step."""
    points = [q for q in cell.quantities if (q.stage, q.tensor) == (stage, tensor) and q.step is not None]
    return sorted(points, key=lambda q: q.step or 0)


def kinds(cells: Sequence[Cell]) -> list[str]:
    """How each cell is drawn: ``ours`` alone; among others by its backend, in colour and in shape."""
    backends = list(dict.fromkeys(cell.backend for cell in cells))
    if len(cells) == 1:
        return ["ours"]
    return [KINDS[backends.index(cell.backend) % len(KINDS)] for cell in cells]


def mark(kind: str) -> Markup:
    """How a kind is drawn, for a legend."""
    return Markup(f'<svg class="chart key" viewBox="0 0 12 10" aria-hidden="true">{_mark(kind, 6, 5)}</svg>')


def _who(cell: Cell, cells: Sequence[Cell]) -> str:
    return cell.backend if len(cells) == 1 else f"{cell.backend} {cell.layout}"


def _what(cells: Sequence[Cell]) -> str:
    return cells[0].id if len(cells) == 1 else f"{len(cells)} cells of {cells[0].scenario}/{cells[0].model}"


def _some(lines: list[str]) -> list[str]:
    more = len(lines) - LINES
    return [*lines[:LINES], f"and {more} more"] if more > 0 else lines


def _point(axes: Axes, quantity: Quantity, kind: str) -> str:
    x = axes.x(quantity.step or 0)
    if _drawable(quantity):
        return _mark(f"{kind} over" if quantity.ratio > 1 else kind, x, axes.y(math.log10(quantity.observed)))
    if quantity.observed == 0:
        return f'<path class="zero" d="M{x - 4:.1f} {axes.y(axes.low) - 8:.1f}h8l-4 7z"/>'
    return _cross(x, TOP + 6)


def _mark(kind: str, x: float, y: float) -> str:
    """A dot whose shape, too, says which backend it is of."""
    shapes = {"b1": "m-2.7 -2.7h5.4v5.4h-5.4z", "b2": "m0 -3.7l3.7 3.7l-3.7 3.7l-3.7 -3.7z", "b3": "m0 -3.4l3.5 6h-7z"}
    if shape := shapes.get(kind.split()[0]):
        return f'<path class="mark {kind}" d="M{x:.1f} {y:.1f}{shape}"/>'
    return f'<circle class="mark {kind}" cx="{x:.1f}" cy="{y:.1f}" r="2.8"/>'


def _drawable(quantity: Quantity) -> bool:
    return 0 < quantity.observed < math.inf


def _judged(quantity: Quantity) -> str:
    return (
        f"error {number(quantity.observed)}{' (exactly equal)' if quantity.observed == 0 else ''}\n"
        f"allowed {number(quantity.allowed)}\nratio {ratio(quantity.ratio)}"
    )


def _short(quantity: Quantity) -> str:
    return f"{number(quantity.observed)}, {ratio(quantity.ratio)} of allowed"


def _series(steps: Sequence[dict[str, object]], key: str) -> dict[int, float]:
    values = {}
    for line in steps:
        step, value = line.get("step"), line.get(key)
        if isinstance(step, int) and isinstance(value, int | float):
            values[step] = float(value)
    return values


def _exact(value: float | None) -> str:
    return "not recorded" if value is None else f"{value:.9g}"


def _frame(axes: Axes, ticks: list[tuple[float, str]]) -> str:
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for y, text in ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{floor}H{right}"/>')
    stride = math.ceil((axes.last - axes.first + 1) / 8)
    for step in range(axes.first, axes.last + 1, stride):
        label = "loaded" if step < 0 else f"step {step}" if step == axes.first else str(step)
        parts.append(f'<text x="{axes.x(step):.1f}" y="{floor + 15}" text-anchor="middle">{label}</text>')
    return "".join(parts)


def _band(axes: Axes, points: list[Quantity]) -> str:
    """What is allowed: a shaded area below a line that steps half-way between two optimizer steps."""
    allowed: dict[int, float] = {}
    for q in points:
        allowed[q.step or 0] = max(q.allowed, allowed.get(q.step or 0, 0.0))
    edges = [(step, value) for step, value in allowed.items() if value > 0]
    if not edges:
        return ""
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    cuts = [axes.x((a + b) / 2) for (a, _), (b, _) in pairwise(edges)]
    top = f"M{LEFT} {axes.y(math.log10(edges[0][1])):.1f}"
    for cut, (_, value) in zip(cuts, edges[1:], strict=True):
        top += f"H{cut:.1f}V{axes.y(math.log10(value)):.1f}"
    top += f"H{right}"
    return f'<path class="band" d="{top}V{floor}H{LEFT}Z"/><path class="limit" d="{top}"/>'


def _line(points: list[tuple[float, float]], kind: str) -> str:
    if len(points) < 2:
        return ""
    return f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def _cross(x: float, y: float) -> str:
    """A value that is not a finite number, at the top edge."""
    return f'<path class="nan" d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"/>'


def _hovers(axes: Axes, tips: dict[int, list[str]]) -> str:
    """One transparent column per step that shows a cursor line and a read-out."""
    steps = list(tips)[:: math.ceil(len(tips) / HOVERS)]
    width = (WIDTH - LEFT - RIGHT) / max(len(steps), 1)
    texts = {step: escape("\n".join([f"step {step}", *tips[step]])) for step in steps}
    return "".join(
        f'<g class="hover" data-step="{step}" data-tip="{texts[step]}">'
        f'<rect x="{axes.x(step) - width / 2:.1f}" y="{TOP}" width="{width:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>'
        f'<path d="M{axes.x(step):.1f} {TOP}V{HEIGHT - BOTTOM}"/></g>'
        for step in steps
    )


def _svg(body: list[str], label: str) -> Markup:
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}"'
    return Markup(f'<svg class="chart" {box}>{"".join(body)}</svg>')


def _power(exponent: int) -> str:
    sign = "\N{MINUS SIGN}" if exponent < 0 else ""
    return f'10<tspan dy="-4" font-size="8">{sign}{abs(exponent)}</tspan>'


def _nice(low: float, high: float) -> list[float]:
    """Three to six round numbers between ``low`` and ``high``."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    stride = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
    first = math.ceil(low / stride)
    return [round(i * stride, 12) for i in range(first, math.floor(high / stride) + 1)]
