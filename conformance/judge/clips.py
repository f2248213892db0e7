"""Finds numbers that rounding takes to either side of a clip, where the loss or a gradient jumps.

A ratio that is nearer to its clip than the rounding of log-probs may be clipped by one honest backend and not by
another, and no bound allows the gradient of a whole token. The oracle records how far every clipped quantity is from
its nearest clip (conformance.oracle.loss_terms.Term.clips). Rounding decides about a token if

* its distance in float64 is within NOISE_FACTOR times the largest error of this quantity at this step, over all tokens
  and the single-process runs in the cell's precision, and
* the cell's own rows, if it shows them, put it on the other side, or within their own rounding of the clip.

So a cell whose tokens are all on the oracle's side is judged however near they are, and by the single-process runs of
which this holds. Half precision is not excused at
all: there tokens are so often on the other side that the single-process runs show what it costs.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.judge.tensor_views import StepViews, Tensors
from conformance.judge.tolerance import NOISE_FACTOR, ROUNDING, SCALAR_ROUNDINGS, Measurement
from conformance.records.record_format import RecordError
from conformance.records.step_tensors import Record
from conformance.spec.objectives import REFERENCE_KL
from conformance.spec.observables import CONFIGURATION, Observable, distance_of, stages
from conformance.spec.precision import PRECISIONS, PrecisionName


@dataclass(frozen=True, kw_only=True)
class Clipped:
    """A quantity that a loss clips. ``rows``: those that it is computed of by ``compute``; none if only the oracle has
    them. ``critic``: whether a critic's loss clips it. ``counted``: whether only a fraction of tokens depends on it."""

    rows: tuple[str, ...] = ()
    compute: Callable[..., Tensor] = torch.clone
    critic: bool = False
    counted: bool = False

    def of(self, views: StepViews) -> Tensors:
        """Returns the quantity of each token, float64 (targets,), by row; none if it cannot be computed."""
        shown = [views[key].tensors for key in self.rows]
        if not shown or any(of.keys() != shown[0].keys() for of in shown):
            return {}
        columns = {row: [of[row].double() for of in shown] for row in shown[0]}
        return {row: self.compute(*own) for row, own in columns.items() if len({len(one) for one in own}) == 1}

    def may_reach(self, stage: str, order: Mapping[str, int]) -> bool:
        """Whether a stage of the same step may differ because of this quantity."""
        if self.counted:
            return stage == "policy metrics"
        return (
            stage.startswith("critic") == self.critic
            and order[stage] >= order["critic loss" if self.critic else "loss"]
        )


CLIPPED: Mapping[str, Clipped] = {
    "ratio": Clipped(rows=("ratio",), compute=torch.log),
    "counted ratio": Clipped(rows=("ratio",), compute=torch.log, counted=True),
    REFERENCE_KL: Clipped(rows=("logprob", "reference.logprob"), compute=torch.sub),
    "importance": Clipped(),
    "critic.value": Clipped(rows=("critic.value", "critic.old_value"), compute=torch.sub, critic=True),
    "critic.value beyond its return": Clipped(
        rows=("critic.value", "critic.old_value", "return"),
        compute=lambda value, old, wanted: value + old - 2 * wanted,
        critic=True,
    ),
    "margin": Clipped(rows=("margin",)),
}
INSTEAD = "run the cell in the exact tier"
Undecided = dict[int, Counter[str]]  # how many tokens rounding decides about, by step and quantity


def undecided(phases: Sequence[Record], oracle: Record, noise: Sequence[Record], precision: PrecisionName) -> Undecided:
    """Counts the tokens that rounding takes to either side of a clip. ``noise``: the single-process runs."""
    found: Undecided = {}
    if PRECISIONS[precision].is_exact or PRECISIONS[precision].is_half:
        return found
    steps = {step.step: step for phase in phases for step in phase.steps}
    for number, reference in enumerate(step for step in oracle.steps if step.step in steps):
        own, right, *runs = (
            StepViews(step.tensors())
            for step in (steps[reference.step], reference, *(run.steps[number] for run in noise))
        )
        counts = {name: _count(name, own, right, runs) for name in CLIPPED}
        if any(counts.values()):
            found[reference.step] = Counter({name: count for name, count in counts.items() if count})
    return found


def decided_alike(noise: Sequence[Record], oracle: Record, precision: PrecisionName) -> Sequence[Record]:
    """Returns the single-process runs without those in which rounding decided the other way, which show more than
    rounding. Raises RecordError if none is left."""
    found = {id(run): undecided([run], oracle, noise, precision) for run in noise}
    alike = [run for run in noise if not found[id(run)]]
    if noise and not alike:
        raise RecordError(f"{_explained(found[id(noise[0])], precision)}, also in a single process; {INSTEAD}")
    return alike


def _count(name: str, own: StepViews, right: StepViews, runs: Sequence[StepViews]) -> int:
    key, quantity = distance_of(name), CLIPPED[name]
    distances = right[key].tensors
    if not any((distance.abs() < torch.inf).any() for distance in distances.values()):
        return 0
    exact, shown = quantity.of(right), quantity.of(own)
    # A distance that only the oracle knows errs as its quantity does.
    pairs = [(quantity.of(run), exact) if exact else (run[key].tensors, distances) for run in runs]
    error = max(
        (
            (run[row] - of_row).abs().nan_to_num(0.0).max().item()
            for run, reference in pairs
            for row, of_row in reference.items()
            if row in run and run[row].shape == of_row.shape and len(of_row)
        ),
        default=0.0,
    )
    count = 0
    for row, distance in distances.items():
        rounding = SCALAR_ROUNDINGS * ROUNDING * (1.0 + (exact[row].abs() if row in exact else 0.0))
        is_near = distance.abs() <= torch.as_tensor(rounding).clamp(min=NOISE_FACTOR * error)
        if row in exact and row in shown and shown[row].shape == distance.shape:
            of_cell = distance + shown[row] - exact[row]
            is_near &= (of_cell * distance <= 0) | (of_cell.abs() <= rounding)
        count += int(is_near.sum())
    return count


def check_decided(
    beyond: Sequence[Measurement], undecided: Undecided, observables: Sequence[Observable], precision: PrecisionName
) -> None:
    """Raises RecordError if all that is ``beyond`` its bound may follow from tokens that rounding decides about: what
    depends on them at their step, and all that comes later.

    What has a bound of its own, such as a rebuilt number or a replica, is not held against the oracle.
    """
    order = {stage: i for i, stage in enumerate(stages(observables))}

    def may_follow(m: Measurement) -> bool:
        if m.fixed is not None or m.stage == CONFIGURATION.stage:
            return False
        moves = any(not CLIPPED[name].counted for step, of in undecided.items() if step < m.step for name in of)
        return moves or any(CLIPPED[name].may_reach(m.stage, order) for name in undecided.get(m.step, ()))

    if undecided and beyond and all(map(may_follow, beyond)):
        raise RecordError(f"{_explained(undecided, precision)}, and what differs may follow from that; {INSTEAD}")


def _explained(undecided: Undecided, precision: PrecisionName) -> str:
    first = min(undecided)
    counts = ", ".join(f"{count} of {name}" for name, count in undecided[first].items())
    return f"at step {first}, numbers are so near to a clip that {precision} rounds them to either side ({counts})"
