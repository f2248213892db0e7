"""Detects gradients that were added up in the half precision in which they were computed.

Adding up micro-batches and ranks in bf16 costs a gradient 1e-3, which disappears in the noise of bf16 itself. But each
element keeps a trace: a sum that is rounded to bf16 can be represented in bf16. A float32 sum of several bf16 numbers
mostly cannot: over three backends, about 0.8 / n of the elements can, for n summands.

A micro-batch without targets adds nothing. Experts are judged separately, because each expert has its own number of
summands: a micro-batch that sends it no token adds none.
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

COARSE = 1.2  # the bound of the fraction of coarse elements times the number of summands
FEWEST = 3  # least number of summands; a sum of two has too many coarse elements
STACKED = re.compile(r"\.(\d+)\.mlp\.experts\.")  # the name of the stacked experts of one layer


def measure_accumulation_precision(
    phases: Sequence[Record], scenario: Scenario, gradients: Sequence[Observable], batches: Sequence[Batch]
) -> Iterator[Measurement]:
    """Measures, for each phase and model, the fraction of elements that the half precision can represent, times the
    number of summands of a gradient: the median over tensors and steps, and a separate median over routed experts.

    Steps with fewer than FEWEST summands are left out. ``batches`` contain the choices of the routers
    (conformance.oracle.router_replay). Without them experts are not measured: the oracle does not know the routers of
    such a model. Experts are not measured in reinforcement learning either, where a token may have a target and no
    gradient (an advantage of 0, a clipped ratio). Raises RecordError for batches without choices of a router.
    """
    if scenario.tier.summing == scenario.tier.compute:
        return
    for phase in phases:
        summands = summands_of_steps(phase, scenario.accumulation)
        for o in gradients:
            dense = [
                coarse_fraction(tensor, scenario.tier.compute) * summands[step.step]
                for step in phase.steps
                if summands[step.step] >= FEWEST
                for name, tensor in StepViews(step.tensors())[o.key].elements.items()
                if tensor.any() and not STACKED.search(name)
            ]
            is_known = batches and scenario.objective.kind == "sft"
            routed = _of_experts(phase, o, scenario, batches) if is_known else []
            for found, whose in ((dense, ""), (routed, "experts' ")):
                if found:
                    yield Measurement(
                        stage=o.stage,
                        tensor=f"{whose}{o.key}: elements that are {scenario.precision} numbers, so added up in it",
                        step=phase.header["first_step"],
                        error=statistics.median(found),
                        fixed=COARSE,
                    )


def summands_of_steps(phase: Record, accumulation: int) -> Mapping[int, int]:
    """Returns the number of summands of a gradient by step: one for each micro-batch with targets of each data-parallel
    rank, times the ranks that share its rows. Older records do not say which micro-batches have targets."""
    counts = {given["step"]: sum(bool(count) for rank in given["targets"] for count in rank) for given in _given(phase)}
    ranks = phase.layout.sp * phase.layout.ulysses
    return {step.step: ranks * counts.get(step.step, accumulation * phase.layout.data) for step in phase.steps}


def _given(phase: Record) -> Sequence[Mapping[str, Any]]:
    given: Sequence[Mapping[str, Any]] = phase.footer.get("batches", ())
    return given


def _of_experts(phase: Record, gradient: Observable, scenario: Scenario, batches: Sequence[Batch]) -> list[float]:
    """Returns, for each step and each expert with at least FEWEST summands, the fraction of coarse elements times the
    number of summands. Sketches are skipped, because their sample mixes all experts."""
    layers = sorted({int(found[1]) for name in phase.loaded.names() if (found := STACKED.search(name))})
    fractions = []
    for step in phase.steps:
        for name, stacked in StepViews(step.tensors())[gradient.key].elements.items():
            if (found := STACKED.search(name)) and len(stacked) > 1:
                batch = next(b for b in batches if b.step == step.step)
                router = layers.index(int(found[1]))
                counts = expert_summands(
                    batch,
                    key=gradient.key.replace("gradient", ROUTING),
                    router=router,
                    is_last=router == len(layers) - 1,
                    layout=phase.layout,
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
    """Counts the least number of summands of the gradient of each expert of a router, by the expert's number.

    One for each micro-batch of each data-parallel rank in which a token that the loss depends on goes to the expert;
    with ``ep``, one product may contain the tokens of all ranks. Context parallelism cuts these further, which only
    adds summands. ``key``: the observable of the routing. ``is_last``: the loss depends on tokens of this router only
    through their own predictions.
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
    """Yields the experts that a router chooses for those tokens of a document that the loss depends on."""
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
