"""Known defects of DeepSpeed, most of which cells of the layout option ``shipped`` leave as they are."""

from conformance.defect import DividedGradients, RoundedMasters, Unmodelled
from conformance.expectation import ExpectedDifference
from conformance.layout import Layout
from conformance.scenario import Scenario
from impl.ring.expected import RING_DIFFERENCES


def _half_precision_sums(scenario: Scenario, layout: Layout) -> Unmodelled | None:
    """The error is smaller than the noise of half precision, so no number is judged wrong. What shows is that all
    elements of the gradients are half-precision numbers, of sums of three or more (conformance/judge/grain.py)."""
    if layout.data * layout.sp * layout.ulysses * scenario.accumulation < 3:
        return None
    return Unmodelled(stage="gradients", tensors=("*gradient: elements that are * numbers, so added up in it",))


EXPECTED = (
    ExpectedDifference(
        reason="DeepSpeed casts the model to half precision first and copies the float32 masters from that",
        link="docs/findings/deepspeed-rounded-masters.md",
        defects=lambda scenario, _: (RoundedMasters(precision="fp16" if scenario.precision == "fp16" else "bf16"),),
        options=("shipped",),
        precisions=("bf16", "fp16"),
    ),
    ExpectedDifference(
        reason="ZeRO-0 adds gradients up in half precision, whatever grad_accum_dtype says",
        link="docs/findings/deepspeed-zero0-half.md",
        unmodelled=_half_precision_sums,
        at_most={"zero": 0},
        precisions=("bf16", "fp16"),
    ),
    ExpectedDifference(
        reason="ZeRO-3 divides gradients by the ranks of Ulysses as well, ZeRO 0 to 2 do not",
        link="docs/findings/deepspeed-ulysses-scale.md",
        defects=lambda _, layout: (DividedGradients(by=layout.ulysses),),
        options=("shipped",),
        at_least={"ulysses": 2, "zero": 3},
        at_most={"tp": 1},  # with AutoTP its ranks are data ranks at every stage
    ),
    *RING_DIFFERENCES,
)
