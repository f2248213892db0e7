"""Defects of the oracle: the variant for each kind of conformance.defect."""

from collections.abc import Callable, Sequence
from typing import Any

from conformance.defect import (
    Defect,
    DividedGradients,
    LostEmbeddingGradient,
    PaddedSoftmax,
    ResummedHeadNorms,
    RoundedMasters,
    TrainedPaddingToken,
    WindowPerBlock,
)
from conformance.oracle.divided_gradients import WithDividedGradients
from conformance.oracle.head_norms import WithResummedHeadNorms
from conformance.oracle.lost_embedding import WithLostEmbeddingGradient
from conformance.oracle.padded_softmax import WithPaddedSoftmax
from conformance.oracle.padding_token import WithTrainedPaddingToken
from conformance.oracle.ring_window import WithWindowPerBlock
from conformance.oracle.rounded_masters import WithRoundedMasters
from conformance.oracle.variant import Several, Variant

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
