"""Writes a comparison of training logs as text for the terminal, as JSON values and as Markdown."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reports.logdiff.alignment import listed
from reports.logdiff.comparison import Compared, Comparison, Side
from reports.logdiff.metrics import is_known, is_ratio
from reports.logdiff.rows import COUNTED
from reports.logdiff.tolerance_band import HUGE
from reports.wording import percent, plain, plural

HEADS = ("metric", "compared at", "first outside", "difference", "allowed", "outside", "largest difference")
NO_CAUSE = "no likely cause: the difference has none of the known shapes"


@dataclass(frozen=True, kw_only=True)
class Comparisons:
    """Every other side compared with the first; ``next_command``: what to run next, and what it tells."""

    pairs: tuple[Comparison, ...]
    next_command: str

    @property
    def differs(self) -> bool:
        return any(one.differs for one in self.pairs)

    @property
    def comparable(self) -> bool:
        return all(one.comparable for one in self.pairs)

    def text(self) -> str:
        """What ``parity diff`` prints."""
        return f"{to_text(self.pairs)}\n\nNext: {self.next_command}"

    def to_json(self) -> dict[str, Any]:
        """``differs``, ``comparable``, and of each comparison sides, metrics, likely causes (as "hints") and notes."""
        return {
            "differs": self.differs,
            "comparable": self.comparable,
            "comparisons": [_comparison(one) for one in self.pairs],
            "next": self.next_command,
        }


def to_text(comparisons: Sequence[Comparison]) -> str:
    """What ``parity diff`` prints."""
    return "\n\n".join("\n".join(_lines(one)) for one in comparisons)


def _lines(comparison: Comparison) -> list[str]:
    lines = [headline(comparison), "", *sides(comparison)]
    if comparison.metrics:
        table = [HEADS, *rows(comparison)]
        widths = [max(len(row[column]) for row in table) for column in range(len(HEADS))]
        lines += [band(comparison), ""]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
    if comparison.differs:
        lines += ["", "Likely causes:"]
        lines += [f"{place}. {cause}" for place, cause in enumerate(cause_texts(comparison), 1)]
    noted = notes(comparison)
    if noted:
        lines += ["", "Notes:", *(f"- {note}" for note in noted)]
    return lines


def headline(comparison: Comparison) -> str:
    """The verdict in a sentence."""
    names = f"{comparison.sides[0].name} and {comparison.sides[1].name}"
    first = comparison.first
    if first is None and comparison.obstacle:
        return f"{names} cannot be compared: {comparison.obstacle}."
    if first is None:
        count = len(comparison.decided)
        compared, most = comparison.common
        steps = f"{compared} of {most} steps" if compared < most else plural(compared, "step")
        where = steps if comparison.alignment.by == "step" else f"{compared} positions"
        undecided = [one.name for one in comparison.shown if one not in comparison.decided]
        but = f"; of {listed(undecided)}, nothing can be told" if undecided else ""
        return f"{names} agree within the band in {plural(count, 'metric')}, at {where}{but}."
    assert first.first
    if not math.isfinite(first.first.difference):
        where = f"{comparison.alignment.by} {first.first.position:.0f}"
        return f"{names} diverge at {where}: {first.name} is not finite on one side."
    mean = f" in the mean of {first.first.span} positions" if first.first.span > 1 else ""
    return (
        f"{names} diverge at {comparison.alignment.by} {first.first.position:.0f}: {first.name}"
        f" {percent(first.first.difference)}{mean} where {_allowed(first.first.allowed)} is allowed."
    )


def title(comparisons: Sequence[Comparison]) -> str:
    """The verdict of all comparisons in a few words."""
    differing = sum(one.differs for one in comparisons)
    if differing:
        return (
            "The runs diverge"
            if len(comparisons) == 1
            else f"{differing} of {len(comparisons)} runs diverge from the first"
        )
    return "The runs agree" if all(one.comparable for one in comparisons) else "The runs cannot be compared"


def sides(comparison: Comparison) -> list[str]:
    """What each side is: its runs, their formats and steps."""
    return [f"{letter}: {_side(side)}" for letter, side in zip("AB", comparison.sides, strict=True)]


def _side(side: Side) -> str:
    texts = []
    for run in side.runs:
        steps = [step for curve in run.curves.values() for step in (curve.steps[0], curve.steps[-1])]
        what = "lines" if COUNTED in run.notes else "steps"
        texts.append(f"{run.name} ({run.format}, {what} {min(steps):.0f} to {max(steps):.0f})")
    return ", ".join(texts)


def band(comparison: Comparison) -> str:
    """What the band is made of."""
    if comparison.threshold is not None:
        allowed = percent(comparison.threshold).lstrip("+")
        exact = [one.name for one in comparison.shown if one.aligned.exact]
        but = f"; of {' and '.join(exact)}, only digits that are not printed" if exact else ""
        noisy = [one.name for one in comparison.shown if is_ratio(one.name)]
        noise = f"; of {' and '.join(noisy)}, also the scatter from step to step" if noisy else ""
        return f"Allowed is a relative difference of ±{allowed} at every {comparison.place}{but}{noise}."
    counts = " and ".join(str(len(side.runs)) for side in comparison.sides)
    return (
        f"Allowed is what the spread of the {counts} runs makes probable: in a hundred comparisons of honest sides, one"
        " leaves it in any metric."
    )


def rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """A row of the table per metric, under HEADS."""
    return [_row(one, comparison.alignment.by) for one in comparison.shown]


def _row(one: Compared, by: str) -> tuple[str, ...]:
    count = len(one.aligned.positions)
    where, worst = one.worst
    largest = f"{percent(worst)} at {where:.0f}" if worst else "none"
    compared = f"{count} {by if by == 'tokens' else 'steps'}"
    if one.first is None:
        return (
            one.name,
            compared,
            "untold" if one.judged.untold else "never",
            "",
            _allowed(_allowed_at(one, where)),
            "0",
            largest,
        )
    first = one.first
    place = f"{first.position:.0f}" if first.span == 1 else f"{first.position:.0f} to {first.last:.0f} (mean)"
    return (
        one.name,
        compared,
        place,
        percent(first.difference),
        _allowed(first.allowed),
        f"{one.outside} of {count}",
        largest,
    )


def _allowed_at(one: Compared, position: float) -> float:
    return float(one.judged.allowed[int(np.searchsorted(one.aligned.positions, position))])


def _allowed(width: float) -> str:
    return f"±{percent(width).lstrip('+')}" if width < HUGE else f"over ±{percent(HUGE).lstrip('+')}"


def cause_texts(comparison: Comparison) -> list[str]:
    """Give the likely causes, the most probable first; one sentence where none fits; nothing where the runs agree."""
    if not comparison.differs:
        return []
    return [cause.text for cause in comparison.likely_causes] or [NO_CAUSE]


def notes(comparison: Comparison) -> list[str]:
    """What had to be put right or left out, and what is not finite."""
    texts = [
        f"{run.name}: {note}"
        for side in comparison.sides
        for run in side.runs
        for note in run.notes
        if note != COUNTED or comparison.alignment.by == "step"
    ]
    if own := [one.name for one in comparison.metrics if not is_known(one.name)]:
        texts.append(f"{listed(own)}: no table knows this name; compared under it")
    texts += [f"{one.name}: {one.judged.untold}" for one in comparison.shown if one not in comparison.decided]
    texts += [*comparison.scaled_runs, *comparison.factors]
    texts += [*comparison.alignment.notes, *(f"not compared: {text}" for text in comparison.alignment.missing)]
    for one in comparison.metrics:
        for letter, values, side in zip("AB", one.aligned.sides, comparison.sides, strict=True):
            for run, curve in zip(side.runs, values, strict=True):
                wrong = [float(x) for x, y in zip(one.aligned.positions, curve, strict=True) if not math.isfinite(y)]
                if wrong:
                    texts.append(
                        f"{one.name} of {run.name} (side {letter}) is not finite at {plural(len(wrong), 'position')},"
                        f" first at {wrong[0]:.0f}"
                    )
    return texts


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "headline": headline(comparison),
        "by": comparison.alignment.by,
        "threshold": comparison.threshold,
        "sides": [
            {"name": side.name, "runs": [{"name": run.name, "format": run.format} for run in side.runs]}
            for side in comparison.sides
        ],
        "metrics": [_metric(one) for one in comparison.metrics],
        "hints": [vars(cause) for cause in comparison.likely_causes],
        "notes": notes(comparison),
    }


def _metric(one: Compared) -> dict[str, Any]:
    where, worst = one.worst
    return {
        "name": one.name,
        "positions": len(one.aligned.positions),
        "outside": one.outside,
        "allowed": _allowed_at(one, where),
        "untold": one.judged.untold,
        "first": vars(one.first) if one.first else None,
        "largest": {"position": where, "difference": worst},
    }


def to_markdown(found: Comparisons) -> str:
    blocks = "\n".join(map(_block, found.pairs))
    return f"## {plain(title(found.pairs))}\n\n{blocks}\nNext: `{found.next_command}`\n"


def _block(comparison: Comparison) -> str:
    symbol = "❌" if comparison.differs else "✅" if comparison.comparable else "⚠️"
    lines = [f"{symbol} {plain(headline(comparison))}", ""]
    lines += [f"- {plain(sentence)}" for sentence in sides(comparison)]
    if comparison.metrics:
        lines.append(f"- {plain(band(comparison))}")
        lines += ["", f"| {' | '.join(HEADS)} |", f"| :-- |{' --: |' * (len(HEADS) - 1)}"]
        lines += [f"| {' | '.join(map(plain, row))} |" for row in rows(comparison)]
    causes = cause_texts(comparison)
    if causes:
        lines += ["", "Likely causes:", "", *(f"{place}. {plain(cause)}" for place, cause in enumerate(causes, 1))]
    if noted := notes(comparison):
        lines += ["", "Notes:", "", *(f"- {plain(note)}" for note in noted)]
    return "\n".join(lines) + "\n"
