"""Term: what one document adds to a loss, and the interface of the functions that say so.

A function sees one document at a time, so nothing here knows of rows, padding, packing, micro-batches or ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from conformance.spec.batch import Batch, Document


@dataclass(frozen=True, kw_only=True)
class Term:
    """What one document adds to the loss of one model.

    loss: scalar with a gradient; the model's loss of the step is the sum over documents. None for a frozen model.
    values: numbers by the key of an observable, to be added up over documents.
    highest: numbers of which the largest one of all documents is recorded.
    rows: (targets,) numbers by the key of an observable, one for each target of the document in order.
    """

    loss: Tensor | None
    values: dict[str, float] = field(default_factory=dict)
    highest: dict[str, float] = field(default_factory=dict)
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


class RolloutFunctions(OracleFunctions, Protocol):
    """Of an objective that reads roll-outs: what is computed before the first update of each."""

    def looks(self, model: str) -> bool:
        """Whether a forward pass of this model is needed."""
        ...

    def look(self, model: str, output: Tensor, document: Document, *, stable: torch.dtype) -> Tensor:
        """What is kept of it: (targets,)."""
        ...

    def annotate(
        self, batches: Sequence[Batch], found: Mapping[str, list[list[Tensor]]], *, stable: torch.dtype
    ) -> list[Batch]:
        """The mini-batches with all columns that the updates read. ``found[model][b][d]``: of document d of batch b."""
        ...


def target_logprobs(logits: Tensor, document: Document, *, stable: torch.dtype, temperature: float = 1.0) -> Tensor:
    """log p of the document's target tokens in order, (targets,) in ``stable``, of softmax(logits / temperature).

    ``logits`` is (T, V); token i is predicted by the logits at i - 1.
    """
    positions = target_positions(document)
    tokens = torch.tensor(document.tokens)[positions]
    scaled = logits[positions - 1].to(stable) / temperature
    logprobs_NV = torch.log_softmax(scaled, dim=-1)
    return logprobs_NV[torch.arange(len(tokens)), tokens]


def target_positions(document: Document) -> Tensor:
    """Positions of the target tokens, (targets,) int64; what predicts them stands one position before."""
    return torch.tensor([i for i, target in enumerate(document.targets) if target], dtype=torch.int64)
