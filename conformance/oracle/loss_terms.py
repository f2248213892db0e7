"""Defines what one document adds to a loss, and the interface of the functions that compute it.

A function sees one document at a time, so this code knows nothing of rows, padding, packing, micro-batches or ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from conformance.spec.batch import KEPT, Batch, Document

Totals = Mapping[str, float]  # sums over the optimizer step, such as the denominators of losses
Earlier = Mapping[str, Tensor]  # the detached outputs of the models before this one, by role


@dataclass(frozen=True, kw_only=True)
class Term:
    """Holds what one document adds to the loss of one model.

    loss: scalar with a gradient; the model's loss of the step is the sum over documents. None for a frozen model.
    values: numbers by the key of an observable, summed over documents.
    highest: numbers by the key of an observable, whose maximum over documents is recorded.
    rows: (targets,) numbers by the key of an observable, one for each target of the document in order.
    """

    loss: Tensor | None
    values: dict[str, float] = field(default_factory=dict)
    highest: dict[str, float] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)


class OracleFunctions(Protocol):
    """Computes the loss of an objective, document by document.

    ``output`` is what ``forward`` returns for a model: logits (T, V), or values (T, 1), in the compute dtype.
    ``earlier`` holds the detached outputs of the models before it. ``stable`` is the dtype of softmax and losses.
    """

    def totals(self, batch: Batch) -> dict[str, float]:
        """Returns sums over the whole optimizer step, such as the denominators of the losses; they are recorded."""
        ...

    def term(
        self, model: str, output: Tensor, document: Document, *, totals: Totals, earlier: Earlier, stable: torch.dtype
    ) -> Term: ...


@runtime_checkable
class PairedFunctions(OracleFunctions, Protocol):
    """Computes losses that need numbers of other documents of the same step."""

    def see(self, document: Document, outputs: Mapping[str, Tensor], *, stable: torch.dtype) -> None:
        """Keeps what terms of other documents need of one. It is called for every document with targets, before any
        term. ``outputs``: by model, without gradients."""
        ...


@runtime_checkable
class ScoringFunctions(OracleFunctions, Protocol):
    """Computes losses of values at other positions than those that predict targets."""

    def value_positions(self, document: Document) -> Tensor:
        """Returns the positions of the values that have a loss, int64."""
        ...


class RolloutFunctions(OracleFunctions, Protocol):
    """Also computes what an objective needs of a rollout before its first update."""

    def needs_rollout_pass(self, model: str) -> bool:
        """Tells whether a forward pass of this model over the rollout is needed."""
        ...

    def rollout_numbers(self, model: str, output: Tensor, document: Document, *, stable: torch.dtype) -> Tensor:
        """Returns the numbers that are kept of that forward pass, (targets,)."""
        ...

    def annotate(
        self, batches: Sequence[Batch], found: Mapping[str, list[list[Tensor]]], *, stable: torch.dtype
    ) -> list[Batch]:
        """Returns mini-batches with all columns that updates read. ``found[model][b][d]``: of document d of batch b."""
        ...


def target_logprobs(logits: Tensor, document: Document, *, stable: torch.dtype, temperature: float = 1.0) -> Tensor:
    """Returns log p of the document's target tokens, (targets,) in ``stable``, under softmax(logits / temperature).

    ``logits`` is (T, V); token i is predicted by the logits at i - 1.
    """
    tokens = torch.tensor(document.tokens)[target_positions(document)]
    logprobs_NV = target_distributions(logits, document, stable=stable, temperature=temperature)
    return logprobs_NV[torch.arange(len(tokens)), tokens]


def target_distributions(logits: Tensor, document: Document, *, stable: torch.dtype, temperature: float) -> Tensor:
    """Returns log p of all tokens where targets are predicted, (targets, V); -inf where p is 0.

    If the document says which tokens the sampler kept for a target, p is 0 for others and sums to 1 over the kept ones.
    """
    positions = target_positions(document)
    scaled_NV = logits[positions - 1].to(stable) / temperature
    if slots := [name for name in document.columns if name.startswith(KEPT)]:
        one_more = torch.tensor([document.columns[name] for name in slots]).T[positions].long()  # 0: none
        kept = torch.zeros(len(positions), scaled_NV.shape[1] + 1, dtype=torch.bool).scatter(1, one_more, value=True)
        scaled_NV = scaled_NV.where(kept[:, 1:], -torch.inf)
    return torch.log_softmax(scaled_NV, dim=-1)


def target_positions(document: Document) -> Tensor:
    """Returns positions of the target tokens, (targets,) int64; each is predicted at the position before it."""
    return torch.tensor([i for i, target in enumerate(document.targets) if target], dtype=torch.int64)
