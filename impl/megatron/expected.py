"""Known defects of megatron-core, which cells of the layout option ``shipped`` leave as they are."""

from conformance.defect import Defect, PaddedSoftmax, RoundedMasters, TrainedPaddingToken
from conformance.expectation import ExpectedDifference, model_config
from conformance.layout import Layout
from conformance.scenario import Scenario
from impl.megatron.shape import VOCABULARY_MULTIPLE


def _padded(scenario: Scenario, layout: Layout) -> tuple[Defect, ...]:
    multiple = VOCABULARY_MULTIPLE * layout.tp
    return (PaddedSoftmax(multiple=multiple),) if model_config(scenario)["vocab_size"] % multiple else ()


def _trained(scenario: Scenario, _: Layout) -> tuple[Defect, ...]:
    return () if model_config(scenario).get("pad_token_id") is None else (TrainedPaddingToken(),)


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
        defects=_padded,
        options=("shipped",),
    ),
    ExpectedDifference(
        reason="the padding token is trained as an input",
        link="docs/findings/megatron-padding-token.md",
        defects=_trained,
        options=("shipped",),
    ),
)
