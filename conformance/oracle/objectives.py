"""Computes the losses of objectives on given documents, and maps each kind of objective to its functions.

They are written from the papers that conformance.spec names, independently of impl/objectives. Objectives on rollouts
are in policy_gradient.py. A function of pairs sees one answer at a time. The score of the pair's other answer has been
computed before, in a pass over the whole step without gradients. The gradient of a pair's loss is the sum of its
gradients with respect to both scores. The divergence of a student from its teacher is arXiv 2306.13649, equation 1.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from conformance.core.errors import UsageError
from conformance.oracle.loss_terms import (
    Earlier,
    OracleFunctions,
    RolloutFunctions,
    Term,
    Totals,
    target_logprobs,
    target_positions,
    to_nearest,
)
from conformance.oracle.policy_gradient import GrpoFunctions, PpoFunctions, ResponseFunctions
from conformance.oracle.primitives import HONEST, Variant
from conformance.spec.batch import Batch, Document
from conformance.spec.objectives import Objective, known_kinds
from conformance.spec.observables import POLICY, REFERENCE, REWARD, terms_of
from conformance.spec.offline import (
    LABEL,
    MARGIN,
    PAIR,
    SIDE,
    TEACHER,
    TOP_K,
    Distillation,
    Dpo,
    Kto,
    ProcessRewardModel,
    RewardModel,
    mtp_count,
    mtp_logprob,
)
from conformance.spec.offline import MultiToken as MultiTokenObjective


class Sft:
    """Computes the document's weight times -log p of its target tokens, divided by the step's number of targets."""

    def __init__(self, objective: Any) -> None:
        pass

    def totals(self, batch: Batch) -> dict[str, float]:
        return {"token_count": batch.target_count}

    def term(
        self, model: str, output: Tensor, document: Document, *, totals: Totals, earlier: Earlier, stable: torch.dtype
    ) -> Term:
        logprobs = target_logprobs(output, document, stable=stable)
        loss = -logprobs.sum() / totals["token_count"]
        weight = cast(float, document.columns.get("weight", 1.0))
        return Term(loss=weight * loss, values={"loss": loss.item()}, rows={"logprob": logprobs})


class Dft(Sft):
    """Computes -p log p of target tokens, with a constant p, over the step's targets (arXiv 2508.05629, equation 9)."""

    def term(
        self, model: str, output: Tensor, document: Document, *, totals: Totals, earlier: Earlier, stable: torch.dtype
    ) -> Term:
        logprobs = target_logprobs(output, document, stable=stable)
        with torch.no_grad():
            probabilities = logprobs.exp()
        losses = -probabilities * logprobs / totals["token_count"]
        loss = losses.sum()
        return Term(loss=loss, values={"loss": loss.item()}, rows={"logprob": logprobs, terms_of("loss"): losses})


class MultiToken:
    """Computes SFT's loss and that of each module for multi-token prediction (arXiv 2412.19437, eq. 24 and 25)."""

    def __init__(self, objective: MultiTokenObjective) -> None:
        self.objective = objective

    def totals(self, batch: Batch) -> dict[str, float]:
        places = torch.cat([target_positions(document) for document in batch.documents])
        # Module k predicts a token from the one that is 1 + k before it.
        counts = {mtp_count(k): int((places >= 1 + k).sum()) for k in self.objective.depths}
        if empty := [key for key, count in counts.items() if not count]:
            raise ValueError(f"step {batch.step} has no target for {empty[0]}; use longer documents, or fewer modules")
        return {"token_count": len(places), **counts}

    def term(
        self, model: str, output: Tensor, document: Document, *, totals: Totals, earlier: Earlier, stable: torch.dtype
    ) -> Term:
        logprobs = target_logprobs(output[0], document, stable=stable)
        rows, loss = {"logprob": logprobs}, -logprobs.sum() / totals["token_count"]
        places, tokens = target_positions(document), torch.tensor(document.tokens)
        for k in self.objective.depths:
            known = places >= 1 + k
            distributions_NV = torch.log_softmax(output[k, places[known] - 1 - k].to(stable), dim=-1)
            found = distributions_NV.gather(1, tokens[places[known], None])[:, 0]
            rows[mtp_logprob(k)] = torch.zeros_like(logprobs).masked_scatter(known, found)
            mean = -found.sum() / totals[mtp_count(k)]
            loss = loss + self.objective.mtp_loss_scaling_factor / self.objective.mtp_num_layers * mean
        return Term(loss=loss, values={"loss": loss.item()}, rows=rows)


