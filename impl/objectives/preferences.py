"""Computes the losses of preference pairs for micro-batches, which hold whole pairs; all reference backends share them.

The oracle's functions were written independently (conformance/oracle/preferences.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from conformance.spec.batch import Batch, Row
from conformance.spec.observables import REFERENCE
from conformance.spec.preferences import PAIR, SIDE, Dpo
from impl.interface.micro_batches import Evaluation, MicroBatch, Outputs, Wanted


@dataclass(frozen=True)
class PreferenceFunctions:
    """Implements impl.objectives.policy_gradient.ObjectiveFunctions for conformance.spec.preferences.Dpo."""

    objective: Dpo
    temperature = 1.0

    def wants(self, model: str) -> Wanted:
        return frozenset({"logprobs"} if model == REFERENCE.name else {"logprobs", "targets"})

    def totals(self, rows: Sequence[Row]) -> dict[str, float]:
        trained = [document for row in rows for document in row.documents if any(document.targets)]
        chosen = [document for document in trained if document.columns[SIDE] == 1]
        pairs = {document.columns[PAIR] for document in chosen}
        assert {d.columns[PAIR] for d in trained if d.columns[SIDE] == -1} == pairs, "ranks hold whole pairs"
        tokens = [sum(sum(document.targets) for document in some) for some in (trained, chosen)]
        return {"token_count": tokens[0], "pair_count": len(chosen), "chosen_count": tokens[1]}

    def summary(self, batch: Batch) -> dict[str, float]:
        return {}

    def evaluate(
        self,
        model: str,
        outputs: Outputs,
        inputs: MicroBatch,
        *,
        totals: Mapping[str, Tensor],
        others: Mapping[str, Outputs],
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
    answers = 2 * inputs.columns[PAIR].long() + (inputs.columns[SIDE] < 0)
    count = 2 * (int(answers.max()) // 2 + 1)
    of_answers, mask = answers.flatten(), inputs.targets
    scores = ratios.new_zeros(count).index_add(0, of_answers, ratios.where(mask, 0).flatten())
    lengths = ratios.new_zeros(count).index_add(0, of_answers, mask.to(ratios.dtype).flatten())
    if objective.length_normalised:
        scores = scores / lengths.clamp(min=1)
    if objective.loss_type == "odds_ratio":
        scores = scores.where(lengths > 0, -1)  # log(1 - p) has no gradient at p = 1
        scores = scores - (-scores.expm1()).log()
    chosen, rejected = scores.view(-1, 2).unbind(1)
    return chosen - rejected - objective.target_margin, lengths.view(-1, 2).amin(1) > 0


def pair_losses(margins: Tensor, objective: Dpo) -> Tensor:
    """Returns the loss of each pair; any shape. conformance.spec.preferences.Dpo has the formulas."""
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
