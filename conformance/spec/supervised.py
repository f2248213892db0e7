"""Configures objectives that read samples of texts: fine-tuning, multi-token prediction and distillation."""

import itertools
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from conformance.core.errors import STRICT
from conformance.spec.batch import Batch
from conformance.spec.observables import (
    LOGPROBS,
    LOSS,
    MULTI_TOKEN,
    POLICY,
    TOKEN_COUNT,
    Observable,
    Reads,
    Role,
    rows,
    terms_of,
)

Weight = Annotated[float, Field(strict=True, gt=0, le=1e12)]
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
    top_k: the divergence sums over the tokens that are most likely for the teacher; None: over the whole vocabulary.
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
    document_weights: tuple[Weight, ...] = ()
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
    mtp_loss_scaling_factor: Weight = 0.1

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
