"""Comparisons as JSON values, for programs."""

from collections.abc import Sequence
from typing import Any

from reports.runs import text
from reports.runs.comparison import Compared, Comparison


def to_json(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """``differs``, ``comparable``, and of each comparison sides, metrics, hints and notes."""
    return {
        "differs": any(one.differs for one in comparisons),
        "comparable": all(one.comparable for one in comparisons),
        "comparisons": [_comparison(one) for one in comparisons],
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "headline": text.headline(comparison),
        "by": comparison.alignment.by,
        "threshold": comparison.threshold,
        "sides": [
            {"name": side.name, "runs": [{"name": run.name, "format": run.format} for run in side.runs]}
            for side in comparison.sides
        ],
        "metrics": [_metric(one) for one in comparison.metrics],
        "hints": [vars(hint) for hint in comparison.hints],
        "notes": text.notes(comparison),
    }


def _metric(one: Compared) -> dict[str, Any]:
    where, worst = one.worst
    return {
        "name": one.name,
        "positions": len(one.aligned.positions),
        "outside": one.outside,
        "first": vars(one.first) if one.first else None,
        "largest": {"position": where, "difference": worst},
    }
