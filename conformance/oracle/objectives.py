"""Computes the losses of SFT, DFT and multi-token prediction, and maps each kind of objective to its functions.

They are written from the papers, independently of impl/objectives.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from conformance.oracle.loss_terms import (
    Earlier,
    OracleFunctions,
    RolloutFunctions,
    Term,
    Totals,
    target_logprobs,
    target_positions,
)
from conformance.oracle.policy_gradient import GrpoFunctions, PpoFunctions, ResponseFunctions
from conformance.oracle.preferences import FUNCTIONS as PREFERENCES
from conformance.oracle.preferences import DistillationFunctions
from conformance.oracle.primitives import HONEST, Variant
from conformance.spec.batch import Batch, Document
from conformance.spec.objectives import Objective, known_kinds
from conformance.spec.observables import terms_of
from conformance.spec.offline import MultiToken as MultiTokenObjective
from conformance.spec.offline import mtp_count, mtp_logprob

__all__ = ["FUNCTIONS", "Term", "functions_of", "rollout_functions_of", "target_logprobs", "target_positions"]


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
    **PREFERENCES,
    "distillation": DistillationFunctions,
    "mtp": MultiToken,
}
