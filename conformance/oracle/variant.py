"""Defines the points where the oracle can reproduce a known defect of a library.

The base class changes nothing, so it is the correct oracle. A defect overrides what it changes (defects.py). Several
defects act one after another (``in_order``).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

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


def in_order(variants: Sequence[Variant]) -> Variant:
    """Returns a variant in which each method passes its value through all ``variants``, one after another."""

    def passed_on(name: str, value: Any, *args: Any, **options: Any) -> Any:
        for variant in variants:
            value = getattr(variant, name)(value, *args, **options)
        return value

    all_of_them = Variant()
    for name in (name for name in vars(Variant) if not name.startswith("_")):
        setattr(all_of_them, name, partial(passed_on, name))
    return all_of_them


HONEST = Variant()
