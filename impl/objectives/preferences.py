"""Computes the losses of preferences, answers and steps for micro-batches; all reference backends share them.

A micro-batch holds whole pairs.

The oracle's functions were written independently (conformance/oracle/objectives.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, pad

from conformance.spec.batch import Batch, Column, Document, Row
from conformance.spec.observables import REFERENCE
from conformance.spec.offline import LABEL, MARGIN, PAIR, SIDE, Dpo, Kto, ProcessRewardModel, RewardModel
from impl.interface.micro_batches import Evaluation, MicroBatch, Others, Outputs, Totals, Wanted


@dataclass(frozen=True)
class Functions:
    """Implements what most objectives share of impl.objectives.policy_gradient.ObjectiveFunctions: the log-probs of a
    policy, perhaps of a reference, and a mean over target tokens."""

    objective: Any

    @property
    def temperature(self) -> float:
        return 1.0

    def wants(self, model: str) -> Wanted:
        return frozenset({"logprobs"} if model == REFERENCE.name else {"logprobs", "targets"})

    def totals(self, rows: Sequence[Row]) -> dict[str, float]:
        return {"token_count": sum(row.target_count for row in rows)}

    def summary(self, batch: Batch) -> dict[str, float]:
        return {}


def chosen_answers(rows: Sequence[Row]) -> list[Document]:
    """Returns the chosen, or matched, answer of each pair; rows without whole pairs are an error."""
    sides: dict[Column, list[Document]] = {1: [], -1: []}
    for document in (document for row in rows for document in row.documents):
        sides[document.columns[SIDE]].append(document)
    chosen, rejected = ({document.columns[PAIR] for document in side} for side in sides.values())
    assert chosen == rejected, "ranks hold whole pairs"
    return sides[1]


@dataclass(frozen=True)
class PreferenceFunctions(Functions):
    """Implements impl.objectives.policy_gradient.ObjectiveFunctions for conformance.spec.offline.Dpo."""

    objective: Dpo

    def totals(self, rows: Sequence[Row]) -> dict[str, float]:
        chosen = chosen_answers(rows)
        tokens = sum(sum(document.targets) for document in chosen)
        return {**super().totals(rows), "pair_count": len(chosen), "chosen_count": tokens}

    def evaluate(
        self, model: str, outputs: Outputs, inputs: MicroBatch, *, totals: Totals, others: Others
    ) -> Evaluation:
        assert outputs.logprobs is not None
        if model == REFERENCE.name:
            return Evaluation(loss=None, rows={"reference.logprob": outputs.logprobs})
        assert outputs.targets is not None
        ratios = outputs.logprobs
        if not self.objective.reference_free:
            known = others[REFERENCE.name].logprobs
            assert known is not None
            ratios = ratios - known
        margins, present = pair_margins(ratios, inputs, self.objective)
        losses = pair_losses(margins, self.objective).where(present, 0)
        is_chosen = inputs.targets & (inputs.columns[SIDE] > 0)
        likelihood = -outputs.logprobs.where(is_chosen, 0).sum() / totals["chosen_count"]
        loss = losses.sum() / totals["pair_count"] + self.objective.sft_coef * likelihood
        values = {"loss": loss, "token_count": outputs.targets.sum()}
        if self.objective.sft_coef:
            values["nll_loss"] = likelihood
        rows = {"logprob": outputs.logprobs, "margin": margins[inputs.columns[PAIR].long()]}
        return Evaluation(loss=loss, values=values, rows=rows)


def pair_margins(ratios: Tensor, inputs: MicroBatch, objective: Dpo) -> tuple[Tensor, Tensor]:
    """Returns the margin of each pair of the step, (pairs,), and whether this micro-batch holds it, bool (pairs,).

    ``ratios``: (rows, length), log p - reference log p of each target. Pairs after the last one here are left out.
    """
    scores, lengths = answer_sums(ratios, inputs)
    if objective.length_normalised:
        scores = scores / lengths.clamp(min=1)
    if objective.loss_type == "odds_ratio":
        scores = scores.where(lengths > 0, -1)  # log(1 - p) has no gradient at p = 1
        scores = scores - (-scores.expm1()).log()
    chosen, rejected = scores.view(-1, 2).unbind(1)
    return chosen - rejected - objective.target_margin, lengths.view(-1, 2).amin(1) > 0


def answer_sums(numbers: Tensor, inputs: MicroBatch) -> tuple[Tensor, Tensor]:
    """Returns the sum of ``numbers`` (rows, length) over the targets of each answer, and their count, (2 x pairs,).

    The answers of pair n are 2 n and 2 n + 1. Pairs after the last one here are left out.
    """
    answers, mask = answer_numbers(inputs), inputs.targets
    empty = numbers.new_zeros(2 * (int(answers.max()) // 2 + 1))
    sums = empty.index_add(0, answers.flatten(), numbers.where(mask, 0).flatten())
    return sums, empty.index_add(0, answers.flatten(), mask.to(numbers.dtype).flatten())


def answer_numbers(inputs: MicroBatch) -> Tensor:
    """Returns the number of the answer that each label belongs to, int64 (rows, length)."""
    return 2 * inputs.columns[PAIR].long() + (inputs.columns[SIDE] < 0)


def pair_losses(margins: Tensor, objective: Dpo) -> Tensor:
    """Returns the loss of each pair; any shape. conformance.spec.offline.Dpo has the formulas."""
    scaled, smoothing = objective.beta * margins, objective.label_smoothing
    if objective.loss_type == "hinge":
        return torch.relu(1 - scaled)
    if objective.loss_type == "ipo":
        return (margins - 0.5 / objective.beta).square()
    if objective.loss_type == "odds_ratio":
        return -objective.beta * logsigmoid(margins)
    right, wrong = -logsigmoid(scaled), -logsigmoid(-scaled)
    if objective.loss_type == "robust":
        return (right * (1 - smoothing) - wrong * smoothing) / (1 - 2 * smoothing)
    return right * (1 - smoothing) + wrong * smoothing


@dataclass(frozen=True)
class RewardFunctions(Functions):
    """Implements impl.objectives.policy_gradient.ObjectiveFunctions for conformance.spec.offline.RewardModel."""

    objective: RewardModel

    def wants(self, model: str) -> Wanted:
        return frozenset({"values"})

    def totals(self, rows: Sequence[Row]) -> dict[str, float]:
        return {**super().totals(rows), "pair_count": len(chosen_answers(rows))}

    def evaluate(
        self, model: str, outputs: Outputs, inputs: MicroBatch, *, totals: Totals, others: Others
    ) -> Evaluation:
        assert outputs.values is not None
        scores, targets = answer_scores(outputs.values, inputs)
        losses = reward_losses(scores, pair_targets(inputs), self.objective)
        loss = losses.where(targets, 0).sum() / totals["pair_count"]
        return Evaluation(loss=loss, values={"loss": loss}, rows={"score": scores.flatten()[answer_numbers(inputs)]})


def answer_ends(inputs: MicroBatch) -> Tensor:
    """Returns bool (rows, length): True at the last token of each document."""
    following = pad(inputs.positions[:, 1:], (0, 1))
    return inputs.real & (following == 0)


def answer_scores(values: Tensor, inputs: MicroBatch) -> tuple[Tensor, Tensor]:
    """Returns the scores of each pair of the step, chosen and rejected, (pairs, 2); whether it is here, bool (pairs,).

    ``values``: (rows, length), the number of the value head at each token. The score is that at the last token.
    """
    ends = answer_ends(inputs)
    answers = answer_numbers(inputs).roll(1, dims=1)[ends]  # columns end one token before their document
    empty = values.new_zeros(2 * (int(answers.max()) // 2 + 1))
    scores, counts = (empty.index_add(0, answers, of) for of in (values[ends], torch.ones_like(values[ends])))
    return scores.view(-1, 2), counts.view(-1, 2).amin(1) > 0


def pair_targets(inputs: MicroBatch) -> Tensor:
    """Returns the margin that the data ask of each pair of the step, (pairs,); 0 without such a column."""
    if MARGIN not in inputs.columns:
        return inputs.columns[PAIR].new_zeros(())
    sums, lengths = answer_sums(inputs.columns[MARGIN], inputs)
    return (sums / lengths.clamp(min=1))[::2]


def reward_losses(scores: Tensor, margins: Tensor, objective: RewardModel) -> Tensor:
    """Returns the loss of each pair, (pairs,), from the scores of both answers, (pairs, 2)."""
    chosen, rejected = scores.unbind(1)
    return -logsigmoid(chosen - rejected - margins) + objective.center_coef * (chosen + rejected).square()


@dataclass(frozen=True)
class StepFunctions(Functions):
    """Implements impl.objectives.policy_gradient.ObjectiveFunctions for
    conformance.spec.offline.ProcessRewardModel.
    """

    objective: ProcessRewardModel

    def wants(self, model: str) -> Wanted:
        return frozenset({"values"})

    def evaluate(
        self, model: str, outputs: Outputs, inputs: MicroBatch, *, totals: Totals, others: Others
    ) -> Evaluation:
        assert outputs.values is not None
        scores = step_scores(outputs.values)
        losses = step_losses(scores, inputs.columns[LABEL])
        loss = losses.where(inputs.targets, 0).sum() / totals["token_count"]
        return Evaluation(loss=loss, values={"loss": loss}, rows={"score": scores})


def step_scores(values: Tensor) -> Tensor:
    """Returns at each label, which is the last token of a step, the number that the value head gives there."""
    return values.roll(-1, dims=1)


def step_losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Returns the loss of each step, any shape. conformance.spec.offline.ProcessRewardModel has the formula."""
    return binary_cross_entropy_with_logits(scores, labels.to(scores.dtype), reduction="none")


