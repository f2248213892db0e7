"""Compares what a phase loaded with the end of the previous phase, before any step.

The expected weights after a resume, in another layout or backend too, are those at the end of the previous phase.
Saving and loading compute nothing, so they are equal to the bit. Where an adapter was merged into the weights, the
merge is computed here as the oracle does it, from the weights that the cell itself had.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from conformance.judge.tensor_views import StepViews, Tensors, infinite
from conformance.judge.tolerance import ROUNDING, Measurement
from conformance.oracle.decoder import lora_of, merged
from conformance.records.step_tensors import Record
from conformance.spec.observables import Observable
from conformance.spec.scenario import is_adapter


def errors_after_resume(
    before: Record, after: Record, observables: Sequence[Observable], start: StepViews
) -> Iterator[Measurement]:
    """Compares what a phase loaded with the end of the previous phase. ``start``: the weights of the first phase.

    Measurements belong to the step that comes next. Training state and generators are compared if the optimizer is
    loaded. Backends may round frozen weights differently; everything else is equal to the bit.
    """
    end, number = before.steps[-1] if before.steps else before.loaded, after.loaded.step + 1
    last, first = StepViews(end.tensors()), StepViews(after.loaded.tensors())
    resumes = after.header["optimizer"] == "loaded"
    for o in observables:
        if o.when == "loaded":
            # The weights of a model that is not trained are recorded only as loaded.
            saved = last[o.key] if last[o.key].tensors else StepViews(before.loaded.tensors())[o.key]
            saved = replace(saved, tensors=_end_of(before, after, o.key, saved.tensors, start[o.key].tensors))
            for found in first[o.key].errors(saved, o, number):
                yield found if o.rounded else replace(found, fixed=_bound_of(after, o.key, found.tensor))
        elif o.when == "handover" and o.kind == "tensors" and resumes:
            for found in first[o.key].errors(last[o.key], o, number):
                yield replace(found, tensor=f"{o.key.rpartition('.')[2]} of {found.tensor}")
            own, reference = first[o.key].elements, last[o.key].elements
            for name in own.keys() & reference.keys():
                if own[name].dtype != reference[name].dtype:
                    dtypes = f"{own[name].dtype} instead of {reference[name].dtype}"
                    yield infinite(o.stage, f"{o.key} of {name} ({dtypes})", number)
        elif o.when == "handover" and o.kind == "evidence" and resumes:
            yield from _generators(o, before, after, number)


# float32 roundings of W + scale B A, relative to W: the product is summed over the rank, scaled, added and rounded.
MERGE_ROUNDINGS = 4


def _end_of(before: Record, after: Record, key: str, last: Tensors, start: Tensors) -> dict[str, torch.Tensor]:
    """Returns the weights, by name, that ``after`` should have loaded for the model whose weights have this ``key``.

    last: the weights at the end of the previous phase, by name. start: the weights that the first phase loaded.
    """
    if not _is_merged(after, key) or not last:
        return dict(last)
    lora = before.scenario.lora
    assert lora, "a phase merges adapters only where there are some"
    exact = {name: tensor.double() for name, tensor in last.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in exact.items() if not is_adapter(name)}
    return merged(exact, lora_of(lora, shapes)) | {name: t for name, t in start.items() if is_adapter(name)}


def _bound_of(after: Record, key: str, name: str) -> float:
    """Returns the largest relative distance that a weight may have from the result of ``_end_of``."""
    return MERGE_ROUNDINGS * ROUNDING if _is_merged(after, key) and not is_adapter(name) else 0.0


def _is_merged(after: Record, key: str) -> bool:
    return bool(after.header["loads"] == "merge") and key == "weight"


def _generators(observable: Observable, before: Record, after: Record, step: int) -> Iterator[Measurement]:
    """Compares digests of random generators, which are equal or not. They are restored by a checkpoint if the backend
    and the layout stay the same."""
    same = all(before.header[key] == after.header[key] for key in ("backend", "layout"))
    if not same or after.header["loads"] != "checkpoint":
        return
    end = before.steps[-1] if before.steps else before.loaded
    ranks = zip(after.loaded.line["generators"], end.line["generators"], strict=True)
    for rank, (loaded, saved) in enumerate(ranks):
        for name, digest in saved.items():
            error = 0.0 if loaded.get(name) == digest else math.inf
            tensor = f"{name} of rank {rank}"
            yield Measurement(stage=observable.stage, tensor=tensor, step=step, error=error, fixed=0.0)
