"""Divided gradients: ranks that hold parts of a sequence are averaged over, where their gradients are to be summed.

docs/findings/deepspeed-ulysses-scale.md.

Re-summed head norms: a sum over tensor-parallel ranks, where micro-batches pile up, of the pile and not of the last.

After micro-batch i, the gradient of a head norm is ranks x (what it was before) + (that of micro-batch i), because what
it was before has been summed on all ranks already. docs/findings/hf-head-norm-accumulation.md.

Lost gradient of the embedding: nothing comes back from the layers. docs/findings/compiled-collective-inputs.md.

Padded softmax: the vocabulary is padded with rows of zeros, and nobody tells the softmax.

Whatever a row's logit, its probability is no zero: the rows get gradients and move away from zero, those gradients are
clipped with all others, and the log-probs of tokens are of a model with that many more. docs/findings/
megatron-padded-vocabulary.md.

Trained padding token: an embedding that does not know it. docs/findings/megatron-padding-token.md.

Window per block: a ring hands a sliding window to a kernel that knows nothing of the places of blocks.

The kernel aligns a window to the ends of the queries and of the keys that it is given. In a ring, rank r holds piece r
of a document, and the queries at place i of their piece see the places i - window + 1 to i of every earlier piece, too.
In zigzag of two ranks, rank 0 holds pieces 0 and 3, rank 1 pieces 1 and 2; a rank's own block is right only as far as
its pieces are neighbours, and queries that see no key of an earlier block lose all that they saw.
docs/findings/ring-attention-window.md.

Rounded masters: a model is cast to half precision, and its float32 masters are copied from that.

docs/findings/deepspeed-rounded-masters.md, docs/findings/megatron-rounded-masters.md.

Defects of the oracle: the variant for each kind of conformance.spec.known_defects.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.models.components import Architecture
from conformance.oracle.variant import UNNAMED, Several, Variant, Weights
from conformance.spec.batch import Batch, Row
from conformance.spec.known_defects import (
    Defect,
    DividedGradients,
    LostEmbeddingGradient,
    PaddedSoftmax,
    ResummedHeadNorms,
    RoundedMasters,
    TrainedPaddingToken,
    WindowPerBlock,
)
from conformance.spec.precision import PRECISIONS


class WithDividedGradients(Variant):
    def __init__(self, defect: DividedGradients) -> None:
        self._by = defect.by

    def reduced(self, gradients: Weights) -> Weights:
        return {name: gradient / self._by for name, gradient in gradients.items()}


HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


class WithResummedHeadNorms(Variant):
    def __init__(self, defect: ResummedHeadNorms) -> None:
        self._defect = defect

    def micro_batches(self, parts: Sequence[Sequence[Row]], batch: Batch) -> Sequence[Sequence[Row]]:
        """Micro-batch i of all data-parallel ranks together."""
        count, ranks = self._defect.micro_batches, self._defect.data_ranks
        of_ranks = [batch.micro_batches(dp_rank=rank, dp_size=ranks, accumulation=count) for rank in range(ranks)]
        return [[row for rows in at_once for row in rows] for at_once in zip(*of_ranks, strict=True)]

    def carried(self, gradients: Weights) -> Weights:
        return {n: self._defect.ranks * g if n.endswith(HEAD_NORMS) else g for n, g in gradients.items()}


EMBEDDING = "model.embed_tokens.weight"


class WithLostEmbeddingGradient(Variant):
    def reduced(self, gradients: Weights) -> Weights:
        return gradients | {EMBEDDING: torch.zeros_like(gradients[EMBEDDING])}


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


class WithTrainedPaddingToken(Variant):
    def architecture(self, a: Architecture) -> Architecture:
        return replace(a, padding_token=None)


class WithWindowPerBlock(Variant):
    def __init__(self, defect: WindowPerBlock) -> None:
        assert not defect.zigzag or defect.ranks == 2, "zigzag of more than two ranks gives NaN"
        self._ranks, self._zigzag = defect.ranks, defect.zigzag

    def hidden_keys(self, hidden: Tensor, window: int | None) -> Tensor:
        if window is None:
            return hidden
        tokens = len(hidden)
        pieces = 2 * self._ranks if self._zigzag else self._ranks
        length = -(-tokens // pieces)  # of a piece; the last ones are padded
        piece, place = torch.arange(tokens) // length, torch.arange(tokens) % length
        if not self._zigzag:
            return ~_within(place, place, window) | (piece[:, None] < piece)
        rank = torch.where((piece == 0) | (piece == 3), 0, 1)
        second = piece >= 2  # of the rank's two
        own = rank[:, None] == rank
        at = place + length * second
        seen = own & _within(at, at, window)
        # Rank 0's second piece sees both of rank 1's, rank 1 sees rank 0's first piece: aligned to their ends.
        seen |= (piece[:, None] == 3) & (rank == 1) & _within(place + length, at, window)
        seen |= (piece[:, None] == 2) & (piece == 0) & _within(place, place, window)
        blind = piece == 1
        return ~seen | blind[:, None]


def _within(query: Tensor, key: Tensor, window: int) -> Tensor:
    """(T, T): whether a key's place is the query's, or less than ``window`` before it."""
    back = query[:, None] - key
    return (back >= 0) & (back < window)


class WithRoundedMasters(Variant):
    def __init__(self, defect: RoundedMasters) -> None:
        self._dtype = PRECISIONS[defect.precision].compute.dtype

    def loaded(self, weights: Weights, a: Architecture | None, *, trained: bool) -> Weights:
        return {name: w.to(self._dtype).to(w.dtype) if trained else w for name, w in weights.items()}


VARIANTS: dict[type[Any], Callable[[Any], Variant]] = {
    RoundedMasters: WithRoundedMasters,
    PaddedSoftmax: WithPaddedSoftmax,
    TrainedPaddingToken: lambda _: WithTrainedPaddingToken(),
    ResummedHeadNorms: WithResummedHeadNorms,
    DividedGradients: WithDividedGradients,
    WindowPerBlock: WithWindowPerBlock,
    LostEmbeddingGradient: lambda _: WithLostEmbeddingGradient(),
}


def variant_of(defects: Sequence[Defect]) -> Variant:
    """The oracle with these defects; without any, the oracle as it should be."""
    return Several([VARIANTS[type(defect)](defect) for defect in defects])
