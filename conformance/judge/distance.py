"""Distance: a tensor, its worst row, or a number, from the one that it should be, as a measurement.

What is left of a difference when a factor is undone is measured with it, so that no factor is named that does not fit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from conformance.judge.tolerance import FLOOR, NOISE_FACTOR, NOISE_LIMIT_OF_ALL, OF_ROWS, ROW_FLOOR, Measurement

Tensors = Mapping[str, torch.Tensor]
BY_SKETCH = " by sketch"  # follows the place of a difference that is not known to the element


@dataclass(frozen=True, kw_only=True)
class Leeway:
    """How far rounding may take the rows of a tensor, where this is more than the bound of its worst row.

    rows: float64 (rows,), absolute. bound: of the worst row, relative; above 0.
    """

    rows: torch.Tensor
    bound: float

    def widened(self, units: torch.Tensor) -> torch.Tensor:
        """``units`` (rows,), the norms that errors are relative to, made so large that an error of ``rows`` is at the
        bound; but no larger than lets an error of half a unit be at the bound, so that no row that is lost, doubled or
        of the wrong sign is within it."""
        most = NOISE_FACTOR * NOISE_LIMIT_OF_ALL * units
        return torch.maximum(units, torch.minimum(self.rows, most) / self.bound)


def floor_of(reference: Tensors) -> float:
    """The least norm that an error of these tensors is relative to."""
    squares = [t.double().square().sum().item() for t in reference.values()]
    return FLOOR * math.sqrt(sum(squares) / max(1, len(squares)))


def tensor_off(stage: str, name: str, step: int, x: torch.Tensor, ref: torch.Tensor, *, floor: float) -> Measurement:
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
        error=finite(off / unit),
        max_abs=finite(furthest),
        where=place(at, ref),
        scale=scale,
        residual=left / unit,
        size=norm / unit,
        broken="" if math.isfinite(off) else _broken(x),
    )


def scale_of(x: torch.Tensor, ref: torch.Tensor) -> tuple[float | None, float]:
    """The factor of ``ref`` that is nearest to ``x``, and the norm of what is left of ``x`` without it. None where
    ``ref`` is zero."""
    flat, ref = x.reshape(-1), ref.reshape(-1)
    square = ref.dot(ref).item()
    if not square:
        return None, math.inf
    scale = flat.dot(ref).item() / square
    return scale, finite(torch.sub(flat, ref, alpha=scale).norm().item())


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
    """The row (of a vector, the element) that is furthest off: one of thousands is lost in the norm of them all.

    Relative to the row's own norm, but no less than ROW_FLOOR times the root mean square of the norms of rows that are
    not zero; of a vector, to that root mean square. ``norms``: those of the reference's rows, if it is sketched. Rows
    with a ``leeway`` are relative to what it makes of that.
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
    broken = _broken(x[at]) if len(errors) and not math.isfinite(off[at].item()) else ""
    # Of a sketched row, no element is further off than its norm says.
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
    """``unit``: what the error is relative to."""
    return Measurement(
        stage=stage,
        tensor=name,
        step=step,
        error=finite(abs(x - ref) / (abs(unit) or 1.0)),
        scalar=True,
        value=x,
        fixed=fixed,
        max_abs=finite(abs(x - ref)),
        scale=x / ref if ref else None,
        size=abs(ref) / (abs(unit) or 1.0),
        broken=_broken(torch.tensor(x, dtype=torch.float64)),
    )


def infinite(stage: str, tensor: str, step: int) -> Measurement:
    """Of what cannot be compared: no bound allows it."""
    return Measurement(stage=stage, tensor=tensor, step=step, error=math.inf, fixed=0.0)


def place(at: int, tensor: torch.Tensor) -> str:
    """The index of an element, given its number in the flattened tensor; "" of a number, and where there is none."""
    # torch's own unravel_index imports sympy, which takes a second.
    return str([int(i) for i in np.unravel_index(at, tensor.shape)]) if tensor.ndim and tensor.numel() else ""


def _broken(x: torch.Tensor) -> str:
    return "NaN" if x.isnan().any() else "infinite numbers" if x.isinf().any() else ""


def finite(error: float) -> float:
    """NaN would pass every comparison; it is as wrong as can be."""
    return math.inf if math.isnan(error) else error
