"""Handed: what a leg should have loaded, by what the leg before had at its end.

Saving and loading compute nothing, so all of it is the same to the bit, except where an adapter was merged into the
weights on the way: that is computed here as the oracle does it, from the weights that the cell itself had.
"""

import math
from collections.abc import Iterator

import torch

from conformance.judge.distance import Tensors
from conformance.judge.tolerance import ROUNDING, Measurement
from conformance.lora import is_adapter
from conformance.observable import Observable
from conformance.oracle.lora import lora_of, merged
from conformance.record.tensors import Record
from conformance.scenario import parse_scenario

# Of float32 in W + scale B A, relative to W: a product is summed up over the rank, scaled, added and rounded once more.
MERGE_ROUNDINGS = 4


def end_of(before: Record, after: Record, key: str, last: Tensors, start: Tensors) -> dict[str, torch.Tensor]:
    """The weights, by name, that ``after`` should have loaded of the model whose weights have this ``key``.

    last: what the leg before had at its end, by name. start: what the first leg had loaded.
    """
    if not _is_merged(after, key) or not last:
        return dict(last)
    lora = parse_scenario(before.header["scenario"]).lora
    assert lora, "a leg merges adapters only where there are some"
    exact = {name: tensor.double() for name, tensor in last.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in exact.items() if not is_adapter(name)}
    return merged(exact, lora_of(lora, shapes)) | {name: t for name, t in start.items() if is_adapter(name)}


def bound_of(after: Record, key: str, name: str) -> float:
    """How far a weight may be from what ``end_of`` says, relative."""
    return MERGE_ROUNDINGS * ROUNDING if _is_merged(after, key) and not is_adapter(name) else 0.0


def _is_merged(after: Record, key: str) -> bool:
    return bool(after.header["loads"] == "merge") and key == "weight"


def generators(observable: Observable, before: Record, after: Record, step: int) -> Iterator[Measurement]:
    """Digests of generators are equal or not: there is no distance between the states of two. They are handed over
    where each rank goes on with its own work."""
    same = all(before.header[key] == after.header[key] for key in ("backend", "layout"))
    if not same or after.header["loads"] != "checkpoint":
        return
    end = before.steps[-1] if before.steps else before.loaded
    told = zip(after.loaded.line["generators"], end.line["generators"], strict=True)
    for rank, (mine, theirs) in enumerate(told):
        for name, digest in theirs.items():
            error = 0.0 if mine.get(name) == digest else math.inf
            what = f"{name} of rank {rank}"
            yield Measurement(stage=observable.stage, tensor=what, step=step, error=error, fixed=0.0)
