"""Writes comparisons of records on the page of training logs: the stage that differs, its parameters and the curves."""

import math
from collections import defaultdict
from typing import Any

from parity.compare import Comparison
from parity.differences import Pair, Quantity, Stage
from parity.explain import described_run, exact, largest, likely_causes, notes, where
from reports.logdiff.page import POINTS, render

HEADS = ("quantity", "stage", "difference", "allowed", "norm in A", "norm in B", "B / A")
ROWS = 1000  # of the parameters that differ


def records_to_html(comparison: Comparison) -> str:
    parted = comparison.differs
    return render(
        title="The records part" if parted else "The records agree" if comparison.comparable else "Nothing to compare",
        state="differs" if parted else "conforms" if comparison.comparable else "incomplete",
        heads=HEADS,
        comparisons=[_section(pair) for pair in comparison.pairs],
        curves=[_curves(pair) for pair in comparison.pairs],
        next_command=comparison.next_command,
    )


def _section(pair: Pair) -> dict[str, Any]:
    names, parted = f"{pair.a.name} and {pair.b.name}", pair.parted
    different = [] if parted is None else [(parted, quantity) for quantity in parted.different]
    return {
        "title": names,
        "headline": f"{names} agree." if parted is None else _headline(names, parted),
        "sides": [
            f"{letter}: {run.name}, {described_run(run)}" for letter, run in zip("AB", (pair.a, pair.b), strict=True)
        ],
        "band": (
            f"Allowed is a relative difference of {pair.threshold:.1e} of gradients and updates, and of "
            f"{pair.loss_threshold:.1e} of the loss, because {pair.because}."
        ),
        "likely_causes": [] if parted is None else [*likely_causes(pair, parted), *exact(pair, parted)],
        "rows": [_row(stage, quantity) for stage, quantity in [*different[:ROWS], *largest(pair)]],
        "notes": [*notes(pair), *([f"{len(different) - ROWS} more differ."] if len(different) > ROWS else [])],
    }


def _headline(names: str, parted: Stage) -> str:
    count = f"{len(parted.different)} of {len(parted.quantities)} differ, most of all"
    return f"{names} part at {where(parted)}: {count} {parted.different[0].what}."


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
