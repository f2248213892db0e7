"""Grain: whether gradients were added up in the half precision that they were computed in.

Serves claim 4. Adding up micro-batches and ranks in bf16 costs a gradient 1e-3, which disappears in the noise of bf16
itself. But it leaves a trace in every element: a sum that is rounded to bf16 is a number that bf16 has. A float32 sum
of several bf16 numbers mostly is none; measured over three backends, of n numbers about 0.8 / n of the elements are.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence

import torch

from conformance.judge.seen import elementwise
from conformance.judge.tolerance import Measurement
from conformance.layout import Layout
from conformance.observable import Observable
from conformance.record.tensors import Record
from conformance.scenario import Precision, Scenario

SIGNIFICANT: Mapping[Precision, int] = {"bf16": 8, "fp16": 11}  # bits of a number, the implicit one included
COARSE = 1.2  # divided by the number of summands: the fraction of coarse elements that is allowed


def grains(legs: Sequence[Record], scenario: Scenario, gradients: Sequence[Observable]) -> Iterator[Measurement]:
    """For each leg: the fraction of elements that the half precision has, the median over tensors and steps.

    Only where an element has three summands or more: micro-batches, times ranks that see different tokens. Experts that
    ranks of ``ep`` share have fewer, because one product has the tokens of all these ranks; their fraction is that much
    smaller as it is counted.
    """
    if scenario.precision not in SIGNIFICANT:
        return
    for leg in legs:
        layout = Layout.parse(leg.header["layout"])
        summands = scenario.accumulation * layout.data * layout.sp * layout.ulysses
        if summands < 3:
            continue
        for o in gradients:
            fractions = [
                coarse_fraction(tensor, scenario.precision) / (layout.ep if ".experts." in name else 1)
                for step in leg.steps
                for name, tensor in elementwise(step.tensors(), o.key).items()
                if tensor.any()
            ]
            if fractions:
                yield Measurement(
                    stage=o.stage,
                    tensor=f"{o.key}: elements that are {scenario.precision} numbers, so added up in it",
                    step=leg.header["first_step"],
                    error=statistics.median(fractions),
                    fixed=COARSE / summands,
                )


def coarse_fraction(tensor: torch.Tensor, precision: Precision) -> float:
    """Of the elements that are not zero, those with no more significant bits than the precision has."""
    mantissa, _ = torch.frexp(tensor[tensor != 0])
    scaled = mantissa * 2 ** SIGNIFICANT[precision]
    return float((scaled == scaled.round()).double().mean())
