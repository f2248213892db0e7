"""Known defects of DeepSpeed, most of which cells of the layout option ``shipped`` leave as they are."""

from conformance.defect import DividedGradients, RoundedMasters, Unmodelled
from conformance.expectation import ExpectedDifference
from conformance.layout import Layout
from conformance.scenario import Scenario
from impl.ring.expected import RING_DIFFERENCES

FEWEST = 3  # summands of which the judge looks at the digits (conformance/judge/grain.py)


def _half_precision_sums(scenario: Scenario, layout: Layout) -> Unmodelled | None:
    """What shows of gradients that are added up in half precision, where it can be told; else None.

    The error is smaller than the noise of half precision, so no number is judged wrong. But all elements of such a sum
    are half-precision numbers.
    """
    summands = layout.data * layout.sp * layout.ulysses * scenario.accumulation  # fewer if a micro-batch has no targets
    if summands < FEWEST:
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
