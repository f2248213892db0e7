"""Computes the divergence of a student from its teacher, written from arXiv 2306.13649, equation 1."""

import torch
from torch import Tensor

from conformance.oracle.loss_terms import Earlier, Term, Totals, target_logprobs, target_positions
from conformance.spec.batch import Batch, Document
from conformance.spec.supervised import TEACHER, Distillation


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
        divergence = self._divergence(student_NV, teacher_NV)
        loss = divergence.sum() / totals["token_count"]
        rows = {"logprob": logprobs, "divergence": divergence}
        return Term(loss=loss, values={"loss": loss.item()}, rows=rows)

    def _divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Returns the divergence of each distribution, (N,), from logits (N, V)."""
        o = self.objective
        logits = torch.stack([student, teacher]) / o.temperature
        log_q: Tensor
        log_p: Tensor
        if o.top_k is None:
            log_q, log_p = torch.log_softmax(logits, dim=-1)
        else:
            chosen = teacher.topk(min(o.top_k, teacher.shape[1]), dim=-1).indices.expand(2, -1, -1)
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
