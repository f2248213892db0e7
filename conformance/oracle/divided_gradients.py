"""Divided gradients: ranks that hold parts of a sequence are averaged over, where their gradients are to be summed.

docs/findings/deepspeed-ulysses-scale.md.
"""

from conformance.defect import DividedGradients
from conformance.oracle.variant import Variant, Weights


class WithDividedGradients(Variant):
    def __init__(self, defect: DividedGradients) -> None:
        self._by = defect.by

    def reduced(self, gradients: Weights) -> Weights:
        return {name: gradient / self._by for name, gradient in gradients.items()}