TIE = 1e-12  # logits that are no farther apart are equal, because float64 decides which is larger by rounding


class PreferenceFunctions:
    """Computes DPO (arXiv 2305.18290) and its relatives. Implements conformance.oracle.loss_terms.PairedFunctions."""

    def __init__(self, objective: Dpo) -> None:
        self.objective = objective
        self._scores: dict[tuple[float, float], Tensor] = {}

    def totals(self, batch: Batch) -> dict[str, float]:
        trained = [document for document in batch.documents if any(document.targets)]
        chosen = [document for document in trained if document.columns[SIDE] == 1]
        assert 2 * len(chosen) == len(trained), "each pair has a chosen and a rejected answer"
        tokens = sum(sum(document.targets) for document in chosen)
        return {"token_count": batch.target_count, "pair_count": len(chosen), "chosen_count": tokens}

    def see(self, document: Document, outputs: Mapping[str, Tensor], *, stable: torch.dtype) -> None:
        self._scores[_place(document)] = self._score(document, outputs, stable=stable)[0].detach()

    def term(
        self, model: str, output: Tensor, document: Document, *, totals: Totals, earlier: Earlier, stable: torch.dtype
    ) -> Term:
        if model == REFERENCE.name:
            return Term(loss=None, rows={"reference.logprob": target_logprobs(output, document, stable=stable)})
        pair, side = _place(document)
        score, logprobs = self._score(document, {**earlier, POLICY.name: output}, stable=stable)
        margin = side * (score - self._scores[pair, -side]) - self.objective.target_margin
        of_pair = self._loss(margin) / totals["pair_count"]
        rows, clips = {"logprob": logprobs, "margin": margin.expand_as(logprobs)}, {}
        if self.objective.loss_type == "hinge":
            clips["margin"] = to_nearest(rows["margin"], (1 / self.objective.beta, True))
        if side < 0:
            return Term(loss=of_pair, rows=rows, clips=clips)
        likelihood = -logprobs / totals["chosen_count"]
        loss = of_pair + self.objective.sft_coef * likelihood.sum()
        values = {"loss": loss.item()}
        if self.objective.sft_coef:
            values["nll_loss"] = likelihood.sum().item()
        return Term(loss=loss, values=values, rows={**rows, terms_of("loss"): loss[None]}, clips=clips)

    def _score(
        self, document: Document, outputs: Mapping[str, Tensor], *, stable: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Returns the score of an answer, a scalar, and the policy's log-probs of its tokens, (targets,)."""
        found = {name: target_logprobs(output, document, stable=stable) for name, output in outputs.items()}
        logprobs = found[POLICY.name]
        ratios = logprobs if self.objective.reference_free else logprobs - found[REFERENCE.name]
        score = ratios.mean() if self.objective.length_normalised else ratios.sum()
        if self.objective.loss_type == "odds_ratio":
            score = score - torch.log1p(-score.exp())  # log(p / (1 - p))
        return score, logprobs

    def _loss(self, margin: Tensor) -> Tensor:
        beta, wrong = self.objective.beta, self.objective.label_smoothing
        match self.objective.loss_type:
            case "sigmoid":
                return (1 - wrong) * _surprise(beta * margin) + wrong * _surprise(-beta * margin)
            case "robust":
                right, reversed_ = _surprise(beta * margin), _surprise(-beta * margin)
                return ((1 - wrong) * right - wrong * reversed_) / (1 - 2 * wrong)
            case "hinge":
                return (1 - beta * margin).clamp(min=0)
            case "ipo":
                return (margin - 1 / (2 * beta)) ** 2
            case "odds_ratio":
                return beta * _surprise(margin)


class RewardFunctions:
    """Computes the loss of a reward model (arXiv 2203.02155). Implements PairedFunctions and ScoringFunctions."""

    def __init__(self, objective: RewardModel) -> None:
        self.objective = objective
        self._scores: dict[tuple[float, float], Tensor] = {}

    def value_positions(self, document: Document) -> Tensor:
        return torch.tensor([len(document.tokens) - 1])

    def totals(self, batch: Batch) -> dict[str, float]:
        chosen = [document for document in batch.documents if document.columns[SIDE] == 1]
        return {"token_count": batch.target_count, "pair_count": len(chosen)}

    def see(self, document: Document, outputs: Mapping[str, Tensor], *, stable: torch.dtype) -> None:
        self._scores[_place(document)] = outputs[REWARD.name][-1, 0].to(stable)

    def term(
        self, model: str, output: Tensor, document: Document, *, totals: Totals, earlier: Earlier, stable: torch.dtype
    ) -> Term:
        pair, side = _place(document)
        score, other = output[-1, 0].to(stable), self._scores[pair, -side]
        margin = side * (score - other) - cast(float, document.columns.get(MARGIN, 0.0))
        loss = (_surprise(margin) + self.objective.center_coef * (score + other) ** 2) / totals["pair_count"]
        rows = {"score": score.expand(sum(document.targets))}
        if side < 0:
            return Term(loss=loss, rows=rows)
        return Term(loss=loss, values={"loss": loss.item()}, rows={**rows, terms_of("loss"): loss[None]})


class KtoFunctions:
    """Computes KTO (arXiv 2402.01306, equation 8). Implements conformance.oracle.loss_terms.PairedFunctions."""

    def __init__(self, objective: Kto) -> None:
        self.objective = objective
        self._mismatched: list[Tensor] = []

    def totals(self, batch: Batch) -> dict[str, float]:
        answers = sum(document.columns[SIDE] == 1 for document in batch.documents)
        return {"token_count": batch.target_count, "answer_count": answers}

    def see(self, document: Document, outputs: Mapping[str, Tensor], *, stable: torch.dtype) -> None:
        if document.columns[SIDE] == -1:
            frozen, own = (target_logprobs(outputs[m.name], document, stable=stable) for m in (REFERENCE, POLICY))
            self._mismatched.append((own - frozen).sum())

    def term(
        self, model: str, output: Tensor, document: Document, *, totals: Totals, earlier: Earlier, stable: torch.dtype
    ) -> Term:
        logprobs = target_logprobs(output, document, stable=stable)
        if model == REFERENCE.name:
            return Term(loss=None, rows={"reference.logprob": logprobs})
        ratio = (logprobs - target_logprobs(earlier[REFERENCE.name], document, stable=stable)).sum()
        count = totals["answer_count"]
        if document.columns[SIDE] == -1:
            share = (ratio / count).detach()
            rows = {"logprob": logprobs, "margin": ratio.expand_as(logprobs), terms_of("kl"): share[None]}
            return Term(loss=0 * ratio, values={"kl": share.item(), "kl_scale": share.abs().item()}, rows=rows)
        o, above = self.objective, ratio - torch.stack(self._mismatched).mean().clamp(min=0)
        if document.columns[LABEL] == 1:
            loss = o.desirable_weight * (1 - torch.sigmoid(o.beta * above)) / count
        else:
            loss = o.undesirable_weight * (1 - torch.sigmoid(-o.beta * above)) / count
        rows = {"logprob": logprobs, "margin": above.expand_as(logprobs), terms_of("loss"): loss[None]}
        return Term(loss=loss, values={"loss": loss.item()}, rows=rows)


class StepFunctions:
    """Computes the loss of rewards of steps (arXiv 2312.08935, equation 3). Implements ScoringFunctions."""

    def __init__(self, objective: ProcessRewardModel) -> None:
        pass

    def value_positions(self, document: Document) -> Tensor:
        return target_positions(document)

    def totals(self, batch: Batch) -> dict[str, float]:
        return {"token_count": batch.target_count}

    def term(
        self, model: str, output: Tensor, document: Document, *, totals: Totals, earlier: Earlier, stable: torch.dtype
    ) -> Term:
        ends = target_positions(document)
        scores, labels = output[ends, 0].to(stable), torch.tensor(document.columns[LABEL], dtype=stable)[ends]
        losses = (labels * _surprise(scores) + (1 - labels) * _surprise(-scores)) / totals["token_count"]
        rows = {"score": scores, terms_of("loss"): losses}
        return Term(loss=losses.sum(), values={"loss": losses.sum().item()}, rows=rows)


def _surprise(logit: Tensor) -> Tensor:
    """Returns -log sigmoid(logit) = log(1 + exp(-logit))."""
    return torch.logaddexp(torch.zeros_like(logit), -logit)


def _place(document: Document) -> tuple[float, float]:
    return cast(float, document.columns[PAIR]), cast(float, document.columns[SIDE])


class DistillationFunctions:
    """Computes the divergence at each target of a document, from the logits of both models."""

    def __init__(self, objective: Distillation) -> None:
        self.objective = objective

    def totals(self, batch: Batch) -> dict[str, float]:
        return {"token_count": batch.target_count}

    def term(
        self, model: str, output: Tensor, document: Document, *, totals: Totals, earlier: Earlier, stable: torch.dtype
    ) -> Term:
        logprobs = target_logprobs(output, document, stable=stable, temperature=self.objective.temperature)
        if model == TEACHER.name:
            return Term(loss=None, rows={"teacher.logprob": logprobs})
        before = target_positions(document) - 1
        student_NV, teacher_NV = (logits[before].to(stable) for logits in (output, earlier[TEACHER.name]))
        k, clips = self.objective.top_k, {}
        if k is None or k >= teacher_NV.shape[1]:
            divergence = self._divergence(student_NV, teacher_NV, None)
        else:
            largest, tokens = teacher_NV.sort(dim=-1, descending=True, stable=True)  # equal ones by their place
            gap = (largest[:, k - 1] - largest[:, k]) / self.objective.temperature
            if stable == torch.float64 and (gap < TIE).any():
                raise UsageError(
                    f"the teacher's logits {k} and {k + 1} of a token, by size, are equal; use another top_k"
                )
            divergence = self._divergence(student_NV, teacher_NV, tokens[:, :k])
            other = self._divergence(student_NV, teacher_NV, tokens[:, [*range(k - 1), k]])
            clips = {TOP_K: gap, "divergence": (divergence - other).detach() / 2}
        loss = divergence.sum() / totals["token_count"]
        rows = {"logprob": logprobs, "divergence": divergence}
        return Term(loss=loss, values={"loss": loss.item()}, rows=rows, clips=clips)

    def _divergence(self, student: Tensor, teacher: Tensor, tokens: Tensor | None) -> Tensor:
        """Returns the divergence of each distribution, (N,), from logits (N, V). ``tokens``: those of the sum, (N, k);
        None: all."""
        o = self.objective
        logits = torch.stack([student, teacher]) / o.temperature
        log_q: Tensor
        log_p: Tensor
        if tokens is None:
            log_q, log_p = torch.log_softmax(logits, dim=-1)
        else:
            chosen = tokens.expand(2, -1, -1)
            if o.renormalise_top_k:
                log_q, log_p = torch.log_softmax(logits.gather(-1, chosen), dim=-1)
            else:
                log_q, log_p = torch.log_softmax(logits, dim=-1).gather(-1, chosen)
        p, q = log_p.exp(), log_q.exp()
        if o.beta == 0:
            return (p * (log_p - log_q)).sum(-1)
        if o.beta == 1:
            return (q * (log_q - log_p)).sum(-1)
        log_m = (o.beta * p + (1 - o.beta) * q).log()
        return (o.beta * p * (log_p - log_m) + (1 - o.beta) * q * (log_q - log_m)).sum(-1)


def functions_of(objective: Objective, variant: Variant = HONEST) -> OracleFunctions:
    """Returns the functions of a scenario's objective.

    Raises UsageError for a kind that is not in FUNCTIONS.
    """
    known_kinds(FUNCTIONS, objective, who="the oracle (conformance/oracle/objectives.py)")
    functions = FUNCTIONS[objective.kind](objective)
    if isinstance(functions, ResponseFunctions):
        functions.variant = variant
    return functions


def rollout_functions_of(objective: Objective, variant: Variant = HONEST) -> RolloutFunctions:
    """Returns the functions of an objective that reads rollouts."""
    return cast(RolloutFunctions, functions_of(objective, variant))


FUNCTIONS: dict[str, Callable[[Any], OracleFunctions]] = {
    "sft": Sft,
    "dft": Dft,
    "grpo": GrpoFunctions,
    "ppo": PpoFunctions,
    "dpo": PreferenceFunctions,
    "reward": RewardFunctions,
    "kto": KtoFunctions,
    "prm": StepFunctions,
    "distillation": DistillationFunctions,
    "mtp": MultiToken,
}
