"""Computes the SFT loss and maps each kind of objective to its functions.

They are written from the papers, independently of impl/objectives.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from conformance.oracle.distillation import DistillationFunctions
from conformance.oracle.loss_terms import OracleFunctions, RolloutFunctions, Term, target_logprobs, target_positions
from conformance.oracle.policy_gradient import GrpoFunctions, PpoFunctions, ResponseFunctions
from conformance.oracle.preferences import KtoFunctions, PreferenceFunctions, RewardFunctions, StepFunctions
from conformance.oracle.primitives import HONEST, Variant
from conformance.spec.batch import Batch, Document
from conformance.spec.objectives import Objective, known_kinds

__all__ = ["FUNCTIONS", "Term", "functions_of", "rollout_functions_of", "target_logprobs", "target_positions"]


class Sft:
    """Computes the document's weight times -log p of its target tokens, divided by the step's number of targets."""

    def __init__(self, objective: Any) -> None:
        pass

    def totals(self, batch: Batch) -> dict[str, float]:
        return {"token_count": batch.target_count}

    def term(
        self,
        model: str,
        output: Tensor,
        document: Document,
        *,
        totals: Mapping[str, float],
        earlier: Mapping[str, Tensor],
        stable: torch.dtype,
    ) -> Term:
        logprobs = target_logprobs(output, document, stable=stable)
        loss = -logprobs.sum() / totals["token_count"]
        weight = cast(float, document.columns.get("weight", 1.0))
        return Term(loss=weight * loss, values={"loss": loss.item()}, rows={"logprob": logprobs})


def functions_of(objective: Objective, variant: Variant = HONEST) -> OracleFunctions:
    """Returns the functions of a scenario's objective. Raises UsageError for a kind that is not in FUNCTIONS."""
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
    "grpo": GrpoFunctions,
    "ppo": PpoFunctions,
    "dpo": PreferenceFunctions,
    "reward": RewardFunctions,
    "kto": KtoFunctions,
    "prm": StepFunctions,
    "distillation": DistillationFunctions,
}
