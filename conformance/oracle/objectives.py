"""Objectives of the oracle: what one document adds to a model's loss, from the papers.

Serves claims 1 and 6: written apart from impl/objectives.py. FUNCTIONS holds them by the kind of the scenario's
objective. A function sees one document at a time, so nothing here knows of rows, padding, packing, micro-batches or
ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from conformance.batch import Batch, Document
from conformance.objective import Objective, known_kinds


@dataclass(frozen=True, kw_only=True)
class Term:
    """What one document adds to the loss of one model.

    loss: scalar with a gradient; the model's loss of the step is the sum over documents. None for a frozen model.
    values: numbers by the key of an observable, to be added up over documents.
    rows: (targets,) numbers by the key of an observable, one for each target of the document in order.
    """

    loss: Tensor | None
    values: dict[str, float] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)


class OracleFunctions(Protocol):
    """``output`` of a model and ``others``, those of the models before it (detached), are as ``forward`` gives them:
    logits (T, V), or values (T, 1), in the dtype of the computation. ``stable`` is the dtype of softmax and losses."""

    def totals(self, batch: Batch) -> dict[str, float]:
        """Sums over the whole optimizer step: the denominators of the losses; they are recorded."""
        ...

    def term(
        self,
        model: str,
        output: Tensor,
        document: Document,
        *,
        totals: Mapping[str, float],
        others: Mapping[str, Tensor],
        stable: torch.dtype,
    ) -> Term: ...


class Sft:
    """-log p of the target tokens, divided by their number in the whole step."""

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
        others: Mapping[str, Tensor],
        stable: torch.dtype,
    ) -> Term:
        logprobs = target_logprobs(output, document, stable=stable)
        loss = -logprobs.sum() / totals["token_count"]
        return Term(loss=loss, values={"loss": loss.item()}, rows={"logprob": logprobs})


def target_logprobs(logits: Tensor, document: Document, *, stable: torch.dtype) -> Tensor:
    """log p of the document's target tokens in order, (targets,) in ``stable``.

    ``logits`` is (T, V); token i is predicted by the logits at i - 1.
    """
    positions = target_positions(document)
    tokens = torch.tensor(document.tokens)[positions]
    logprobs_NV = torch.log_softmax(logits[positions - 1], dim=-1, dtype=stable)
    return logprobs_NV[torch.arange(len(tokens)), tokens]


def target_positions(document: Document) -> Tensor:
    """Positions of the target tokens, (targets,) int64; what predicts them stands one position before."""
    return torch.tensor([i for i, target in enumerate(document.targets) if target])


FUNCTIONS: dict[str, Callable[[Any], OracleFunctions]] = {"sft": Sft}


def functions_of(objective: Objective) -> OracleFunctions:
    """The functions of a scenario's objective. Raises UsageError for a kind that is not in FUNCTIONS."""
    known_kinds(FUNCTIONS, objective, who="the oracle (conformance/oracle/objectives.py)")
    return FUNCTIONS[objective.kind](objective)
