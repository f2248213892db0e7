"""Configures objectives that read samples of texts: fine-tuning, multi-token prediction, distillation and preferences.

Preferences are DPO and its relatives, reward models of answers and steps, and KTO; names are TRL's.

A pair is a chosen and a rejected answer to one prompt, two documents that follow each other. Its margin is the
log-ratio of the chosen answer minus that of the rejected one; the log-ratio of an answer is the sum, or with
``length_normalised`` the mean, of log p - reference log p over its tokens. The loss is the mean over the pairs of the
whole optimizer step, over all ranks and micro-batches.
"""

import itertools
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from conformance.core.errors import STRICT
from conformance.spec.batch import Batch, Document
from conformance.spec.observables import (
    LOGPROBS,
    LOSS,
    MULTI_TOKEN,
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
Coefficient = Annotated[float, Field(strict=True, ge=0, le=1000)]


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
    target_margin: Coefficient = 0.0
    sft_coef: Coefficient = 0.0

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
    center_coef: Coefficient = 0.0

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
    desirable_weight: Coefficient = 1.0
    undesirable_weight: Coefficient = 1.0

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


PositiveWeight = Annotated[float, Field(strict=True, gt=0, le=1e12)]
TOP_K = "top_k"  # how far the last of the teacher's top_k logits of a token is from the next one
# With less noise, bf16 rounds a gradient of the divergence by as much as student and teacher differ.
TEACHER = Role(name="teacher", trained=False, noise=0.5)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Distillation:
    """Configures generalized knowledge distillation (Agarwal et al., arXiv 2306.13649) with the names of TRL.

    A student learns the distributions of a frozen teacher with the same vocabulary. The loss of a token compares the
    teacher's distribution P of the next token with the student's Q. Both are softmax(logits / temperature). The loss is
    the mean over all target tokens of the optimizer step, over all ranks and micro-batches.

    kind: the name of the objective.
    beta: 0 is the forward KL(P, Q), 1 the reverse KL(Q, P). Between them it is the generalized Jensen-Shannon
        divergence beta KL(P, M) + (1 - beta) KL(Q, M), where M = beta P + (1 - beta) Q (equation 1).
    temperature: the divisor of the logits of both models. The loss is not multiplied by its square.
    top_k: the divergence sums over the tokens that are most likely for the teacher; None: over the whole vocabulary. Of
        tokens with equal logits, those that come first in the vocabulary are taken.
    renormalise_top_k: whether P and Q are distributions over the ``top_k`` tokens alone. Otherwise they keep the
        probabilities that they have in the whole vocabulary, as in verl.
    """

    kind: Literal["distillation"] = "distillation"
    beta: Annotated[float, Field(strict=True, ge=0, le=1)] = 1.0
    temperature: Annotated[float, Field(strict=True, gt=0, le=100)] = 1.0
    top_k: Annotated[int, Field(strict=True, ge=1)] | None = None
    renormalise_top_k: Annotated[bool, Field(strict=True)] = True

    reads: ClassVar[Reads] = "samples"
    disable_dropout: ClassVar[bool] = True
    roles: ClassVar[tuple[Role, ...]] = (TEACHER, POLICY)

    def observables(self) -> tuple[Observable, ...]:
        teacher = rows("teacher.logprob", "teacher log-probs")
        return (
            replace(teacher, required=False, effect_at="divergences"),
            LOGPROBS,
            replace(rows("divergence", "divergences"), required=False, effect_at="loss"),
            TOKEN_COUNT,
            replace(LOSS, made_of="divergence"),
        )

    def annotate(self, batches: list[Batch]) -> list[Batch]:
        return batches


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sft:
    """Configures supervised fine-tuning: the mean of weight times -log p over all target tokens of the optimizer step.

    kind: the name of the objective.
    document_weights: for each optimizer step, the weight of its first document that has targets. All other documents,
        and those of further steps, have weight 1. A step with a weight that is far too large overflows in fp16. The
        recorded loss is without weights, so that as many tokens contribute to its rounding as at any other step.
    """

    kind: Literal["sft"] = "sft"
    document_weights: tuple[PositiveWeight, ...] = ()
    reads: ClassVar[Reads] = "samples"
    disable_dropout: ClassVar[bool] = False
    roles: ClassVar[tuple[Role, ...]] = (POLICY,)

    def observables(self) -> tuple[Observable, ...]:
        return (LOGPROBS, TOKEN_COUNT, replace(LOSS, made_of="logprob"))

    def annotate(self, batches: list[Batch]) -> list[Batch]:
        if not self.document_weights:
            return batches
        weights = dict(enumerate(self.document_weights))
        return [_weighted(batch, weights.get(batch.step, 1.0)) for batch in batches]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Dft:
    """Configures dynamic fine-tuning (Wu et al., arXiv 2508.05629, equation 9) without options, as in TRL.

    The loss of a target token is -sg(p) log p, where no gradient passes through sg(p), the token's probability. The
    loss is the mean over all target tokens of the optimizer step, over all ranks and micro-batches.

    kind: the name of the objective.
    """

    kind: Literal["dft"] = "dft"

    reads: ClassVar[Reads] = "samples"
    disable_dropout: ClassVar[bool] = False
    roles: ClassVar[tuple[Role, ...]] = (POLICY,)

    def observables(self) -> tuple[Observable, ...]:
        return (replace(LOGPROBS, weights_gradients=True), TOKEN_COUNT, replace(LOSS, sum_of=terms_of("loss")))

    def annotate(self, batches: list[Batch]) -> list[Batch]:
        return batches


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MultiToken:
    """Configures supervised fine-tuning with multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Module k predicts the token that is k further ahead than the next one, from the embedding of the token k ahead and
    the hidden state of the module before (equations 21 to 23). It shares the embedding and the head of the model. All
    tokens that it reads and predicts are of one document. The loss is that of ``sft`` plus mtp_loss_scaling_factor /
    mtp_num_layers times the sum over k of the mean -log p of module k (equations 24 and 25). That mean is over the
    target tokens that have a prediction at depth k, of the whole optimizer step; the paper divides by all tokens.

    kind: the name of the objective. Options have the names of Megatron-LM.
    mtp_num_layers: the number of modules, which is that of the model's folder (num_nextn_predict_layers).
    mtp_loss_scaling_factor: the weight of their mean loss; 0.3 and then 0.1 in the paper's pre-training.
    """

    kind: Literal["mtp"] = "mtp"
    mtp_num_layers: Annotated[int, Field(strict=True, ge=1, le=8)] = 1
    mtp_loss_scaling_factor: PositiveWeight = 0.1

    reads: ClassVar[Reads] = "samples"
    disable_dropout: ClassVar[bool] = True
    roles: ClassVar[tuple[Role, ...]] = (MULTI_TOKEN,)

    @property
    def depths(self) -> range:
        return range(1, self.mtp_num_layers + 1)

    def observables(self) -> tuple[Observable, ...]:
        predictions = (
            replace(rows(mtp_logprob(k), "multi-token log-probs"), required=False, effect_at="loss")
            for k in self.depths
        )
        counts = (replace(TOKEN_COUNT, key=mtp_count(k), required=False, effect_at="loss") for k in self.depths)
        return (LOGPROBS, *predictions, TOKEN_COUNT, *counts, replace(LOSS, made_of="logprob"))

    def annotate(self, batches: list[Batch]) -> list[Batch]:
        return batches


def mtp_logprob(depth: int) -> str:
    """Returns the key of log p of each target by the module at ``depth``; 0 for targets that it does not predict."""
    return f"mtp_{depth}_logprob"


def mtp_count(depth: int) -> str:
    """Returns the key of the number of targets that the module at ``depth`` predicts."""
    return f"mtp_{depth}_token_count"


def _weighted(batch: Batch, weight: float) -> Batch:
    """Adds the column ``weight``: ``weight`` for the first document that has targets, 1 for all others."""
    heavy = next((number for number, document in enumerate(batch.documents) if any(document.targets)), -1)
    numbers = itertools.count()
    rows = []
    for row in batch.rows:
        documents = [
            replace(d, columns={**d.columns, "weight": weight if next(numbers) == heavy else 1.0})
            for d in row.documents
        ]
        rows.append(replace(row, documents=tuple(documents)))
    return replace(batch, rows=tuple(rows))


SUPERVISED = {"sft": Sft, "dft": Dft, "distillation": Distillation, "mtp": MultiToken}
PREFERENCES = {"dpo": Dpo, "reward": RewardModel, "kto": Kto, "prm": ProcessRewardModel}
