"""Defines conventions: choices of a library that differ from the suite's and are not bugs.

A backend declares its conventions (``Backend.conventions``). A cell is then judged, in all stages and with the usual
bounds, by an oracle with the same conventions, and its verdict names those that change the cell's numbers. A convention
that is declared and does not show makes the cell differ (conformance.judge.expected_differences). A convention is a
known defect without an expected difference, so conformance.oracle.defects implements both.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from conformance.core.errors import STRICT, UsageError, shown
from conformance.core.host import resolve
from conformance.core.io import read_json
from conformance.spec.layout import Float8Recipe, Layout
from conformance.spec.objectives import Grpo, Objective, PolicyGradient, Ppo
from conformance.spec.precision import HALF_PRECISIONS, PRECISIONS, PrecisionName
from conformance.spec.scenario import Scenario

Epsilon = Annotated[float, Field(strict=True, ge=0, le=1)]
Number = Annotated[int, Field(strict=True, ge=1)]


def _half(precision: PrecisionName) -> PrecisionName:
    if precision not in HALF_PRECISIONS:
        raise ValueError(f"must be one of {', '.join(HALF_PRECISIONS)}, got {precision!r}")
    return precision


def model_config(scenario: Scenario) -> dict[str, Any]:
    """Reads the model's config.json. Raises UsageError if this fails, and for a model type that is not a text."""
    config = read_json(file := resolve(scenario.model) / "config.json")
    if not isinstance(kind := config.get("model_type", ""), str):
        raise UsageError(f"{file}: model_type must be a text such as 'llama', got {shown(kind)}; download it again")
    return config


def _whitens(objective: Objective) -> bool:
    by_tokens = isinstance(objective, Grpo) and objective.adv_estimator.startswith("reinforce")
    return by_tokens or isinstance(objective, Ppo)


