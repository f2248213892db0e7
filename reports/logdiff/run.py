"""The canonical names of metrics, and what each framework calls them: one table.

Only what is in the table is compared, because two logs that share a name such as ``time`` or ``memory`` need not agree
in it. Where one framework has several quantities that another has once, each keeps its own canonical name: a policy
loss is not a language-modelling loss, and the KL divergence from the reference not the one from the roll-out's policy.

Sources: Hugging Face Trainer and its integrations (transformers/trainer.py, integrations/integration_utils.py), TRL
(trl/trainer/grpo_trainer.py, ppo_trainer.py), verl (verl/workers/actor, verl/trainer/ppo/metric_utils.py,
verl/trainer/sft_trainer.py), OpenRLHF (openrlhf/trainer), DeepSpeed's monitor (deepspeed/runtime/engine.py),
Megatron-LM (megatron/training/training.py), torchtitan (torchtitan/components/metrics.py).

Blanks: where a log names a metric at a step and says no number, JSON's null or an empty cell of a table.

JSON has no NaN, and serializers write null for it (orjson, JavaScript, pandas; pandas leaves the cell of a CSV empty).
The same is written of a metric that a step does not have, such as an evaluation. The other steps tell: a blank where
the metric was due, on a step that has what it usually comes with, is NaN. Any other blank is no value.

A run: the curves of one training log, under canonical names, each step once and in order.

What had to be put right on the way (steps logged twice after a resume, lines out of order, a log without a step
counter) is kept as notes, in words, and reported with the result.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from statistics import median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.core.errors import UsageError

EVALUATION = "eval_"  # of metrics that a log may have before its first step of training, and not at every step

STEP = (
    "step",
    "global_step",
    "train/global_step",
    "training/global_step",
    "trainer/global_step",
    "eval/global_step",
    "iteration",
    "iter",
    "steps",
    "_step",
)
"""Names of the counter of optimizer steps; where a row has several, the first of these counts."""

TOKENS = (
    "tokens",
    "tokens_seen",
    "ntokens_seen",
    "consumed tokens",
    "consumed_tokens",
    "num_input_tokens_seen",
    "num_tokens",
    "total_tokens",
)

METRICS: dict[str, tuple[str, ...]] = {
    "loss": (
        "loss",
        "train_loss",
        "train/samples/train_loss",
        "training_loss",
        "lm loss",
        "lm_loss",
        "gpt_loss",
        "loss_metrics/global_avg_loss",
    ),
    "policy_loss": ("policy_loss", "actor/pg_loss", "pg_loss", "loss/policy_avg"),
    "critic_loss": ("critic_loss", "critic/vf_loss", "vf_loss", "value_loss", "loss/value_avg"),
    "grad_norm": ("grad_norm", "gradient_norm", "grad norm", "grad-norm", "actor/grad_norm"),
    "critic_grad_norm": ("critic_grad_norm", "critic/grad_norm"),
    "lr": ("lr", "learning_rate", "learning rate", "learning-rate", "actor/lr", "actor_lr", "train/samples/lr"),
    "critic_lr": ("critic_lr", "critic/lr"),
    "reward": ("reward", "reward_mean", "mean_reward", "critic/score/mean", "objective/scores"),
    "reward_after_kl": ("reward_after_kl", "critic/rewards/mean", "objective/rlhf_reward"),
    "return": ("return", "returns", "critic/returns/mean"),
    "kl": ("kl", "actor/kl_loss", "kl_loss", "actor/reward_kl_penalty", "objective/kl"),
    "ppo_kl": ("ppo_kl", "actor/ppo_kl", "approx_kl", "policy/approxkl_avg"),
    "entropy": ("entropy", "actor/entropy", "actor/entropy_loss", "entropy_loss", "objective/entropy"),
    "clip_fraction": (
        "clip_fraction",
        "actor/pg_clipfrac",
        "clip_ratio",
        "clip_ratio/region_mean",
        "policy/clipfrac_avg",
    ),
    "response_length": ("response_length", "response_length/mean", "completions/mean_length", "completion_length"),
    "eval_reward": ("eval_reward", "eval/reward"),
    "eval_loss": (
        "eval_loss",
        "eval/loss",
        "val/loss",
        "val_loss",
        "validation_loss",
        "validation_metrics/loss",
        "lm loss validation",
        "eval/gpt_loss",
    ),
}

OF_ANY_SIZE = ("grad_norm", "critic_grad_norm", "lr", "critic_lr")
"""Metrics that may be as small as they like; the others are of order one, or differences of such numbers."""

EXACT = ("lr", "critic_lr")
"""Metrics that follow from the configuration alone, and are the same to the last digit that a log prints."""

_PLACES = {alias: (name, rank) for name, aliases in METRICS.items() for rank, alias in enumerate(aliases)}
SUMMARY = "train/train_loss"  # the mean of a whole run, which the Trainer's integrations log at its end
_UNIT = re.compile(r"\((1e-\d+)\)$")  # verl writes lr(1e-3):0.02 of a learning rate of 2e-5


def canonical(own: str) -> tuple[str, int, float] | None:
    """A log's own name as (canonical name, rank, unit); None for what is not compared.

    Of two names of one metric in a log the lower rank counts. A value times its unit is in the canonical unit.
    """
    name, unit = own.strip().lower(), 1.0
    if name == SUMMARY:
        return None
    found = _UNIT.search(name)
    if found:
        name, unit = name[: found.start()], float(found[1])
    place = _PLACES.get(name) or _PLACES.get(name.removeprefix("train/"))
    return (*place, unit) if place else None


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
    other_steps = [steps for name, steps in logged.items() if name != metric and not name.startswith(EVALUATION)]
    company = sorted(set().union(*(steps for steps in other_steps if not own or steps & own)))
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


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """What a log says at one step, under its own names. ``step`` is None in logs that count no steps.

    ``blank``: names that have no number there, but JSON's null or an empty cell: NaN, as many programs write it, or
    nothing (blanks.py).
    """

    step: int | None
    values: Mapping[str, float]
    blank: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Log:
    """What a reader found: rows in the order of the file.

    ``averaged``: canonical names whose values are means over the steps since the line before. ``facts``: what the log
    says of how it was made, such as its options. ``notes``: sentences about what could not be read.
    """

    format: str
    rows: list[Row]
    averaged: frozenset[str] = frozenset()
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Curve:
    """A metric: float64 ``values`` [T] at float64 ``steps`` [T], which rise strictly. Values may be NaN or infinite."""

    steps: Floats
    values: Floats

    @cached_property
    def stride(self) -> float:
        """The distance between two steps, usually."""
        return float(np.median(np.diff(self.steps))) if len(self.steps) > 1 else 1.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training log. ``tokens`` [T] at steps are cumulative; None if the log counts none,
    and ``tokens_added`` says that the log has each step's own.

    ``resumed`` are the steps at which the log goes back and begins again.
    """

    name: str
    format: str
    curves: Mapping[str, Curve]
    tokens: Curve | None
    tokens_added: bool
    averaged: frozenset[str]
    facts: Mapping[str, Any]
    notes: tuple[str, ...]
    resumed: tuple[int, ...]


