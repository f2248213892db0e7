"""Measures the direction of errors: how much of the error of a gradient or a weight lies along the reference.

Rounding errors point in any direction, so a single error of n elements has about 1/sqrt(n) of its size along the
reference. A wrong factor, a wrong scale of attention or a lost weight decay lies along it as a whole. So the scale
<x, ref> / <ref, ref> shows what the size of the error hides: in bf16 a gradient is 1e-2 to 4e-2 off, its scale 1e-3.

The scale is measured for all gradients of a step, and over all steps for the gradients of each layer and of each module
in all layers; for all weights after a step, and for those of each module in all layers; and for the log-probs of all
steps, where weights show that drift on one of several ranks. Its noise is that of the same scale in a single-process
run. One run is one draw, so the noise is at least what independent errors of the tensors would give, and at least a
part of the whole error (``Along.typical``). An objective that weights each token with its probability scales all
gradients by what rounding adds to the probabilities, so the noise is also at least that (``Directions.shift``).

Of many numbers, the size of all errors together hardly depends on the draw either: in half precision, honest gradients
and log-probs of all steps are 0.8 to 1.2 times as far from float64 as a single process
(docs/measurements/tolerances.md). So it has a bound of its own, SIZE_FACTOR. And rounding makes few elements of a
gradient 0 where they should not be.
"""

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from conformance.judge.tensor_views import TensorView
from conformance.judge.tolerance import NORM_ROUNDINGS, ROUNDING, Measurement
from conformance.numerics.comparison import finite
from conformance.results.verdict import Quantity
from conformance.spec.observables import SHARE, Observable
from conformance.spec.precision import Precision

# Least part of a whole error that is taken to lie along the reference. Errors of gradients have directions in common:
# those of the loss or of values scale all of them. An update hardly depends on the direction of its weight.
# The gradient of a preference has a factor that depends on its margin, a sum over all its tokens: its rounding scales
# all of them.
PART_OF_GRADIENTS, PART_OF_PAIRS, PART_OF_WEIGHTS = 1 / 6, 1 / 2, 1 / 32
PART_OF_ROWS = 1 / 16
SIZE_FACTOR = 1.5  # times the single process, for the size of all errors together
OUTLYING = 5.0  # times the median step; of five normal errors the largest is more in one case of 12
SAMPLING = 4.0  # standard deviations of that size, which is known to 1 / sqrt(n) at worst
ZEROS = 2e-3  # fraction of elements of a gradient that rounding may make 0, a third of the bound
LAYER = re.compile(r"(?<=\.)(\d+)\.")
SCALE, SIZE = ": scale", ": size"
ALL_STEPS = " of all steps"
SIZE_OF_ALL = f"{SIZE} of all errors"
ROWS = "logprob"  # key of the rows whose direction is measured


def is_summed_in(tensor: str, scale: str) -> bool:
    """Tells whether a scale, such as ``gradient: scale of layer 1``, or the size of all errors, belongs to several
    tensors, one of which is ``tensor``."""
    of = scale.partition(SCALE)[2]
    layer = LAYER.search(tensor)
    return of in ("", ALL_STEPS, f" of {LAYER.sub('*.', tensor, count=1)}") or bool(
        layer and of == f" of layer {layer[1]}"
    )


def within_noise(quantities: Sequence[Quantity], precision: str) -> list[str]:
    """Lists the errors that rounding of half precision hides, by the bounds of the quantities that are judged over all
    steps."""
    listed = []
    for q in quantities:
        key, _, number = q.tensor.partition(": ")
        if f": {number}" == SIZE_OF_ALL:
            listed.append(f"errors of {key} below {q.allowed:.2%} in {precision}")
        elif f": {number}" == SCALE + ALL_STEPS and not key.endswith(ROWS):
            listed.append(f"{key} scaled by less than {q.allowed:.2%} in {precision}")
    return listed


@dataclass(kw_only=True)
class Along:
    """Sums over tensors: <x - ref, ref>, its squares, ||x - ref||^2, ||ref||^2 and the number of elements. ``part``:
    the least part of the whole error along the reference. ``zeros``: elements that are 0 where ``nonzero`` are not."""

    part: float
    along: float = 0.0
    squares: float = 0.0
    errors: float = 0.0
    size: float = 0.0
    elements: int = 0
    zeros: int = 0
    nonzero: int = 0

    def add(self, error: torch.Tensor, ref: torch.Tensor, floor: float) -> None:
        """Adds a tensor, whose norm counts as ``floor`` at least."""
        along = float(error @ ref)
        self.along += along
        self.squares += along**2
        self.errors += float(error @ error)
        self.size += max(float(ref @ ref), floor**2)
        self.elements += ref.numel()

    @property
    def error(self) -> float:
        """Returns the distance of the scale from 1."""
        return finite(abs(self.along) / (self.size or 1.0))

    @property
    def whole(self) -> float:
        """Returns the relative error of all tensors together."""
        return finite(math.sqrt(self.errors / (self.size or 1.0)))

    @property
    def typical(self) -> float:
        """Returns the least noise of the scale: of independent tensors, of one error of so many elements, and of the
        float32 operations that all elements share."""
        independent = finite(math.sqrt(self.squares) / (self.size or 1.0))
        part = max(self.part, 2 / math.sqrt(max(1, self.elements)))  # twice what a random direction gives
        return max(independent, part * self.whole, NORM_ROUNDINGS * ROUNDING)

    def typical_of_norm(self, shift: float) -> float:
        """Returns the least noise of the norm of all tensors: that of their scale, at least ``shift``, and what errors
        across add."""
        return max(self.typical, shift) + self.whole**2 / 2


