"""Padded softmax: the vocabulary is padded with rows of zeros, and nobody tells the softmax.

Whatever a row's logit, its probability is no zero: the rows get gradients and move away from zero, those gradients are
clipped with all others, and the log-probs of tokens are of a model with that many more. docs/findings/
megatron-padded-vocabulary.md.
"""

import torch
from torch import Tensor

from conformance.defect import PaddedSoftmax
from conformance.oracle.parts import Architecture
from conformance.oracle.variant import UNNAMED, Variant, Weights


class WithPaddedSoftmax(Variant):
    def __init__(self, defect: PaddedSoftmax) -> None:
        self._multiple = defect.multiple

    def loaded(self, weights: Weights, a: Architecture | None, *, trained: bool) -> Weights:
        assert a is not None, "no backend with padded rows runs a model that the oracle does not know"
        rows = -a.vocab_size % self._multiple
        if a.value_head or not rows:
            return weights
        name = "model.embed_tokens.weight" if a.tied else "lm_head.weight"
        return {**weights, UNNAMED + name: weights[name].new_zeros(rows, a.hidden_size)}

    def head(self, matrix: Tensor, weights: Weights) -> Tensor:
        return torch.cat([matrix, *(w for name, w in weights.items() if name.startswith(UNNAMED))])
