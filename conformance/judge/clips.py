"""Finds numbers that rounding takes to either side of a clip, where the loss or a gradient jumps.

A ratio that is nearer to its clip than the rounding of log-probs may be clipped by one honest backend and not by
another, and no bound allows the gradient of a whole token. The oracle records how far every clipped quantity is from
its nearest clip (conformance.oracle.loss_terms.Term.clips). Rounding decides about a token if

* its distance in float64 is within NOISE_FACTOR times the largest error of this quantity at this step, over all tokens
  and the single-process runs in the cell's precision, and
* the cell's own rows put it on the other side, or within their own rounding of the clip, or the cell shows no rows.

Which token is the last of a teacher's top k is such a decision, too: the distance is that of its logit from the next
one, and the divergence shows the side.

Only single-process runs that decided every token as float64 did make a bound. In half precision no token is excused:
there, so many are on the other side that the runs show what that costs.
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
from conformance.spec.observables import CONFIGURATION, CRITIC, Observable, distance_of, stages
from conformance.spec.offline import TOP_K
from conformance.spec.precision import PRECISIONS, PrecisionName


@dataclass(frozen=True, kw_only=True)
class Clipped:
    """A quantity that a loss clips, which ``compute`` makes of ``rows``. ``summed``: over each response. ``critic``:
    whether the critic's loss clips it. ``counted``: whether only a fraction of tokens depends on it. ``first``: the
    first stage that does, if it is not the loss. ``side``: rows that show the side, which has a distance of its own."""

    rows: tuple[str, ...]
    compute: Callable[..., Tensor] = torch.clone
    summed: bool = False
    critic: bool = False
    counted: bool = False
    first: str = ""
    side: str = ""

    def computed(self, step: StepViews, distances: Tensors) -> Tensors:
        """Returns the quantity of each token, float64 (targets,), by row, where ``step`` has all that it takes.

        ``distances``: of the oracle's tokens to the clip, which are equal for all tokens of a response if it is summed.
        """
        found = {}
        for row, distance in distances.items():
            columns = [step[key].tensors.get(row, NOTHING).double() for key in self.rows]
            if any(len(column) != len(distance) for column in columns):
                continue
            numbers = self.compute(*columns)
            if self.summed:
                _, response = torch.unique_consecutive(distance, return_inverse=True)
                numbers = torch.zeros_like(numbers).index_add(0, response, numbers)[response]
            found[row] = numbers
        return found


NOTHING = torch.empty(0)
CLIPPED: Mapping[str, Clipped] = {
    "ratio": Clipped(rows=("ratio",), compute=torch.log),
    "counted ratio": Clipped(rows=("ratio",), compute=torch.log, counted=True),
    REFERENCE_KL: Clipped(rows=("logprob", "reference.logprob"), compute=torch.sub),
    # The sampler's log-probs are frozen.
    "importance": Clipped(rows=("old_logprob",)),
    "sequence importance": Clipped(rows=("old_logprob",), summed=True),
    "critic.value": Clipped(rows=("critic.value", "critic.old_value"), compute=torch.sub, critic=True),
    "critic.value (unclipped loss)": Clipped(
        rows=("critic.value", "critic.old_value", "return"),
        compute=lambda value, old_value, returned: value + old_value - 2 * returned,
        critic=True,
    ),
    "margin": Clipped(rows=("margin",)),
    # The error of a target's log-prob stands for that of a difference of logits. If the teacher's last token of the
    # top k is the next one instead, the divergence is that with the other token.
    TOP_K: Clipped(rows=("teacher.logprob",), first="divergences", side="divergence"),
}
INSTEAD = "run the cell in the exact tier"
Undecided = dict[int, Counter[str]]  # how many tokens rounding decides about, by step and quantity


class UndecidedNoise(RecordError):
    """Every single-process run decided a token otherwise than float64; further runs may not."""


def undecided(phases: Sequence[Record], oracle: Record, noise: Sequence[Record], precision: PrecisionName) -> Undecided:
    """Counts the tokens that rounding takes to either side of a clip. ``noise``: the single-process runs."""
    found: Undecided = {}
    if PRECISIONS[precision].is_exact or PRECISIONS[precision].is_half:
        return found
    steps = {step.step: step for phase in phases for step in phase.steps}
    for number, reference in enumerate(step for step in oracle.steps if step.step in steps):
        cell_step, oracle_step, *run_steps = (
            StepViews(step.tensors())
            for step in (steps[reference.step], reference, *(run.steps[number] for run in noise))
        )
        counts = {name: _count(name, cell_step, oracle_step, run_steps) for name in CLIPPED}
        if any(counts.values()):
            found[reference.step] = Counter({name: count for name, count in counts.items() if count})
    return found


def decided_alike(noise: Sequence[Record], oracle: Record, precision: PrecisionName) -> Sequence[Record]:
    """Returns the single-process runs without those in which rounding decided the other way, which show more than
    rounding. Raises UndecidedNoise if none is left."""
    found = {id(run): undecided([run], oracle, noise, precision) for run in noise}
    decided = [run for run in noise if not found[id(run)]]
    if noise and not decided:
        raise UndecidedNoise(f"{_explained(found[id(noise[0])], precision)}, also in a single process; {INSTEAD}")
    return decided


def _count(name: str, cell_step: StepViews, oracle_step: StepViews, run_steps: Sequence[StepViews]) -> int:
    distances, quantity = oracle_step[distance_of(name)].tensors, CLIPPED[name]
    if not any((distance.abs() < torch.inf).any() for distance in distances.values()):
        return 0
    exact = quantity.computed(oracle_step, distances)
    errors = (
        (run[row] - exact[row]).abs().nan_to_num(0.0).max().item()
        for run in (quantity.computed(step, distances) for step in run_steps)
        for row in run.keys() & exact.keys()
        if len(run[row])
    )
    error = max(errors, default=0.0)
    near = {
        row: distance.abs() <= _rounding(row, exact).clamp(min=NOISE_FACTOR * error)
        for row, distance in distances.items()
    }
    if quantity.side:
        quantity, distances = Clipped(rows=(quantity.side,)), oracle_step[distance_of(quantity.side)].tensors
        exact = quantity.computed(oracle_step, distances)
    shown, count = quantity.computed(cell_step, distances), 0
    for row, distance in distances.items():
        is_near = near[row]
        if row in exact and row in shown:
            moved = distance + shown[row] - exact[row]
            is_near = is_near & ((moved * distance <= 0) | (moved.abs() <= _rounding(row, exact)))
        count += int(is_near.sum())
    return count


def _rounding(row: str, exact: Tensors) -> Tensor:
    """Returns what rounding may change a quantity of each token by, (targets,) or scalar."""
    return SCALAR_ROUNDINGS * ROUNDING * (1.0 + exact.get(row, torch.zeros(())).abs())


def check_decided(
    beyond: Sequence[Measurement],
    found: Undecided,
    observables: Sequence[Observable],
    precision: PrecisionName,
    *,
    steps_per_rollout: int = 1,
) -> None:
    """Raises RecordError if all that is ``beyond`` its bound may follow from tokens that rounding decides about: what
    depends on them at their step, and what comes later. A critic and its policy affect each other only by the next
    rollout.

    What has a bound of its own, such as a rebuilt number or a replica, is not held against the oracle.
    """
    order = {stage: i for i, stage in enumerate(stages(observables))}
    of_critic = {o.stage for o in observables if o.key.startswith(CRITIC.prefix)}

    def follows(m: Measurement, step: int, clipped: Clipped) -> bool:
        of_same_model = (m.stage in of_critic) == clipped.critic
        if m.step == step:
            if clipped.counted:
                return m.stage == "policy metrics"
            first = clipped.first or ("critic loss" if clipped.critic else "loss")
            return of_same_model and order[m.stage] >= order[first]
        is_reached = of_same_model or step // steps_per_rollout < m.step // steps_per_rollout
        return step < m.step and not clipped.counted and is_reached

    def may_follow(m: Measurement) -> bool:
        is_held_against_oracle = m.fixed is None and m.stage != CONFIGURATION.stage
        causes = ((step, CLIPPED[name]) for step, counts in found.items() for name in counts)
        return is_held_against_oracle and any(follows(m, *cause) for cause in causes)

    if found and beyond and all(map(may_follow, beyond)):
        raise RecordError(f"{_explained(found, precision)}, and what differs may follow from that; {INSTEAD}")


def _explained(found: Undecided, precision: PrecisionName) -> str:
    first = min(found)
    counts = ", ".join(f"{count} of {name}" for name, count in found[first].items())
    return f"at step {first}, numbers are so near to a clip that {precision} rounds them to either side ({counts})"