@dataclass(kw_only=True)
class Directions:
    """Collects the directions of gradients and weights over the steps of a run; of none in the exact tier, whose one
    bound is far below any error of a scale."""

    precision: Precision
    part_of_gradients: float = PART_OF_GRADIENTS
    shifts: dict[int, tuple[float, float]] = field(default_factory=dict)  # by step: sums of p * error, and of p
    pools: dict[tuple[str, str, int | None], Along] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)

    def add(self, o: Observable, step: int, own: TensorView, reference: TensorView) -> None:
        """Adds the tensors or rows of one step that both have. Those of a gradient also count over all steps."""
        is_judged = o.kind != "rows" or (self.precision.is_half and o.key.rpartition(".")[2] == ROWS)
        if self.precision.is_exact or not is_judged:
            return
        self.last[o.stage] = step
        if o.weights_gradients:
            self._add_probabilities(step, own, reference)
        floor = reference.floor
        pooled = step if o.change else None
        for name, tensor in reference.tensors.items():
            if name not in own.tensors or own.tensors[name].shape != tensor.shape:
                continue
            ref = tensor.double().flatten()
            error = own.tensors[name].double().flatten() - ref
            layer = LAYER.search(name)
            pools: list[tuple[str, int | None]] = [(ALL_STEPS, None)] if self.precision.is_half and not o.change else []
            if o.kind == "tensors":
                pools += [("", step), (f" of {LAYER.sub('*.', name, count=1)}", pooled)]
            if layer and not o.change:
                pools.append((f" of layer {layer[1]}", pooled))
            for of, at in pools:
                part = PART_OF_ROWS if o.kind == "rows" else PART_OF_WEIGHTS if o.change else self.part_of_gradients
                found = self.pools.setdefault((o.stage, f"{o.key}{SCALE}{of}", at), Along(part=part))
                found.add(error, ref, floor)
                if of == ALL_STEPS:
                    found.zeros += int(((error == -ref) & (ref != 0)).sum())
                    found.nonzero += int((ref != 0).sum())

    def _add_probabilities(self, step: int, own: TensorView, reference: TensorView) -> None:
        moved = whole = 0.0
        for name, ref in reference.tensors.items():
            if name in own.tensors and own.tensors[name].shape == ref.shape:
                probabilities = ref.double().exp()
                moved += float(probabilities @ (own.tensors[name].double() - ref.double()))
                whole += float(probabilities.sum())
        self.shifts[step] = moved, whole

    @property
    def shift(self) -> float:
        """Returns the largest relative error of the mean probability of a step, to first order in log-probs; at most
        OUTLYING times that of a median step, and that of a gradient by which a cell can be judged."""
        errors = [finite(abs(moved) / (whole or 1.0)) for moved, whole in self.shifts.values()] or [0.0]
        return min(max(errors), OUTLYING * statistics.median(errors), self.precision.noise_limit)

    def of_gradients(self, o: Observable, step: int) -> float:
        """Returns the least noise of the norm of all gradients of a step; 0 where they are not recorded."""
        found = (one for (_, tensor, at), one in self.pools.items() if (tensor, at) == (f"{o.norm_of}{SCALE}", step))
        return next((one.typical_of_norm(self.shift) for one in found), 0.0)

    def measurements(self) -> Iterator[Measurement]:
        """Yields one measurement of each scale; those of all steps are at the last step."""
        for (stage, tensor, step), found in self.pools.items():
            yield Measurement(
                stage=stage,
                tensor=tensor,
                step=self.last[stage] if step is None else step,
                error=found.error,
                scalar=True,
                scale=1 + found.along / (found.size or 1.0),
                size=1.0,
                typical=max(found.typical, self.shift if tensor.startswith("gradient") else 0.0),
            )
            if tensor.endswith(ALL_STEPS):
                key, at = tensor.partition(SCALE)[0], self.last[stage]
                yield Measurement(
                    stage=stage,
                    tensor=key + SIZE_OF_ALL,
                    step=at,
                    error=found.whole,
                    scalar=True,
                    factor=SIZE_FACTOR * (1 + SAMPLING / math.sqrt(found.elements)),
                )
                if not key.endswith(ROWS):
                    yield Measurement(
                        stage=stage,
                        tensor=f"{key}{SHARE}that are 0 where the oracle's are not",
                        step=at,
                        error=found.zeros / max(1, found.nonzero),
                        scalar=True,
                        typical=ZEROS,
                    )