class Convention:
    """Defines what the conventions have in common.

    words: says what the library does. stage: the first stage at which it can show. unjudged: the stage that cannot be
    judged in a cell with it; empty for a convention that the oracle has. own_means: keys of the scalars that are not
    the means of rows with it. coarse: numbers are rounded more coarsely than in the cell's precision.
    """

    words: ClassVar[str]
    stage: ClassVar[str]
    unjudged: ClassVar[str] = ""
    own_means: ClassVar[tuple[str, ...]] = ()
    coarse: ClassVar[bool] = False

    def in_cell(self, scenario: Scenario, layout: Layout) -> Self | None:
        """Returns the convention with what it depends on in this cell; None for a cell that it cannot change."""
        raise NotImplementedError

    def __str__(self) -> str:
        return type(self).__name__


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DecaysAll(Convention):
    """Applies weight decay to all parameters, norms and biases as well."""

    kind: Literal["decays-all"] = "decays-all"
    words: ClassVar[str] = "weight decay on norms and biases"
    stage: ClassVar[str] = "clipped update"

    def in_cell(self, scenario: Scenario, layout: Layout) -> Self | None:
        return self if scenario.optimizer.weight_decay else None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MuonEpsilon(Convention):
    """Divides Muon's momentum by its norm plus 1e-7, instead of by the larger of both.

    Below the exact tier this is less than the rounding of the update, so only cells of the exact tier have it.
    """

    kind: Literal["muon-epsilon"] = "muon-epsilon"
    words: ClassVar[str] = "an epsilon added to the norm of Muon's momentum"
    stage: ClassVar[str] = "clipped update"

    def in_cell(self, scenario: Scenario, layout: Layout) -> Self | None:
        return self if scenario.optimizer.name == "muon" and scenario.tier.is_exact else None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AdvantageEpsilon(Convention):
    """Adds ``value``, instead of 1e-6, to the standard deviation of a group's rewards."""

    kind: Literal["advantage-epsilon"] = "advantage-epsilon"
    value: Epsilon
    words: ClassVar[str] = "another epsilon beside the standard deviation of rewards"
    stage: ClassVar[str] = "advantages"

    def in_cell(self, scenario: Scenario, layout: Layout) -> Self | None:
        o = scenario.objective
        divides = isinstance(o, Grpo) and o.adv_estimator == "grpo" and o.norm_adv_by_std_in_grpo
        return self if divides else None

    def __str__(self) -> str:
        return f"AdvantageEpsilon({self.value:g})"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BiasedWhitening(Convention):
    """Whitens advantages with the variance of n instead of n - 1, which is at least 1e-8."""

    kind: Literal["biased-whitening"] = "biased-whitening"
    words: ClassVar[str] = "whitening with the variance of n"
    stage: ClassVar[str] = "advantages"

    def in_cell(self, scenario: Scenario, layout: Layout) -> Self | None:
        return self if _whitens(scenario.objective) else None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CountEpsilon(Convention):
    """Divides by the number of tokens plus ``value`` in the mean over a response, and if ``whitening`` in whitening.

    In float32 the sum is the number itself, so only cells of the exact tier have it.
    """

    kind: Literal["count-epsilon"] = "count-epsilon"
    value: Epsilon = 1e-8
    whitening: bool = False
    words: ClassVar[str] = "an epsilon beside the number of tokens"
    stage: ClassVar[str] = "advantages"

    def in_cell(self, scenario: Scenario, layout: Layout) -> Self | None:
        o = scenario.objective
        if scenario.precision != "exact" or not isinstance(o, PolicyGradient):
            return None
        return self if o.loss_agg_mode == "seq-mean-token-mean" or (self.whitening and _whitens(o)) else None

    def __str__(self) -> str:
        return f"CountEpsilon({self.value:g}{', whitening' if self.whitening else ''})"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SchedulePerRollout(Convention):
    """Moves the learning rate's schedule once per rollout instead of once per update."""

    kind: Literal["schedule-per-rollout"] = "schedule-per-rollout"
    words: ClassVar[str] = "one step of the schedule per rollout"
    stage: ClassVar[str] = "clipped update"

    def in_cell(self, scenario: Scenario, layout: Layout) -> Self | None:
        o, schedule = scenario.objective, scenario.schedule
        several = isinstance(o, PolicyGradient) and o.steps_per_rollout > 1
        return self if several and (schedule.name != "constant" or schedule.warmup_steps) else None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GenerationDenominator(Convention):
    """Divides the policy loss of each mini-batch by the tokens of the rollout / ``mini_batches``, as does KL's.

    So a token of a short mini-batch counts as much as one of a long mini-batch.
    """

    kind: Literal["generation-denominator"] = "generation-denominator"
    words: ClassVar[str] = "losses divided by the mean number of tokens of the rollout's mini-batches"
    stage: ClassVar[str] = "loss"
    own_means: ClassVar[tuple[str, ...]] = ("kl_loss",)

    def in_cell(self, scenario: Scenario, layout: Layout) -> Self | None:
        o = scenario.objective
        by_tokens = isinstance(o, PolicyGradient) and o.loss_agg_mode == "token-mean" and o.mini_batches > 1
        return self if by_tokens else None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _MeansOfMicroBatches(Convention):
    """Takes numbers as the means over micro-batches and ranks of their means over tokens.

    ``data_ranks``, ``micro_batches``: how the rows of an optimizer step are divided. The suite sets them.
    """

    data_ranks: Number = 1
    micro_batches: Number = 1

    def in_cell(self, scenario: Scenario, layout: Layout) -> Self | None:
        if not isinstance(scenario.objective, PolicyGradient):
            return None
        return replace(self, data_ranks=layout.data, micro_batches=scenario.accumulation)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EntropyByMicroBatch(_MeansOfMicroBatches):
    """Takes the entropy bonus as the mean over micro-batches and ranks of their means over tokens."""

    kind: Literal["entropy-by-micro-batch"] = "entropy-by-micro-batch"
    words: ClassVar[str] = "entropy as the mean of the means of micro-batches"
    stage: ClassVar[str] = "loss"
    own_means: ClassVar[tuple[str, ...]] = ("entropy_loss",)

    def in_cell(self, scenario: Scenario, layout: Layout) -> Self | None:
        o = scenario.objective
        has_bonus = isinstance(o, PolicyGradient) and o.entropy_coeff
        return super().in_cell(scenario, layout) if has_bonus else None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MetricsByMicroBatch(_MeansOfMicroBatches):
    """Reports clip fractions, ``ppo_kl`` and ``ratio_mean`` as means over micro-batches and ranks of their means.

    ``epsilon`` is added to the number of tokens of each.
    """

    kind: Literal["metrics-by-micro-batch"] = "metrics-by-micro-batch"
    epsilon: Epsilon = 0.0
    words: ClassVar[str] = "metrics as the means of the means of micro-batches"
    stage: ClassVar[str] = "policy metrics"
    own_means: ClassVar[tuple[str, ...]] = ("ppo_kl", "ratio_mean")


