"""Views the tensors of one observable at a step, whole or as sketches, and measures them against a reference.

A measurement also has the part of the difference that is left without a common factor, so that a factor that does not
fit is never named as a cause.

A record may keep sketches of large matrices (conformance.numerics.sketch). The projected rows of a sketch replace the
matrix: their norms and differences are estimates of those of the matrix. Only the position of the largest difference is
found in another way. Differences are computed on demand, and not kept.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np
import torch

from conformance.judge.tolerance import NOISE_FACTOR, NOISE_LIMIT_OF_ALL, OF_ROWS, ROW_FLOOR, Key, Measurement
from conformance.numerics.comparison import finite, floor_of, not_finite, relative, scale_of
from conformance.numerics.sketch import COLUMNS, NORMS, SAMPLE
from conformance.spec.observables import Observable

Tensors = Mapping[str, torch.Tensor]
BY_SKETCH = " by sketch"  # marks the position of a difference that is not known to the element


@dataclass(frozen=True, kw_only=True)
class Leeway:
    """How far rounding may move the rows of a tensor, where this exceeds the bound of its worst row.

    rows: float64 (rows,), absolute. bound: of the worst row, relative; above 0.
    """

    rows: torch.Tensor
    bound: float

    def widened(self, units: torch.Tensor) -> torch.Tensor:
        """Enlarges ``units`` (rows,), the norms that errors are relative to, until an error of ``rows`` equals the
        bound. The limit is a unit at which an error of half the original unit equals the bound, so that no row that
        is lost, doubled or of the wrong sign is within it."""
        most = NOISE_FACTOR * NOISE_LIMIT_OF_ALL * units
        return torch.maximum(units, torch.minimum(self.rows, most) / self.bound)


def floor_of_tensors(reference: Tensors) -> float:
    """Returns the least norm that an error of these tensors is relative to."""
    return floor_of(tensor.double().square().sum().item() for tensor in reference.values())


def tensor_off(
    stage: str,
    name: str,
    step: int,
    x: torch.Tensor,
    ref: torch.Tensor,
    *,
    floor: float,
    fixed: float | None = None,
) -> Measurement:
    x, ref = x.double(), ref.double()
    difference = (x - ref).abs()
    off, norm = difference.norm().item(), ref.norm().item()
    unit = max(norm, floor) or 1.0
    scale, left = scale_of(x, ref)
    at = int(difference.argmax()) if difference.numel() else 0
    furthest = difference.view(-1)[at].item() if difference.numel() else 0.0
    return Measurement(
        stage=stage,
        tensor=name,
        step=step,
        error=relative(off, unit),
        max_abs=finite(furthest),
        where=place(at, ref),
        scale=scale,
        residual=left / unit,
        size=norm / unit,
        fixed=fixed,
        broken="" if math.isfinite(off) else not_finite(x),
    )


def worst_row(
    stage: str,
    name: str,
    step: int,
    x: torch.Tensor,
    ref: torch.Tensor,
    *,
    floor: float,
    norms: torch.Tensor | None = None,
    leeway: Leeway | None = None,
) -> Measurement:
    """Measures the row (of a vector, the element) that is furthest off: the norm of the tensor hides one of thousands.

    The error is relative to the row's own norm, but at least to ROW_FLOOR times the root mean square of the norms of
    nonzero rows; of a vector, to that root mean square. ``norms``: of a sketched reference's rows. ``leeway`` widens
    these.
    """
    sketched = norms is not None
    x, ref = x.double().reshape(len(x) if x.ndim else 1, -1), ref.double().reshape(len(ref) if ref.ndim else 1, -1)
    off = (x - ref).norm(dim=1)
    norms = ref.norm(dim=1) if norms is None else norms
    touched = norms[norms > 0]
    typical = touched.square().mean().sqrt().item() if len(touched) else 0.0
    least = typical * (ROW_FLOOR if x.shape[1] > 1 else 1.0)
    least = max(least, floor / math.sqrt(max(1, len(touched)))) or 1.0
    units = norms.clamp(min=least)
    units = leeway.widened(units) if leeway else units
    errors = off / units
    at = int(errors.argmax()) if len(errors) else 0
    unit = units[at].item() if len(errors) else 1.0
    scale, left = scale_of(x[at], ref[at]) if len(errors) else (None, math.inf)
    broken = not_finite(x[at]) if len(errors) and not math.isfinite(off[at].item()) else ""
    # No element of a sketched row is further off than the norm of the row.
    furthest = 0.0 if not x.numel() else off[at].item() if sketched else (x[at] - ref[at]).abs().max().item()
    return Measurement(
        stage=stage,
        tensor=f"{name} {OF_ROWS}",
        step=step,
        error=finite(errors.max().item() if len(errors) else 0.0),
        max_abs=finite(furthest),
        where=f"row {at}" + BY_SKETCH * sketched,
        of_row=True,
        scale=scale,
        residual=left / unit,
        size=norms[at].item() / unit if len(errors) else 0.0,
        broken=broken,
    )


def number_off(
    stage: str, name: str, step: int, x: float, ref: float, *, unit: float, fixed: float | None
) -> Measurement:
    """Measures a number. ``unit``: what the error is relative to."""
    return Measurement(
        stage=stage,
        tensor=name,
        step=step,
        error=relative(abs(x - ref), abs(unit) or 1.0),
        scalar=True,
        value=x,
        fixed=fixed,
        max_abs=finite(abs(x - ref)),
        scale=x / ref if ref else None,
        size=abs(ref) / (abs(unit) or 1.0),
        broken=not_finite(np.float64(x)),
    )


def infinite(stage: str, tensor: str, step: int) -> Measurement:
    """Returns the measurement of a quantity that cannot be compared: no bound allows it."""
    return Measurement(stage=stage, tensor=tensor, step=step, error=math.inf, fixed=0.0)


def place(at: int, tensor: torch.Tensor) -> str:
    """Returns the index of element number ``at`` of the flattened tensor; empty for a scalar or an empty tensor."""
    # torch's own unravel_index imports sympy, which takes a second.
    return str([int(i) for i in np.unravel_index(at, tensor.shape)]) if tensor.ndim and tensor.numel() else ""


KEPT_ROUNDING = 2.0**-40  # relative, of a row's norm: far above its float64 rounding, far below that of float32
NO_LEEWAY: Mapping[Key, Leeway] = MappingProxyType({})


class Lazy(Mapping[str, torch.Tensor]):
    """Computes tensors on demand, and does not keep them."""

    def __init__(self, names: Iterable[str], compute: Callable[[str], torch.Tensor]) -> None:
        self._names, self._compute = dict.fromkeys(names), compute

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._compute(name)

    def __contains__(self, name: object) -> bool:  # Mapping's implementation would compute the tensor
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def movement(weights: Tensors, start: Tensors) -> Tensors:
    """Returns the distance of each weight from its start: an update is judged by its own size, not the weight's.

    It is NaN if the weight has another shape than at its start.
    """

    def distance(name: str) -> torch.Tensor:
        weight, first = weights[name].double(), start[name].double()
        return weight - first if weight.shape == first.shape else torch.full_like(weight, math.nan)

    return Lazy((name for name in weights if name in start), distance)


@dataclass(frozen=True, kw_only=True)
class TensorView:
    """The tensors of one observable at one step of a record, by the name of their parameter or row.

    tensors: whole tensors, and the projected rows of sketched ones. columns: the projected columns of sketched tensors.
    norms: the exact norms of their rows. samples: some of their elements.
    """

    tensors: Tensors
    columns: Tensors = field(default_factory=dict)
    norms: Tensors = field(default_factory=dict)
    samples: Tensors = field(default_factory=dict)

    @cached_property
    def elements(self) -> Tensors:
        """Returns the whole tensors, and the sample (1, elements) of each sketched tensor."""
        samples, tensors = self.samples, self.tensors
        return Lazy(tensors, lambda name: samples[name] if name in samples else tensors[name])

    @cached_property
    def floor(self) -> float:
        """Returns the least norm that an error of these tensors is relative to."""
        return floor_of_tensors(self.tensors)

    @property
    def norm(self) -> float:
        """Returns the 2-norm of all tensors together; exact for sketched tensors, too."""
        parts = (self.norms[name] if name in self.norms else self.tensors[name] for name in self.tensors)
        return math.hypot(*(part.double().norm().item() for part in parts))

    def shape_of(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """Returns the shape of one of ``tensors``; for a sketched one, that of the matrix."""
        shape = tuple(tensor.shape)
        return (shape[0], len(self.columns[name])) if name in self.columns else shape

    def since(self, start: "TensorView") -> "TensorView":
        """Returns the distance of each tensor from its start."""
        return TensorView(tensors=movement(self.tensors, start.tensors), columns=movement(self.columns, start.columns))

    def changed_row(self, before: "TensorView", name: str) -> tuple[float, str]:
        """Returns the largest relative change of a row of a sketched tensor, and the row; (0, "") where no row has
        changed, and for a whole tensor. Changes below the rounding of the sketch do not count."""
        if name not in self.norms or name not in before.norms:
            return 0.0, ""
        own, earlier = self.norms[name], before.norms[name]
        lengths = earlier.clamp(min=torch.finfo(torch.float64).tiny)
        moved = torch.maximum((self.tensors[name] - before.tensors[name]).norm(dim=1), (own - earlier).abs()) / lengths
        row = int(moved.argmax())
        most = finite(moved[row].item())
        return (most, f"row {row}{BY_SKETCH}") if most > KEPT_ROUNDING else (0.0, "")

    def errors(
        self, reference: "TensorView", observable: Observable, step: int, *, leeway: Mapping[Key, Leeway] = NO_LEEWAY
    ) -> Iterator[Measurement]:
        """Measures every tensor of the reference, and its worst row; infinite for a tensor that only one side has.
        ``leeway``: of rows, by the key of the measurement of the worst row."""
        stage, floor = observable.stage, reference.floor
        for name in reference.tensors:
            if name not in self.tensors:
                yield infinite(stage, f"{name} (missing)", step)
                continue
            x, ref = self.tensors[name], reference.tensors[name]
            shape, expected = self.shape_of(name, x), reference.shape_of(name, ref)
            if shape != expected:
                yield infinite(stage, f"{name} (shape {shape} instead of {expected})", step)
            elif x.shape != ref.shape:
                yield infinite(stage, f"{name} (one record keeps it whole, the other a sketch)", step)
            else:
                sketched = name in reference.columns
                found = tensor_off(stage, name, step, x, ref, floor=floor, fixed=observable.exact_bound)
                if sketched:
                    found = _located(found, x, ref, self.columns[name], reference.columns[name])
                yield found
                if observable.rowwise:
                    norms = reference.norms.get(name) if sketched else None
                    its_own = leeway.get((stage, f"{name} {OF_ROWS}", step))
                    yield worst_row(stage, name, step, x, ref, floor=floor, norms=norms, leeway=its_own)
        for name in self.tensors.keys() - reference.tensors.keys():
            yield infinite(stage, f"{name} (unexpected)", step)


class StepViews:
    """Makes the views of all observables at one step of a record, by key, once each."""

    def __init__(self, tensors: Tensors) -> None:
        self._parts: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for path, tensor in tensors.items():
            key, _, name = path.partition("/")
            self._parts[key][name] = tensor
        self._views: dict[str, TensorView] = {}

    def __getitem__(self, key: str) -> TensorView:
        """Returns the view of an observable; an empty one if the step has no tensor of it."""
        if key not in self._views:
            tensors, columns, norms, samples = (
                self._parts.get(key + part, {}) for part in ("", COLUMNS, NORMS, SAMPLE)
            )
            self._views[key] = TensorView(tensors=tensors, columns=columns, norms=norms, samples=samples)
        return self._views[key]


def _located(
    found: Measurement, rows: torch.Tensor, ref_rows: torch.Tensor, columns: torch.Tensor, ref_columns: torch.Tensor
) -> Measurement:
    """Adds the row and the column that are furthest off to the measurement of a sketched tensor. No element is further
    off than the norm of either, which the sketch estimates."""
    off = [(own - ref).norm(dim=1) for own, ref in ((rows, ref_rows), (columns, ref_columns))]
    where = str([int(one.argmax()) for one in off])
    return replace(found, max_abs=finite(min(one.max().item() for one in off)), where=where + BY_SKETCH)
