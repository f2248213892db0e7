"""Known defects of megatron-core, which cells of the layout option ``shipped`` leave as they are."""

from conformance.defect import PaddedSoftmax, RoundedMasters, TrainedPaddingToken
from conformance.expectation import ExpectedDifference
from impl.megatron.shape import VOCABULARY_MULTIPLE

EXPECTED = (
    ExpectedDifference(
        reason="megatron-core copies the float32 masters from the model, which is in half precision by then",
        link="docs/findings/megatron-rounded-masters.md",
        defects=lambda scenario, _: (RoundedMasters(precision="fp16" if scenario.precision == "fp16" else "bf16"),),
        options=("shipped",),
        precisions=("bf16", "fp16"),
    ),
    ExpectedDifference(
        reason="the padding of the vocabulary takes part in the softmax",
        link="docs/findings/megatron-padded-vocabulary.md",
        defects=lambda _, layout: (PaddedSoftmax(multiple=VOCABULARY_MULTIPLE * layout.tp),),
        options=("shipped",),
    ),
    ExpectedDifference(
        reason="the padding token is trained as an input",
        link="docs/findings/megatron-padding-token.md",
        defects=lambda *_: (TrainedPaddingToken(),),
        options=("shipped",),
    ),
)