def run_of(log: Log, *, name: str) -> Run:
    """The curves of ``log``. Raises UsageError if it has none of the metrics that are compared."""
    rows, notes = _counted(log.rows)
    resumed, order = _resumes(rows)
    notes = [*log.notes, *notes, *order]
    found: dict[str, dict[int, tuple[int, float]]] = {}
    ignored: dict[str, None] = {}
    blank: dict[str, set[int]] = {}
    highest, again = -1, False
    for row in rows:
        assert row.step is not None
        again = row.step < highest or (again and row.step == highest)
        highest = max(highest, row.step)
        for own, value in row.values.items():
            place = ("tokens", TOKENS.index(own.lower()), 1.0) if own.lower() in TOKENS else canonical(own)
            if place is None:
                ignored[own] = None
                continue
            metric, rank, unit = place
            points = found.setdefault(metric, {})
            if row.step not in points or rank <= points[row.step][0]:
                points[row.step] = rank, value * unit
        for own in row.blank:
            if place := canonical(own):
                blank.setdefault(place[0], set()).add(row.step)
                if again:  # of a step that is logged twice, the later line counts
                    found.get(place[0], {}).pop(row.step, None)
    tokens = _curve(found.pop("tokens")) if "tokens" in found else None
    added = tokens is not None and not _grows(tokens)
    if tokens and added:
        tokens = Curve(tokens.steps, np.cumsum(tokens.values))
    lost = nan_steps({metric: set(points) for metric, points in found.items()}, blank)
    for metric, steps in lost.items():
        found.setdefault(metric, {}).update(dict.fromkeys(steps, (0, math.nan)))
        notes.append(f"{metric} has no number at {len(steps)} steps that have all else; it was taken to be NaN there")
    curves = {metric: _curve(found[metric]) for metric in METRICS if found.get(metric)}
    if not curves:
        known = ", ".join(METRICS)
        names = ", ".join(list(ignored)[:12]) or "nothing"
        raise UsageError(f"{name}: no metric that can be compared ({known}); it has {names}")
    return Run(
        name=name,
        format=log.format,
        curves=curves,
        tokens=tokens,
        tokens_added=added,
        averaged=log.averaged,
        facts=log.facts,
        notes=tuple(notes),
        resumed=resumed,
    )


