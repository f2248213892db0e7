"""Detects gradients that were added up in the half precision in which they were computed.

Adding up micro-batches and ranks in bf16 costs a gradient 1e-3, which disappears in the noise of bf16 itself. But it
leaves a trace in every element: a sum that is rounded to bf16 is a number that bf16 has. A float32 sum of several bf16
numbers mostly is not; measured over three backends, about 0.8 / n of the elements are, for n numbers.

A micro-batch without targets adds nothing. Experts are judged by themselves, because each expert has summands of its
own: a micro-batch that sends it no token adds none to it.
"""

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from conformance.judge.tensor_views import StepViews
from conformance.judge.tolerance import Measurement
from conformance.records.record_format import AGAIN, RecordError
from conformance.records.step_tensors import Record
from conformance.spec.batch import Batch, Document, expert_column
from conformance.spec.layout import Layout
from conformance.spec.observables import ROUTING, Observable
from conformance.spec.precision import FloatFormat
from conformance.spec.scenario import Scenario

COARSE = 1.2  # what is allowed of the fraction of coarse elements, times the summands
FEWEST = 3  # summands; a sum of two has too many coarse elements to tell
STACKED = re.compile(r"\.(\d+)\.mlp\.experts\.")  # in the name of (experts, ...): the routed experts of one layer


def grains(
    legs: Sequence[Record], scenario: Scenario, gradients: Sequence[Observable], batches: Sequence[Batch]
) -> Iterator[Measurement]:
    """For each leg and model: the fraction of elements that the half precision has, times the summands of a gradient;
    the median over tensors and steps, and that over routed experts by itself.

    Only where there are FEWEST summands. ``batches`` have the choices of the routers
    (conformance.oracle.router_replay); there are none of a model whose routers the oracle does not know, and no
    expert of it is looked at. Nor is one in reinforcement learning, where a token may have a target and no gradient:
    an advantage of 0, a ratio that is clipped. Raises RecordError for batches without choices of a router.
    """
    if not scenario.tier.is_half:
        return
    for leg in legs:
        summands = summands_of_steps(leg, scenario.accumulation)
        for o in gradients:
            dense = [
                coarse_fraction(tensor, scenario.tier.compute) * summands[step.step]
                for step in leg.steps
                if summands[step.step] >= FEWEST
                for name, tensor in StepViews(step.tensors())[o.key].elements.items()
                if tensor.any() and not STACKED.search(name)
            ]
            is_known = batches and scenario.objective.kind == "sft"
            routed = _of_experts(leg, o, scenario, batches) if is_known else []
            for found, whose in ((dense, ""), (routed, "experts' ")):
                if found:
                    yield Measurement(
                        stage=o.stage,
                        tensor=f"{whose}{o.key}: elements that are {scenario.precision} numbers, so added up in it",
                        step=leg.header["first_step"],
                        error=statistics.median(found),
                        fixed=COARSE,
                    )


def summands_of_steps(leg: Record, accumulation: int) -> Mapping[int, int]:
    """How many numbers a gradient is the sum of, by step: one for each micro-batch with targets of each data-parallel
    rank, times the ranks that share its rows. Older records do not say which micro-batches have targets."""
    told = {given["step"]: sum(bool(count) for rank in given["targets"] for count in rank) for given in _given(leg)}
    ranks = leg.layout.sp * leg.layout.ulysses
    return {step.step: ranks * told.get(step.step, accumulation * leg.layout.data) for step in leg.steps}


def _given(leg: Record) -> Sequence[Mapping[str, Any]]:
    given: Sequence[Mapping[str, Any]] = leg.footer.get("batches", ())
    return given


def _of_experts(leg: Record, gradient: Observable, scenario: Scenario, batches: Sequence[Batch]) -> list[float]:
    """Of each expert with FEWEST summands, at each step: its fraction of coarse elements, times its summands. Sketches
    tell nothing, because their sample is of all experts."""
    layers = sorted({int(found[1]) for name in leg.loaded.names() if (found := STACKED.search(name))})
    fractions = []
    for step in leg.steps:
        for name, stacked in StepViews(step.tensors())[gradient.key].elements.items():
            if (found := STACKED.search(name)) and len(stacked) > 1:
                batch = next(b for b in batches if b.step == step.step)
                router = layers.index(int(found[1]))
                counts = expert_summands(
                    batch,
                    key=gradient.key.replace("gradient", ROUTING),
                    router=router,
                    is_last=router == len(layers) - 1,
                    layout=leg.layout,
                    accumulation=scenario.accumulation,
                )
                fractions += [
                    coarse_fraction(stacked[expert], scenario.tier.compute) * count
                    for expert, count in counts.items()
                    if count >= FEWEST and stacked[expert].any()
                ]
    return fractions


def expert_summands(
    batch: Batch, *, key: str, router: int, is_last: bool, layout: Layout, accumulation: int
) -> Counter[int]:
    """How many numbers the gradient of each expert of a router is at least the sum of, by the expert's number.

    One for each micro-batch of each data-parallel rank in which a token that the loss depends on goes to the expert;
    with ``ep``, one product may have the tokens of all ranks. Rings cut these further, which only adds summands.
    ``key``: of the routing, as it is observed. ``is_last``: the loss depends on no token of this router but through
    its own prediction.
    """
    summands: Counter[int] = Counter()
    parts = [
        batch.micro_batches(dp_rank=rank, dp_size=layout.data, accumulation=accumulation) for rank in range(layout.data)
    ]
    for of_ranks in zip(*parts, strict=True):
        chosen = [
            {
                expert
                for row in rows
                for document in row.documents
                for expert in _chosen(document, key=key, router=router, is_last=is_last)
            }
            for rows in of_ranks
        ]
        summands.update(set().union(*chosen) if layout.ep > 1 else [expert for part in chosen for expert in part])
    return summands


def _chosen(document: Document, *, key: str, router: int, is_last: bool) -> Iterator[int]:
    """The experts that a router chooses for the tokens of a document that the loss depends on."""
    if document.columns.get(expert_column(router, 0, key)) is None:
        raise RecordError(f"the batches do not say which experts router {router} chooses ({key}); {AGAIN}")
    slot = 0
    last = max((i for i, target in enumerate(document.targets) if target), default=0)  # predicted from those before it
    while isinstance(column := document.columns.get(expert_column(router, slot, key)), tuple):
        yield from (int(column[i]) for i in range(last) if document.targets[i + 1] or not is_last)
        slot += 1


def coarse_fraction(tensor: torch.Tensor, number_format: FloatFormat) -> float:
    """Returns the fraction of nonzero elements with no more significant bits than the format has."""
    mantissa, _ = torch.frexp(tensor[tensor != 0])
    scaled = mantissa * 2**number_format.significant_bits
    return float((scaled == scaled.round()).double().mean())
