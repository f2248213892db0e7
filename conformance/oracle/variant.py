"""Variant: the places where the oracle can be made wrong on purpose, as a library is known to be.

Serves claim 8. The base class changes nothing: it is the oracle as it should be. A defect overrides what it changes,
in a file of its own; several defects act one after another (``Several``). defects.py has the list.
"""

from collections.abc import Sequence

from torch import Tensor

from conformance.models.components import Architecture
from conformance.spec.batch import Batch, Row

Weights = dict[str, Tensor]
UNNAMED = "(unnamed) "  # begins the name of what is trained and stands in no folder and in no record
UNNAMED_NORM = "unnamed_grad_norm"  # value of a step: the 2-norm of the gradients of what is unnamed


class Variant:
    """Each method is given what the oracle has at this place, and returns what it goes on with."""

    def architecture(self, a: Architecture) -> Architecture:
        """What the model computes, as its configuration says."""
        return a

    def loaded(self, weights: Weights, a: Architecture | None, *, trained: bool) -> Weights:
        """The weights as they were loaded. ``trained``: of a model that is trained. ``a``: None for a model that the
        oracle does not compute itself."""
        return weights

    def head(self, matrix: Tensor, weights: Weights) -> Tensor:
        """The matrix that gives the logits: (V, D)."""
        return matrix

    def hidden_keys(self, hidden: Tensor, window: int | None) -> Tensor:
        """Which keys (columns) a query (row) does not see, (T, T); one that sees none has output 0."""
        return hidden

    def micro_batches(self, parts: Sequence[Sequence[Row]], batch: Batch) -> Sequence[Sequence[Row]]:
        """The rows of an optimizer step, in parts one after another."""
        return parts

    def carried(self, gradients: Weights) -> Weights:
        """What is added up so far, at the begin of a part."""
        return gradients

    def reduced(self, gradients: Weights) -> Weights:
        """The gradients of the whole step."""
        return gradients


class Several(Variant):
    """Several variants, in order."""

    def __init__(self, variants: Sequence[Variant]) -> None:
        self._variants = variants

    def architecture(self, a: Architecture) -> Architecture:
        for variant in self._variants:
            a = variant.architecture(a)
        return a

    def loaded(self, weights: Weights, a: Architecture | None, *, trained: bool) -> Weights:
        for variant in self._variants:
            weights = variant.loaded(weights, a, trained=trained)
        return weights

    def head(self, matrix: Tensor, weights: Weights) -> Tensor:
        for variant in self._variants:
            matrix = variant.head(matrix, weights)
        return matrix

    def hidden_keys(self, hidden: Tensor, window: int | None) -> Tensor:
        for variant in self._variants:
            hidden = variant.hidden_keys(hidden, window)
        return hidden

    def micro_batches(self, parts: Sequence[Sequence[Row]], batch: Batch) -> Sequence[Sequence[Row]]:
        for variant in self._variants:
            parts = variant.micro_batches(parts, batch)
        return parts

    def carried(self, gradients: Weights) -> Weights:
        for variant in self._variants:
            gradients = variant.carried(gradients)
        return gradients

    def reduced(self, gradients: Weights) -> Weights:
        for variant in self._variants:
            gradients = variant.reduced(gradients)
        return gradients


HONEST = Variant()
