"""Describes known defects of libraries, and declares which cells of a backend are expected to have them.

A known defect may hide nothing else (docs/principles.md). So a cell with a known defect is judged, in all stages and
with the usual bounds, against an oracle that has the same defect (conformance.judge.expected_differences).

The author of an adapter writes a tuple of ExpectedDifference. A cell has the defects of all expected differences that
match the cell. This module only describes defects; conformance.oracle.defects implements them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from conformance.core.errors import STRICT, UsageError
from conformance.spec.conventions import Number, OracleConvention, model_config
from conformance.spec.layout import AXES, OPTIONS, Layout
from conformance.spec.objectives import Grpo
from conformance.spec.observables import CONFIGURATION
from conformance.spec.precision import PRECISIONS, PrecisionName
from conformance.spec.scenario import Scenario

Several = Annotated[int, Field(strict=True, ge=2)]
BY_TOKENS = ("sft", "dft", "distillation", "prm")  # objectives whose losses are means over all target tokens


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PaddedSoftmax:
    """Appends rows of zeros to the output embedding until their number is a multiple of ``multiple``.

    These rows take part in the softmax, so they are trained, and their gradients count in the gradient norm.
    """

    kind: Literal["padded-softmax"] = "padded-softmax"
    multiple: Several


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ResummedHeadNorms:
    """Sums accumulated gradients of head norms over ``ranks`` tensor-parallel ranks after each micro-batch.

    So the gradients of earlier micro-batches are summed repeatedly. ``data_ranks``, ``micro_batches``: how the rows of
    an optimizer step are divided.
    """

    kind: Literal["resummed-head-norms"] = "resummed-head-norms"
    ranks: Several
    data_ranks: Number
    micro_batches: Number


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DividedGradients:
    """Divides all gradients by ``by``, and with ``loss`` the loss, too."""

    kind: Literal["divided-gradients"] = "divided-gradients"
    by: Several
    loss: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DividedLoss:
    """Divides a policy loss that is a mean over tokens, and KL's, by ``by``."""

    kind: Literal["divided-loss"] = "divided-loss"
    by: Several


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WindowPerBlock:
    """Applies a sliding window, in a ring of ``ranks``, to each block of keys as if it ended where the queries end.

    ``zigzag``: the ring has two ranks, and each holds one piece from both ends of the document.
    """

    kind: Literal["window-per-block"] = "window-per-block"
    ranks: Several
    zigzag: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LostEmbeddingGradient:
    """Loses the gradient of the input embedding in a model whose output embedding is another tensor."""

    kind: Literal["lost-embedding-gradient"] = "lost-embedding-gradient"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CountsByLastTokens:
    """Divides a router's counts of several micro-batches by the tokens of the last one, times their number."""

    kind: Literal["counts-by-last-tokens"] = "counts-by-last-tokens"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OrthogonalizedShares:
    """Orthogonalizes each of ``ranks`` tensor-parallel ranks' share of a matrix by itself, and scales it by its shape.

    Matrices behind attention and activation are cut by columns, all others by rows.
    """

    kind: Literal["orthogonalized-shares"] = "orthogonalized-shares"
    ranks: Several


