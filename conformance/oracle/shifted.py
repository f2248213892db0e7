"""Shifted: how far rows of a value model's embedding move where all values of a document move by the same number.

Serves claim 6. The loss of a value model pulls some values of a document up and others down, and what they add to a row
may nearly cancel. Errors of values that follow from nearly equal hidden states are nearly equal, so they do not, and
the norm of the row says nothing of them: another backward pass does (docs/tolerances.md).
"""

from collections import Counter

import torch
from torch import Tensor

from conformance.batch import Batch, Document
from conformance.oracle.term import target_positions

EMBEDDING = "model.embed_tokens.weight"


def value_gradient(loss: Tensor, values: Tensor, document: Document, *, scale: float) -> Tensor:
    """The gradients of ``loss`` with respect to what ``values`` (T, 1) has for the targets of the document: float64
    (targets,). ``scale``: what the loss is multiplied by meanwhile. Graphs are kept."""
    (gradient,) = torch.autograd.grad(loss * scale, values, retain_graph=True, materialize_grads=True)
    return gradient[target_positions(document) - 1, 0].double() / scale


class Shifted:
    """Of one value model in one step."""

    def __init__(self, batch: Batch) -> None:
        self._copies = Counter(_content(document) for document in batch.documents)
        self._squares: Tensor | None = None

    def add(self, document: Document, values: Tensor, embedding: Tensor) -> None:
        """``values`` (T, 1) of a document, whose graph is kept; ``embedding`` (V, D) is a leaf of it."""
        together = values[target_positions(document) - 1].sum()
        (moved_VD,) = torch.autograd.grad(together, embedding, retain_graph=True)
        # Documents err independently of each other. Copies of one err alike, so of C of them the sum is C times one.
        squares = self._copies[_content(document)] * moved_VD.square().sum(1)
        self._squares = squares if self._squares is None else self._squares + squares

    @property
    def norms(self) -> Tensor:
        """(V,) in the dtype of the weights: of each row, the distance that it moves where the gradients of the loss
        with respect to values are off by 1, all of a document alike, and the signs of documents are random."""
        assert self._squares is not None, "a step without target tokens is refused before"
        return self._squares.sqrt()


def _content(document: Document) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    return document.tokens, document.targets