def _counted(rows: list[Row]) -> tuple[list[Row], list[str]]:
    """The rows with steps. Without a counter, each line that says more than an evaluation is a step: 1, 2, 3, ..."""
    if all(row.step is not None for row in rows):
        return rows, []
    step, counted = 0, []
    for row in rows:
        named = {place[0] for own in row.values if (place := canonical(own))}
        step += any(not name.startswith(EVALUATION) for name in named)
        counted.append(replace(row, step=step))
    return counted, ["the log counts no steps: its lines are counted instead (1, 2, 3, ...)"]


def _resumes(rows: Iterable[Row]) -> tuple[tuple[int, ...], list[str]]:
    """Where the log begins again at a step that it already had, and sentences about that and about disorder."""
    logged: dict[int, set[str]] = {}
    highest, resumed, twice, behind = -1, [], 0, 0
    again = False
    for row in rows:
        assert row.step is not None
        metrics = {own for own in row.values if canonical(own)}
        repeats = not logged.get(row.step, set()).isdisjoint(metrics)
        if repeats:
            twice += 1
            if not again:
                resumed.append(row.step)
        elif row.step < highest:
            behind += 1
        again = repeats or (again and row.step <= highest)
        logged.setdefault(row.step, set()).update(metrics)
        highest = max(highest, row.step)
    notes = []
    if twice:
        places = ", ".join(map(str, resumed))
        notes.append(f"{twice} steps are logged twice, beginning at step {places} (a resume); the later lines count")
    if behind:
        notes.append(f"{behind} lines are out of order; they were sorted by step")
    return tuple(resumed), notes


def _curve(points: Mapping[int, tuple[int, float]]) -> Curve:
    steps = sorted(points)
    return Curve(np.array(steps, dtype=np.float64), np.array([points[step][1] for step in steps], dtype=np.float64))


def _grows(tokens: Curve) -> bool:
    """Whether these are tokens so far, which grow as steps do, and not those of each step."""
    if len(tokens.values) == 1:
        return True
    grown, steps = tokens.values[-1] / tokens.values[0], tokens.steps[-1] / max(tokens.steps[0], 1.0)
    return bool((np.diff(tokens.values) > 0).all() and grown > 0.75 * steps)
