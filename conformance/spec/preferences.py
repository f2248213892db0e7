"""Configures training on preferences: DPO and its relatives, reward models of answers and steps, KTO; names are TRL's.

A pair is a chosen and a rejected answer to one prompt, two documents that follow each other. Its margin is the
log-ratio of the chosen answer minus that of the rejected one; the log-ratio of an answer is the sum, or with
``length_normalised`` the mean, of log p - reference log p over its tokens. The loss is the mean over the pairs of the
whole optimizer step, over all ranks and micro-batches.
"""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from conformance.core.errors import STRICT
from conformance.spec.batch import Batch, Document
from conformance.spec.observables import (
    LOGPROBS,
    LOSS,
    POLICY,
    REFERENCE,
    REWARD,
    TOKEN_COUNT,
    Observable,
    Reads,
    Role,
    curve,
    rows,
    scalar,
    terms_of,
)

PreferenceLoss = Literal["sigmoid", "hinge", "ipo", "robust", "odds_ratio"]
PAIR, SIDE = "pair", "side"  # columns: the number of a document's pair in its step; 1 if it was chosen, else -1
MARGIN, LABEL = (
    "margin",
    "label",
)  # columns of the data: how much better the chosen answer is; 1 if an answer is desired
MARGINS = replace(rows("margin", "margins"), required=False, effect_at="loss")
REFERENCE_LOGPROBS = replace(rows("reference.logprob", "reference log-probs"), required=False, effect_at="margins")
SUMMED_LOSS = replace(LOSS, sum_of=terms_of("loss"))
Strength = Annotated[float, Field(strict=True, gt=0, le=100)]
Weight = Annotated[float, Field(strict=True, ge=0, le=1000)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Dpo:
    """Configures direct preference optimisation (Rafailov et al., arXiv 2305.18290) and similar losses of pairs.

    With the margin m of a pair:

    kind: the name of the objective.
    loss_type: ``sigmoid``: -log sigmoid(beta m). ``hinge``: max(0, 1 - beta m) (SLiC, arXiv 2305.10425). ``ipo``:
        (m - 1 / (2 beta))^2 (Azar et al., arXiv 2310.12036). ``robust``: ``sigmoid`` without the bias of labels that
        are wrong with the probability ``label_smoothing`` (arXiv 2403.00409). ``odds_ratio``: -beta log sigmoid of the
        difference of log(p / (1 - p)), where log p is the mean log-prob of an answer (ORPO, arXiv 2403.07691).
    beta: the strength of the constraint to the reference.
    label_smoothing: probability that a label is wrong. ``sigmoid`` is then (1 - label_smoothing) times the loss of m
        plus label_smoothing times the loss of -m (cDPO).
    reference_free: whether log-ratios are log-probs, so that there is no reference.
    length_normalised: whether the log-ratio of an answer is a mean over its tokens. TRL does so with ``ipo``; OpenRLHF
        never does.
    target_margin: subtracted from every margin. SimPO (arXiv 2405.14734) is ``sigmoid`` with ``reference_free``,
        ``length_normalised`` and target_margin = gamma / beta.
    sft_coef: the mean of -log p over all tokens of the chosen answers is added with this coefficient (TRL's rpo_alpha;
        1 in ORPO).
    """

    kind: Literal["dpo"] = "dpo"
    loss_type: PreferenceLoss = "sigmoid"
    beta: Strength = 0.1
    label_smoothing: Annotated[float, Field(strict=True, ge=0, lt=0.5)] = 0.0
    reference_free: Annotated[bool, Field(strict=True)] = False
    length_normalised: Annotated[bool, Field(strict=True)] = False
    target_margin: Weight = 0.0
    sft_coef: Weight = 0.0

    reads: ClassVar[Reads] = "preferences"
    disable_dropout: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.label_smoothing and self.loss_type not in ("sigmoid", "robust"):
            raise ValueError(f"{self.loss_type} has no label_smoothing; use 0, or the loss_type sigmoid or robust")
        if self.loss_type == "robust" and not self.label_smoothing:
            raise ValueError("robust corrects for label_smoothing, which is 0; set it, or use the loss_type sigmoid")
        if self.loss_type == "odds_ratio" and not (self.reference_free and self.length_normalised):
            raise ValueError(
                "odds_ratio has no reference and means of log-probs; set reference_free, length_normalised"
            )

    @property
    def roles(self) -> tuple[Role, ...]:
        return (POLICY,) if self.reference_free else (REFERENCE, POLICY)

    def observables(self) -> tuple[Observable, ...]:
        likelihood = replace(curve("nll_loss", "loss", "-log p of chosen answers"), made_of="logprob", required=False)
        return (
            *(() if self.reference_free else (REFERENCE_LOGPROBS,)),
            LOGPROBS,
            # The margin of its pair at each target; log-probs of hundreds of tokens cancel in it.
            replace(MARGINS, scale="logprob"),
            TOKEN_COUNT,
            *map(_count, ("pair_count", "chosen_count")),
            *((likelihood,) if self.sft_coef else ()),
            SUMMED_LOSS,
        )

    def annotate(self, batches: list[Batch]) -> list[Batch]:
        return [_numbered(batch) for batch in batches]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardModel:
    """Configures a reward model by the likelihood of Bradley and Terry (Ouyang et al., arXiv 2203.02155, equation 1).

    The score r of an answer is the number that the value head gives at its last token. The loss of a pair is
    -log sigmoid(r of the chosen answer - r of the rejected answer - margin).

    kind: the name of the objective. The margin is the column ``margin`` of the data, 0 without one (Llama 2,
        arXiv 2307.09288, equation 2).
    center_coef: times (r of the chosen answer + r of the rejected answer)^2, which keeps scores near 0 (Eisenstein et
        al., arXiv 2312.09244, section 3.2; TRL's center_rewards_coefficient).
    """

    kind: Literal["reward"] = "reward"
    center_coef: Weight = 0.0

    reads: ClassVar[Reads] = "preferences"
    disable_dropout: ClassVar[bool] = True
    roles: ClassVar[tuple[Role, ...]] = (REWARD,)

    def observables(self) -> tuple[Observable, ...]:
        scores = replace(rows("score", "scores"), required=False, effect_at="loss")  # of its document at each target
        return (scores, TOKEN_COUNT, _count("pair_count"), SUMMED_LOSS)

    def annotate(self, batches: list[Batch]) -> list[Batch]:
        return [_numbered(batch) for batch in batches]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Kto:
    """Configures Kahneman-Tversky optimisation (Ethayarajh et al., arXiv 2402.01306, equation 8).

    With the log-ratio r of an answer, the sum of log p - reference log p over its tokens, the loss is
    desirable_weight (1 - sigmoid(beta (r - z))) for a desired answer and undesirable_weight (1 - sigmoid(beta (z - r)))
    for another one, averaged over all answers of the step. z estimates the KL to the reference: the mean of r over the
    mismatched answers of the whole step, over all ranks and micro-batches, or 0 if the mean is negative. z has no
    gradient. A mismatched answer is the answer to another prompt: here that of the next sample with another one.

    kind: the name of the objective.
    beta: the strength of the constraint to the reference.
    desirable_weight, undesirable_weight: the weights of the two kinds of answers.
    """

    kind: Literal["kto"] = "kto"
    beta: Strength = 0.1
    desirable_weight: Weight = 1.0
    undesirable_weight: Weight = 1.0

    reads: ClassVar[Reads] = "labelled answers"
    disable_dropout: ClassVar[bool] = True
    roles: ClassVar[tuple[Role, ...]] = (REFERENCE, POLICY)

    def observables(self) -> tuple[Observable, ...]:
        # Log-ratios of both signs cancel in it.
        estimate = replace(scalar("kl", "margins"), scale="kl_scale", required=False, effect_at="loss")
        return (
            REFERENCE_LOGPROBS,
            LOGPROBS,
            replace(estimate, sum_of=terms_of("kl")),
            replace(MARGINS, scale="logprob"),  # r - z of an answer, r of a mismatched one
            TOKEN_COUNT,
            _count("answer_count"),
            SUMMED_LOSS,
        )

    def annotate(self, batches: list[Batch]) -> list[Batch]:
        return [_numbered(batch) for batch in batches]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProcessRewardModel:
    """Configures a model that rewards each step of an answer (Math-Shepherd, arXiv 2312.08935, equation 3).

    The score s of a step is the number that the value head gives at its last token, which is the line break behind it.
    The loss is -y log sigmoid(s) - (1 - y) log sigmoid(-s), averaged over all steps of the optimizer step, over all
    ranks and micro-batches. The label y says whether the step is right, or how likely it is.

    kind: the name of the objective. Two logits a token are the same model: s is their difference.
    """

    kind: Literal["prm"] = "prm"

    reads: ClassVar[Reads] = "labelled steps"
    disable_dropout: ClassVar[bool] = True
    roles: ClassVar[tuple[Role, ...]] = (REWARD,)

    def observables(self) -> tuple[Observable, ...]:
        return (replace(rows("score", "scores"), required=False, effect_at="loss"), TOKEN_COUNT, SUMMED_LOSS)

    def annotate(self, batches: list[Batch]) -> list[Batch]:
        return batches


def _count(key: str) -> Observable:
    return replace(TOKEN_COUNT, key=key, required=False, effect_at="loss")


def _numbered(batch: Batch) -> Batch:
    """Adds the columns PAIR and SIDE: documents 2 n and 2 n + 1 are pair n, the chosen or matched answer first."""
    numbers = iter(range(len(batch.documents)))

    def numbered(document: Document) -> Document:
        pair, rejected = divmod(next(numbers), 2)
        return replace(document, columns={**document.columns, PAIR: float(pair), SIDE: -1.0 if rejected else 1.0})

    return replace(batch, rows=tuple(replace(row, documents=tuple(map(numbered, row.documents))) for row in batch.rows))


PREFERENCES = {"dpo": Dpo, "reward": RewardModel, "kto": Kto, "prm": ProcessRewardModel}
