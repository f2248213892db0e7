"""Shifted rows: how far the rounding of values may take a row of a value model's embedding.

Serves claim 6. What the values of a document add to a row may nearly cancel, where their errors, which are alike, do
not (docs/tolerances.md). How large these are is told by single-process runs: the root mean square, over hundreds of
values, of the errors of the gradients of the loss with respect to them, which is not small by luck. How far a row moves
with them is told by the oracle (conformance.oracle.shifted).
"""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from conformance.judge.distance import Leeway
from conformance.judge.tolerance import NOISE_FACTOR, OF_ROWS, Key
from conformance.observable import SHIFTED, VALUE_GRADIENT
from conformance.record.format import AGAIN, RecordError
from conformance.record.tensors import Record, StepRecord


def leeway_of_rows(
    runs: Sequence[Sequence[StepRecord]], oracle: Record, bounds: Mapping[Key, float]
) -> dict[Key, Leeway]:
    """By the key of a worst row's measurement. ``runs``: the steps of the single-process runs. ``bounds``: of all
    quantities of these runs. None of a row whose bound is 0, and where the oracle does not say how far rows move.

    Raises RecordError where it says so of other rows than it has.
    """
    found = {}
    for o in (o for o in oracle.observables if o.rowwise):
        prefix = o.key.removesuffix("gradient")
        for number, reference in enumerate(oracle.steps):
            values = _read(reference, prefix + VALUE_GRADIENT)
            error = max((_error(_read(run[number], prefix + VALUE_GRADIENT), values) for run in runs), default=0.0)
            for name, moved in _read(reference, prefix + SHIFTED).items():
                rows = reference.shapes().get(f"{o.key}/{name}", ())[:1]
                if moved.shape != rows:
                    told = f"how far {tuple(moved.shape)} rows of {name} move, and has {tuple(rows)}"
                    raise RecordError(f"{reference.path} tells {told}; {AGAIN}")
                key = o.stage, f"{name} {OF_ROWS}", reference.step
                if bound := bounds.get(key):
                    found[key] = Leeway(rows=NOISE_FACTOR * error * moved, bound=bound)
    return found


def _read(step: StepRecord, key: str) -> dict[str, Tensor]:
    """The tensors of a key, in float64 by name, and no others."""
    with step.open() as file:
        names = [name for name in file.keys() if name.startswith(f"{key}/")]  # noqa: SIM118
        return {name.removeprefix(f"{key}/"): file.get_tensor(name).double() for name in names}


def _error(own: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """The root mean square of the differences; 0 of a run that has other rows, or none."""
    if own.keys() != reference.keys() or any(own[row].shape != ref.shape for row, ref in reference.items()):
        return 0.0
    squares = sum((own[row] - ref).square().sum().item() for row, ref in reference.items())
    return math.sqrt(squares / max(1, sum(ref.numel() for ref in reference.values())))
