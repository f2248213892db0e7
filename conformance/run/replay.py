"""Replay: the choices of the oracle's routers as columns of the frozen batches, for cells below the exact tier.

Rounding turns over which experts a token goes to, and then nothing after it can be compared: a single process in bf16
is as far from float64 as a wrong backend. So where numbers are rounded, the choices are input, like the tokens: the
oracle's own in float64 (conformance.oracle.choices), of the step and of the forward pass that they are for. In the
exact tier a backend makes its own, and they are judged.
"""

from dataclasses import replace
from pathlib import Path

from conformance.inputs.prepare import FrozenInputs
from conformance.oracle.decoder import is_routed
from conformance.record.identity import CHOICES
from conformance.role import POLICY
from conformance.scenario import Scenario


def is_replayed(scenario: Scenario, inputs: FrozenInputs) -> bool:
    """Whether a cell is given the oracle's choices."""
    return scenario.precision != "exact" and is_routed(inputs.models[POLICY.name])


def with_choices(inputs: FrozenInputs, oracle: Path) -> FrozenInputs:
    """The inputs with the batches that have the choices of the float64 record ``oracle``."""
    return replace(inputs, batches=oracle / CHOICES)