class _OwnRouterLoss(_MeansOfMicroBatches):
    """Adds the library's own load-balancing loss, which a layout option turns on."""

    stage: ClassVar[str] = "gradients"
    option: ClassVar[str]

    def in_cell(self, scenario: Scenario, layout: Layout) -> Self | None:
        has_loss = self.option in layout.options and model_config(scenario).get("output_router_logits")
        return replace(self, data_ranks=layout.data, micro_batches=scenario.accumulation) if has_loss else None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RouterLossByMicroBatch(_OwnRouterLoss):
    """Adds a load-balancing loss for each router, divided by the experts per token, as the mean over micro-batches and
    ranks, where the suite has one loss of the step over all routers."""

    kind: Literal["router-loss-by-micro-batch"] = "router-loss-by-micro-batch"
    words: ClassVar[str] = "a load-balancing loss of each router and micro-batch"
    option: ClassVar[str] = "ownaux"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RouterLossSoFar(_OwnRouterLoss):
    """Adds a load-balancing loss for each router and micro-batch, whose counts are those of all ranks in the step so
    far, divided by the experts per token, as the mean over micro-batches, divided by the number of data ranks."""

    kind: Literal["router-loss-so-far"] = "router-loss-so-far"
    words: ClassVar[str] = "a load-balancing loss of each router with the counts of the step so far"
    option: ClassVar[str] = "globalaux"


