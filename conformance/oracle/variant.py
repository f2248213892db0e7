"""Defines the points where the oracle can reproduce a known defect of a library.

The base class changes nothing, so it is the correct oracle. A defect overrides what it changes (defects.py). Several
defects act one after another (``Several``).
"""

from collections.abc import Sequence

from torch import Tensor

from conformance.models.components import Architecture
from conformance.spec.batch import Batch, Row

Weights = dict[str, Tensor]
UNNAMED = "(unnamed) "  # prefix of trained tensors that are in no folder and in no record
UNNAMED_NORM = "unnamed_grad_norm"  # value of a step: the 2-norm of the gradients of unnamed tensors


class Variant:
    """Lets a defect replace intermediate values: each method receives a value and returns its replacement."""

    def architecture(self, a: Architecture) -> Architecture:
        """Returns the architecture that the configuration describes."""
        return a

    def loaded(self, weights: Weights, a: Architecture | None, *, trained: bool) -> Weights:
        """Returns the weights after loading. ``a``: None for a model that transformers runs."""
        return weights

    def head(self, matrix: Tensor, weights: Weights) -> Tensor:
        """Returns the matrix that produces the logits, (V, D)."""
        return matrix

    def hidden_keys(self, hidden: Tensor, window: int | None) -> Tensor:
        """Returns (T, T), True for keys (columns) that a query (row) must not see; without any, its output is 0."""
        return hidden

    def micro_batches(self, parts: Sequence[Sequence[Row]], batch: Batch) -> Sequence[Sequence[Row]]:
        """Returns the rows of an optimizer step, split into micro-batches."""
        return parts

    def carried(self, gradients: Weights) -> Weights:
        """Returns the accumulated gradients at the beginning of a micro-batch."""
        return gradients

    def reduced(self, gradients: Weights) -> Weights:
        """Returns the gradients of the whole step."""
        return gradients


class Several(Variant):
    """Applies several variants in order."""

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
