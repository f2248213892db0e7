"""Blanks: where a log names a metric at a step and says no number, JSON's null or an empty cell of a table.

JSON has no NaN, and serializers write null for it (orjson, JavaScript, pandas; pandas leaves the cell of a CSV empty).
The same is written of a metric that a step does not have, such as an evaluation. The other steps tell: a blank where
the metric was due, on a step that has what it usually comes with, is NaN. Any other blank is no value.
"""

from bisect import bisect_left
from collections.abc import Mapping, Set
from itertools import pairwise
from statistics import median_low

from reports.runs.metrics import EVALUATION


def nan_steps(logged: Mapping[str, Set[int]], blank: Mapping[str, Set[int]]) -> dict[str, list[int]]:
    """Of each metric the steps at which its blank is NaN, where there are any.

    ``logged``: the steps at which metrics have numbers; ``blank``: those at which they are named without one.
    """
    found = {metric: _due(metric, logged, steps - logged.get(metric, set())) for metric, steps in blank.items()}
    return {metric: steps for metric, steps in found.items() if steps}


def _due(metric: str, logged: Mapping[str, Set[int]], blank: Set[int]) -> list[int]:
    """The ``blank`` steps at which the metric was due: those at its usual distance from one that has it.

    Distances count the steps of its company. A metric that has a number once or never is due at each of them, unless
    it is an evaluation's.
    """
    own = logged.get(metric, set())
    others = [steps for name, steps in logged.items() if name != metric and not name.startswith(EVALUATION)]
    company = sorted(set().union(*(steps for steps in others if not own or steps & own)))
    places = {step: place for place, step in enumerate(company)}
    numbered = [places[step] for step in sorted(own) if step in places]
    if len(numbered) > 1:
        every = median_low([b - a for a, b in pairwise(numbered)])
    elif metric.startswith(EVALUATION):
        return []
    else:
        every = 1
    return [step for step in sorted(blank) if step in places and _distance(places[step], numbered) % every == 0]


def _distance(place: int, numbered: list[int]) -> int:
    """From the last place with a number, or to the first one if there is none before; 0 without any."""
    at = bisect_left(numbered, place)
    return abs(place - numbered[max(at - 1, 0)]) if numbered else 0