@dataclass(frozen=True)
class KtoFunctions(Functions):
    """Implements impl.objectives.policy_gradient.ObjectiveFunctions and impl.engine.trainer.AheadFunctions for
    conformance.spec.offline.Kto.
    """

    objective: Kto

    def totals(self, rows: Sequence[Row]) -> dict[str, float]:
        return {**super().totals(rows), "answer_count": len(chosen_answers(rows))}

    def ahead(self, outputs: Outputs, inputs: MicroBatch, *, totals: Totals, others: Others) -> dict[str, Tensor]:
        """Returns this micro-batch's part of the mean log-ratio of mismatched answers."""
        return {"kl": mismatched_ratios(log_ratios(outputs, others), inputs).sum() / totals["answer_count"]}

    def evaluate(
        self, model: str, outputs: Outputs, inputs: MicroBatch, *, totals: Totals, others: Others
    ) -> Evaluation:
        assert outputs.logprobs is not None
        if model == REFERENCE.name:
            return Evaluation(loss=None, rows={"reference.logprob": outputs.logprobs})
        assert outputs.targets is not None
        ratios = log_ratios(outputs, others)
        margins = answer_sums(ratios, inputs)[0].view(-1, 2) - torch.stack([kl_of(totals), totals["kl"].new_zeros(())])
        labels, counts = (sums.view(-1, 2)[:, 0] for sums in answer_sums(inputs.columns[LABEL], inputs))
        losses = answer_losses(margins[:, 0], labels > 0, self.objective).where(counts > 0, 0)
        loss = losses.sum() / totals["answer_count"]
        rows = {"logprob": outputs.logprobs, "margin": margins.flatten()[answer_numbers(inputs)]}
        return Evaluation(loss=loss, values={"loss": loss, "token_count": outputs.targets.sum()}, rows=rows)


