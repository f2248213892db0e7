"""Trend: how the cells of each backend ended, counted, from run to run; without torch."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from conformance.record.baseline import Outcome, backend_of
from conformance.record.states import STATES, State

Counts = dict[State, int]


def by_backend(outcomes: Mapping[str, Outcome]) -> dict[str, Counts]:
    """By backend, how many of its cells ended in each state, in the order of STATES."""
    found: dict[str, Any] = {}
    for cell, outcome in outcomes.items():
        found.setdefault(backend_of(cell), Counter())[outcome.state] += 1
    return {backend: {state: counts[state] for state in STATES if counts[state]} for backend, counts in found.items()}


def lent_of(outcomes: Mapping[str, Outcome]) -> dict[str, int]:
    """By backend, how many of its cells were judged by an oracle of the second class; without those that have none."""
    return Counter(backend_of(cell) for cell, outcome in outcomes.items() if outcome.second_class)


def fared(counts: Counts) -> str:
    """``10 of 12 conform, 2 differs``: of the cells that were not refused; then what else there is; empty if none."""
    asked = sum(count for state, count in counts.items() if state != "unsupported")
    others = [f"{count} {STATES[state].name}" for state, count in counts.items() if state != "conforms"]
    return ", ".join([f"{counts.get('conforms', 0)} of {asked} conform", *others]) if counts else ""
