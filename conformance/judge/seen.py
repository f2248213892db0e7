"""Seen: the tensors of one observable in a record, whole or by their sketches, and how far they are from a reference's.

A record may keep sketches of large matrices (conformance.record.sketch). What is kept of their rows takes their place
here: its norms and differences are estimates of theirs. Only where in a tensor the largest difference is, is found
otherwise. Nothing that is as large as a model is held: tensors are read, and differences computed, when they are asked
for.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from conformance.judge.distance import BY_SKETCH, Leeway, Tensors, finite, floor_of, infinite, tensor_off, worst_row
from conformance.judge.tolerance import OF_ROWS, Key, Measurement
from conformance.observable import Observable
from conformance.record.sketch import COLUMNS, NORMS, SAMPLE

KEPT_ROUNDING = 2.0**-40  # of a row's norm: far more than its sums in float64 err, far less than a digit of float32
NO_LEEWAY: Mapping[Key, Leeway] = MappingProxyType({})


class Lazy(Mapping[str, torch.Tensor]):
    """Tensors that are computed when they are asked for, and not kept."""

    def __init__(self, names: Iterable[str], compute: Callable[[str], torch.Tensor]) -> None:
        self._names, self._compute = dict.fromkeys(names), compute

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._compute(name)

    def __contains__(self, name: object) -> bool:  # a Mapping's own would compute the tensor
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The tensors of one observable by name: ``tensors``, of which sketched ones are what is kept of their rows. Of
    these, ``columns``: what is kept of columns. ``norms``: the norms of rows, where they are known and no estimates."""

    tensors: Tensors
    columns: Tensors
    norms: Tensors

    def shape_of(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """The shape of one of ``tensors``; of a sketched one, which has a column for each vector, as a matrix."""
        shape = tuple(tensor.shape)
        return (shape[0], len(self.columns[name])) if name in self.columns else shape

    def since(self, start: "Seen") -> "Seen":
        """The distance of each tensor from where it started."""
        tensors, columns = movement(self.tensors, start.tensors), movement(self.columns, start.columns)
        return Seen(tensors=tensors, columns=columns, norms={})


def named(tensors: Tensors, key: str) -> Tensors:
    """The tensors of one observable, by name without its key."""
    prefix = f"{key}/"
    return Lazy(
        (name.removeprefix(prefix) for name in tensors if name.startswith(prefix)), lambda n: tensors[prefix + n]
    )


def seen(tensors: Tensors, key: str) -> Seen:
    """The same with what is kept beside."""
    beside = {"columns": named(tensors, key + COLUMNS), "norms": named(tensors, key + NORMS)}
    return Seen(tensors=named(tensors, key), **beside)


def elementwise(tensors: Tensors, key: str) -> Tensors:
    """The same with the sample of the elements of a sketched tensor in its place: (1, elements)."""
    found, samples = named(tensors, key), named(tensors, key + SAMPLE)
    return Lazy(found, lambda name: samples[name] if name in samples else found[name])


def changed(own: Tensors, before: Tensors, key: str, name: str) -> tuple[float, str]:
    """The largest change of a row of a sketched tensor by its norm, with the row; (0, "") where none has changed, and
    of a whole tensor. What is less than the rounding of what is kept is no change."""
    rows, norms = f"{key}/{name}", f"{key}{NORMS}/{name}"
    if norms not in own or norms not in before:
        return 0.0, ""
    lengths = before[norms].clamp(min=torch.finfo(torch.float64).tiny)
    moved = torch.maximum((own[rows] - before[rows]).norm(dim=1), (own[norms] - before[norms]).abs()) / lengths
    row = int(moved.argmax())
    most = finite(moved[row].item())
    return (most, f"row {row}{BY_SKETCH}") if most > KEPT_ROUNDING else (0.0, "")


def norm_of(tensors: Tensors, key: str) -> float:
    """2-norm of all tensors of one observable together; of sketched ones, too, it is no estimate."""
    found, norms = named(tensors, key), named(tensors, key + NORMS)
    return math.hypot(*((norms[n] if n in norms else found[n]).double().norm().item() for n in found))


def movement(weights: Tensors, start: Tensors) -> Tensors:
    """Distance of each weight from where it started: an update is judged by its own size, not the weight's."""
    names = (name for name in weights if name in start)
    return Lazy(names, lambda name: weights[name].double() - start[name].double())


def tensors_apart(
    observable: Observable, step: int, own: Seen, reference: Seen, *, leeway: Mapping[Key, Leeway] = NO_LEEWAY
) -> Iterator[Measurement]:
    """The distance of every tensor of the reference, and of its worst row; infinite of what only one of them has.
    ``leeway``: of rows, by the key of the measurement of the worst one."""
    stage, floor = observable.stage, floor_of(reference.tensors)
    for name in reference.tensors:
        if name not in own.tensors:
            yield infinite(stage, f"{name} (missing)", step)
            continue
        x, ref = own.tensors[name], reference.tensors[name]
        shape, expected = own.shape_of(name, x), reference.shape_of(name, ref)
        if shape != expected:
            yield infinite(stage, f"{name} (shape {shape} instead of {expected})", step)
        elif x.shape != ref.shape:
            yield infinite(stage, f"{name} (one record keeps it whole, the other a sketch)", step)
        else:
            sketched = name in reference.columns
            found = tensor_off(stage, name, step, x, ref, floor=floor)
            if sketched:
                found = _located(found, x, ref, own.columns[name], reference.columns[name])
            yield replace(found, fixed=observable.exact_bound)
            if observable.rowwise:
                norms = reference.norms.get(name) if sketched else None
                its_own = leeway.get((stage, f"{name} {OF_ROWS}", step))
                yield worst_row(stage, name, step, x, ref, floor=floor, norms=norms, leeway=its_own)
    for name in own.tensors.keys() - reference.tensors.keys():
        yield infinite(stage, f"{name} (unexpected)", step)


def _located(
    found: Measurement, rows: torch.Tensor, ref_rows: torch.Tensor, columns: torch.Tensor, ref_columns: torch.Tensor
) -> Measurement:
    """A measurement of a sketched tensor with the row and the column that are furthest off. No element is further off
    than the norm of either, which the sketch estimates."""
    off = [(own - ref).norm(dim=1) for own, ref in ((rows, ref_rows), (columns, ref_columns))]
    where = str([int(one.argmax()) for one in off])
    return replace(found, max_abs=finite(min(one.max().item() for one in off)), where=where + BY_SKETCH)