BLOCK = 128  # numbers along the sum that have one scale with fp8block


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Float8Products(Convention):
    """Multiplies in float8 in linear layers of decoder layers whose sizes are multiples of 16 (of 32 for
    fp8mx), by the ``recipe`` that a layout option names, with scales of the current tensors or, for fp8delayed, of
    those of micro-batches before.

    A tensor that has a scale is a micro-batch of one data rank: ``data_ranks``, ``micro_batches``; for fp8delayed that
    of all. Its rows are filled with token 0 up to a ``multiple`` of tokens, and filled tokens count in the scale.
    ``ends``: the first and the last layer are left out. ``transformer_engine``: the layers are TransformerEngine's in
    Megatron: queries, keys and values are one product, as are gate and up; rows lie end to end, and are filled up
    together. With fp8delayed the first scale is 1, and weights are cast once a step. Otherwise each of ``tensor_ranks``
    scales its own parts of weights, and of inputs or gradients. ``one_length``: micro-batches of a data rank are filled
    up to the longest, as stages of a pipeline do. With fp8block and sequence parallelism each rank's part of the
    sequence is filled up to whole blocks, so that blocks of parts are those of the whole.
    """

    kind: Literal["float8-products"] = "float8-products"
    recipe: Float8Recipe = "fp8tensor"
    ends: bool = False
    multiple: Number = 1
    data_ranks: Number = 1
    micro_batches: Number = 1
    tensor_ranks: Number = 1
    one_length: bool = False
    transformer_engine: bool = False
    words: ClassVar[str] = "products of linear layers in float8"
    stage: ClassVar[str] = "log-probs"
    coarse: ClassVar[bool] = True

    def in_cell(self, scenario: Scenario, layout: Layout) -> Self | None:
        if layout.float8 is None:
            return None
        te = self.transformer_engine and "te" in layout.options  # whose casts are compared
        parts = layout.tp if te and "seqpar" in layout.options else 1  # of the sequence
        return replace(
            self,
            recipe=layout.float8,
            ends="fp8ends" in layout.options,
            multiple=math.lcm(
                (BLOCK if parts > 1 and layout.float8 == "fp8block" else self.multiple) * parts, layout.tp
            ),
            data_ranks=layout.data,
            micro_batches=scenario.accumulation,
            tensor_ranks=layout.tp if te else 1,
            one_length=te and layout.pp > 1 and "varlen" not in layout.options,
            transformer_engine=te,
        )

    def __str__(self) -> str:
        return f"Float8Products({self.recipe})"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RoundedMasters(Convention):
    """Initialises float32 master weights of trained models with weights rounded to ``precision``."""

    kind: Literal["rounded-masters"] = "rounded-masters"
    precision: Annotated[PrecisionName, AfterValidator(_half)]
    words: ClassVar[str] = "masters copied from weights in half precision"
    stage: ClassVar[str] = "weights"

    def in_cell(self, scenario: Scenario, layout: Layout) -> Self | None:
        return self if scenario.precision == self.precision else None

    def __str__(self) -> str:
        return f"RoundedMasters({self.precision})"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainedPaddingToken(Convention):
    """Gives a gradient to the input embedding of the padding token of the model's configuration."""

    kind: Literal["trained-padding-token"] = "trained-padding-token"
    words: ClassVar[str] = "a trained embedding of the padding token"
    stage: ClassVar[str] = "gradients"

    def in_cell(self, scenario: Scenario, layout: Layout) -> Self | None:
        return None if model_config(scenario).get("pad_token_id") is None else self


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GeneratorsNotSaved(Convention):
    """Leaves the states of random generators out of checkpoints."""

    kind: Literal["generators-not-saved"] = "generators-not-saved"
    words: ClassVar[str] = "checkpoints without random generators"
    stage: ClassVar[str] = "generators"
    unjudged: ClassVar[str] = "generators"

    def in_cell(self, scenario: Scenario, layout: Layout) -> Self | None:
        return self


# The conventions that the oracle can have.
OracleConvention = (
    DecaysAll
    | AdvantageEpsilon
    | BiasedWhitening
    | MuonEpsilon
    | CountEpsilon
    | SchedulePerRollout
    | GenerationDenominator
    | EntropyByMicroBatch
    | MetricsByMicroBatch
    | RouterLossByMicroBatch
    | RouterLossSoFar
    | Float8Products
    | RoundedMasters
    | TrainedPaddingToken
)
AnyConvention = Annotated[OracleConvention | GeneratorsNotSaved, Field(discriminator="kind")]
Conventions = tuple[AnyConvention, ...]

# Conventions that explain a difference if none is declared, with the values that libraries have.
KNOWN: Conventions = (
    DecaysAll(),
    *(AdvantageEpsilon(value=value) for value in (1e-4, 1e-5, 1e-8, 1e-9)),
    BiasedWhitening(),
    MuonEpsilon(),
    *(CountEpsilon(whitening=whitening) for whitening in (False, True)),
    SchedulePerRollout(),
    GenerationDenominator(),
    EntropyByMicroBatch(),
    MetricsByMicroBatch(),
    RouterLossByMicroBatch(),
    RouterLossSoFar(),
    *(RoundedMasters(precision=precision) for precision in PRECISIONS if precision in HALF_PRECISIONS),
    TrainedPaddingToken(),
    GeneratorsNotSaved(),
)


def of_oracle(conventions: Sequence[AnyConvention]) -> tuple[OracleConvention, ...]:
    """Returns those that the oracle can have."""
    return tuple(one for one in conventions if not isinstance(one, GeneratorsNotSaved))


def in_cell(conventions: Sequence[AnyConvention], scenario: Scenario, layout: Layout) -> Conventions:
    """Returns those that can change a cell of one phase, with what they depend on in it."""
    found = (one.in_cell(scenario, layout) for one in conventions)
    return tuple(one for one in found if one is not None)