PartOfStep = Literal["ranks", "micro-batches", "rows"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MeanOfMeans:
    """Takes a mean over all tokens of a step as the mean of the means of ``parts`` equal numbers of consecutive rows.

    So a token counts less in a part that has more tokens. of: what the parts are; several names of the same parts.
    """

    kind: Literal["mean-of-means"] = "mean-of-means"
    parts: Several
    of: tuple[PartOfStep, ...]

    @property
    def words(self) -> str:
        return (
            f"the mean of the means of {' or '.join(self.of)}, in which tokens count less where there are more of them"
        )

    def sizes(self, counts: Sequence[int]) -> list[float]:
        """Returns what each row's sum is divided by, from the numbers of target tokens of all rows of the step."""
        rows = len(counts) // self.parts
        sums = [max(1, sum(counts[start : start + rows])) for start in range(0, len(counts), rows)]
        return [float(self.parts * tokens) for tokens in sums for _ in range(rows)]


def means_of_means(scenario: Scenario, layout: Layout) -> tuple[MeanOfMeans, ...]:
    """Returns the means of means that a cell could have in place of its mean over tokens."""
    o, rows = scenario.objective, scenario.data.rows
    if o.kind not in BY_TOKENS and getattr(o, "loss_agg_mode", "") != "token-mean":
        return ()
    names: dict[int, tuple[PartOfStep, ...]] = {}
    sizes: dict[PartOfStep, int] = {
        "ranks": layout.data,
        "micro-batches": layout.data * scenario.accumulation,
        "rows": rows,
    }
    for name, parts in sizes.items():
        names[parts] = (*names.get(parts, ()), name)
    return tuple(MeanOfMeans(parts=n, of=of) for n, of in names.items() if n > 1 and rows % n == 0)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ClippedBeforeReduction:
    """Clips the gradients of each of ``ranks`` data-parallel ranks by their own norm, before they are added up.

    ``averaged``: ranks average their gradients, so those of one rank are ``ranks`` times its part of the sum.
    """

    kind: Literal["clipped-before-reduction"] = "clipped-before-reduction"
    ranks: Several
    averaged: bool
    max_norm: float

    stages: ClassVar[tuple[str, ...]] = ("gradients",)
    may_differ: ClassVar[tuple[str, ...]] = ("gradient norm",)  # a rank may report that of its own gradients

    @property
    def words(self) -> str:
        of = "averaged" if self.averaged else "summed"
        return f"gradients that each data-parallel rank clips by their own norm before they are {of} over ranks"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LostMicroBatches:
    """Leaves micro-batches of every rank out of what ``of`` names.

    ``lost``: the last one, or all but the last. ``data_ranks``, ``micro_batches``: how the rows of an optimizer step
    are divided.
    """

    kind: Literal["lost-micro-batches"] = "lost-micro-batches"
    lost: Literal["the last micro-batch", "all micro-batches but the last"]
    of: Literal["gradients", "gradients and loss", "gradients, loss and token count"]
    data_ranks: Number
    micro_batches: Several

    stages: ClassVar[tuple[str, ...]] = ("log-probs", "loss", "gradients")
    may_differ: ClassVar[tuple[str, ...]] = (CONFIGURATION.stage, "log-probs")  # ranks may skip lost rows

    @property
    def words(self) -> str:
        kept = "without the last micro-batch" if self.lost == "the last micro-batch" else "of only the last micro-batch"
        return f"{self.of} {kept} of an accumulation"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainedPrompts:
    """Trains on every token of a document but its first, whether or not it is a target."""

    kind: Literal["trained-prompts"] = "trained-prompts"

    stages: ClassVar[tuple[str, ...]] = ("log-probs", "loss", "gradients")
    may_differ: ClassVar[tuple[str, ...]] = (CONFIGURATION.stage, "log-probs")  # ranks may show those of targets only
    words: ClassVar[str] = "training on all tokens, prompts as well as answers"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AdvantagesOfAll:
    """Divides advantages by the standard deviation of the rewards of all responses of a rollout, instead of those of a
    group. ``centred``: subtracts the mean of all, too."""

    kind: Literal["advantages-of-all"] = "advantages-of-all"
    centred: bool

    stages: ClassVar[tuple[str, ...]] = ("advantages",)
    may_differ: ClassVar[tuple[str, ...]] = ()

    @property
    def words(self) -> str:
        numbers = "the mean and the standard deviation" if self.centred else "the standard deviation"
        return f"advantages normalised with {numbers} of all responses of the rollout instead of the group's"


UPDATES = ("clipped update", "weights after N steps")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class L2Decay:
    """Adds weight decay times the weight to the gradient of AdamW (L2, as Adam has it) instead of decoupling it.

    ``everything``: of norms and biases as well.
    """

    kind: Literal["l2-decay"] = "l2-decay"
    everything: bool

    stages: ClassVar[tuple[str, ...]] = UPDATES
    may_differ: ClassVar[tuple[str, ...]] = ()

    @property
    def words(self) -> str:
        all_of_them = ", of norms and biases as well" if self.everything else ""
        return f"weight decay added to gradients (Adam with L2) instead of decoupled as in AdamW{all_of_them}"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LostDecay:
    """Leaves parameters out of AdamW's weight decay."""

    kind: Literal["lost-decay"] = "lost-decay"
    of: Literal["the embedding", "the embedding and the output head", "any parameter"]

    stages: ClassVar[tuple[str, ...]] = UPDATES
    may_differ: ClassVar[tuple[str, ...]] = ()

    @property
    def words(self) -> str:
        return f"no weight decay of {self.of}"


Bug = ClippedBeforeReduction | LostMicroBatches | TrainedPrompts | AdvantagesOfAll | L2Decay | LostDecay


def bugs(scenario: Scenario, layout: Layout) -> tuple[Bug, ...]:
    """Returns common bugs that could change a cell.

    stages: where such a bug can be found first, if the first step is read. may_differ: stages that may differ from the
    oracle with the bug, because trainers with the bug differ there. words: what a trainer with the bug does.
    """
    o, optimizer, found = scenario.objective, scenario.optimizer, list[Bug]()
    if scenario.accumulation > 1:
        rows: Any = {"data_ranks": layout.data, "micro_batches": scenario.accumulation}
        last, others = "the last micro-batch", "all micro-batches but the last"
        lost = [(last, "gradients"), (others, "gradients")]
        if o.kind in BY_TOKENS:
            lost += [(last, "gradients and loss"), (last, "gradients, loss and token count")]
        found += [LostMicroBatches(**rows, lost=one, of=of) for one, of in lost]  # type: ignore[arg-type]
    if o.kind == "sft":
        found.append(TrainedPrompts())
    if isinstance(o, Grpo) and o.adv_estimator == "grpo" and o.norm_adv_by_std_in_grpo:
        found += [AdvantagesOfAll(centred=centred) for centred in (False, True)]
    if optimizer.max_grad_norm and layout.data > 1:
        clipped: Any = {"ranks": layout.data, "max_norm": optimizer.max_grad_norm}
        found += [ClippedBeforeReduction(averaged=averaged, **clipped) for averaged in (True, False)]
    if optimizer.weight_decay and optimizer.name == "adamw":
        found += [L2Decay(everything=everything) for everything in (False, True)]
        parts: tuple[Any, ...] = ("the embedding", "the embedding and the output head", "any parameter")
        found += [LostDecay(of=of) for of in parts]
    return tuple(found)


Defect = (
    OracleConvention
    | CountsByLastTokens
    | PaddedSoftmax
    | ResummedHeadNorms
    | DividedGradients
    | DividedLoss
    | WindowPerBlock
    | LostEmbeddingGradient
    | OrthogonalizedShares
    | MeanOfMeans
    | ClippedBeforeReduction
    | LostMicroBatches
    | TrainedPrompts
    | AdvantagesOfAll
    | L2Decay
    | LostDecay
)
_ADAPTER: TypeAdapter[tuple[Defect, ...]] = TypeAdapter(tuple[Annotated[Defect, Field(discriminator="kind")], ...])


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Unmodelled:
    """Describes the symptoms of a defect that the oracle does not implement.

    They are findings at ``stage``, of any model, whose tensor matches one of the shell patterns ``tensors``. Any other
    finding makes the cell differ.

    onward: the wrong numbers are used further, so other stages may differ from the oracle after the first finding.
        Quantities that are rebuilt from the cell's own record, replicas, settings and the configuration must still be
        right at all steps.
    """

    stage: str
    tensors: tuple[str, ...]
    onward: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Known:
    """Holds an expected difference of one cell as stored with the verdict: either ``defects`` or ``unmodelled``."""

    reason: str
    link: str
    defects: tuple[Annotated[Defect, Field(discriminator="kind")], ...] = ()
    unmodelled: Unmodelled | None = None


def defects_of(known: Iterable[Known]) -> tuple[Defect, ...]:
    """Returns all defects of a cell's expected differences, in order."""
    return tuple(defect for one in known for defect in one.defects)


def defects_to_json(defects: tuple[Defect, ...]) -> list[dict[str, Any]]:
    """Returns plain JSON values, which ``parse_defects`` reads back."""
    values: list[dict[str, Any]] = _ADAPTER.dump_python(defects, mode="json")
    return list(values)


def parse_defects(values: Any) -> tuple[Defect, ...]:
    """Parses the JSON values of ``defects_to_json``. Raises pydantic's ValidationError for other values."""
    return _ADAPTER.validate_python(values)


SIZES = (*AXES, "zero", "ranks", "accumulation")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedDifference:
    """Declares a known defect of the library below a backend, and the cells that have it.

    reason: what is wrong, in one sentence. link: the evidence.
    defects: a function from scenario and layout to the defects that the oracle must reproduce. If it returns none, the
        expectation does not apply to the cell.
    unmodelled: replaces ``defects`` for a defect that the oracle cannot reproduce. It may return None, with the same
        effect. Give exactly one of the two.

    The expectation applies to the cells that match all of the following conditions. A condition that is left out
    matches every cell.

    options: the layout has all these options.
    at_least, at_most: bounds of sizes, by name: an axis of the layout, ``zero`` (the ZeRO stage; the backend's default
        if the layout names none), ``ranks`` (the world size), ``accumulation`` (micro-batches per step).
    precisions, objectives, scenarios: the cell's is one of these names.
    architectures: ``model_type`` in the model's config.json is one of these.
    packed: whether rows hold several documents.

    Raises UsageError for an unknown name, because such an expectation would match no cell.
    """

    reason: str
    link: str
    defects: Callable[[Scenario, Layout], tuple[Defect, ...]] | None = None
    unmodelled: Callable[[Scenario, Layout], Unmodelled | None] | None = None
    options: tuple[str, ...] = ()
    at_least: Mapping[str, int] = field(default_factory=dict)
    at_most: Mapping[str, int] = field(default_factory=dict)
    precisions: tuple[PrecisionName, ...] = ()
    architectures: tuple[str, ...] = ()
    objectives: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ()
    packed: bool | None = None

    def __post_init__(self) -> None:
        if (self.defects is None) == (self.unmodelled is None):
            raise UsageError(f"the expected difference {self.reason!r} needs exactly one of defects and unmodelled")
        for given, known in (
            (self.options, tuple(OPTIONS)),
            ((*self.at_least, *self.at_most), SIZES),
            (self.precisions, tuple(PRECISIONS)),
        ):
            if unknown := set(given) - set(known):
                raise UsageError(
                    f"the expected difference {self.reason!r} names {', '.join(sorted(unknown))}; known are "
                    f"{', '.join(known)}"
                )

    def is_about(self, scenario: Scenario, layout: Layout, *, default_zero: int | None) -> bool:
        """Tells whether cells of this scenario in this layout are expected to differ."""
        zero = layout.stage(default_zero)
        sizes = {axis: getattr(layout, axis) for axis in AXES}
        sizes |= {"zero": zero or 0, "ranks": layout.world_size, "accumulation": scenario.accumulation}
        return (
            set(self.options) <= set(layout.options)
            and all(sizes[name] >= size for name, size in self.at_least.items())
            and all(sizes[name] <= size for name, size in self.at_most.items())
            and _is_one_of(scenario.precision, self.precisions)
            and _is_one_of(scenario.objective.kind, self.objectives)
            and _is_one_of(scenario.name, self.scenarios)
            and (self.packed is None or self.packed == scenario.data.packed)
            and (not self.architectures or model_config(scenario).get("model_type") in self.architectures)
        )

    def known_for(self, scenario: Scenario, layout: Layout) -> Known:
        """Returns the expected difference of one cell, which must match (see ``is_about``)."""
        return Known(
            reason=self.reason,
            link=self.link,
            defects=self.defects(scenario, layout) if self.defects else (),
            unmodelled=self.unmodelled(scenario, layout) if self.unmodelled else None,
        )


def _is_one_of(name: str, names: tuple[str, ...]) -> bool:
    return not names or name in names
