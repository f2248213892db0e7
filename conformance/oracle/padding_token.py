"""Trained padding token: an embedding that does not know it. docs/findings/megatron-padding-token.md."""

from dataclasses import replace

from conformance.oracle.parts import Architecture
from conformance.oracle.variant import Variant


class WithTrainedPaddingToken(Variant):
    def architecture(self, a: Architecture) -> Architecture:
        return replace(a, padding_token=None)