def log_ratios(outputs: Outputs, others: Others) -> Tensor:
    """Returns log p - reference log p of each target, (rows, length)."""
    known = others[REFERENCE.name].logprobs
    assert known is not None
    assert outputs.logprobs is not None
    return outputs.logprobs - known


def mismatched_ratios(ratios: Tensor, inputs: MicroBatch) -> Tensor:
    """Returns the log-ratio of each mismatched answer of the step, (pairs,); 0 if it is not here."""
    return answer_sums(ratios, inputs)[0][1::2]


def kl_of(totals: Totals) -> Tensor:
    """Returns the estimate of the KL to the reference, a scalar that is not below 0."""
    return totals["kl"].clamp(min=0)


def answer_losses(margins: Tensor, desired: Tensor, objective: Kto) -> Tensor:
    """Returns the loss of each answer, any shape. conformance.spec.offline.Kto has the formula."""
    scaled = objective.beta * margins
    liked, disliked = 1 - torch.sigmoid(scaled), torch.sigmoid(scaled)
    return torch.where(desired, objective.desirable_weight * liked, objective.undesirable_weight * disliked)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {  # ObjectiveFunctions of the module that imports this one
    "dpo": PreferenceFunctions,
    "reward": RewardFunctions,
    "kto": KtoFunctions,
    "prm": StepFunctions,
}
