"""Sketch: what a record keeps of a matrix that is too large for it; judged as the matrix itself would be.

Rows are multiplied by PROJECTIONS random vectors. That is linear and keeps norms: the norm of a row of the result
estimates the norm of the row, without bias, and the difference of two results is the result of the difference. So what
is kept of rows, (rows, PROJECTIONS), goes through the same comparison as a tensor does. Beside it are kept

* the same of columns, (columns, PROJECTIONS): where in a row the difference is,
* the norm of each row, as it is: norms of gradients follow from them to the last digit,
* a sample of elements, (1, SAMPLED + rows + columns) in the tensor's own dtype, one of each row and of each column
  among them: updates and digits are judged element by element.

The random numbers are uniform, of mean 0 and variance 1, and follow from the parameter's name. docs/tolerances.md
proves what a sketch can and cannot see. Vectors, such as biases and the weights of norms, are always kept whole.
"""

import math
from collections.abc import Container, Mapping

import torch
from torch import Tensor

from conformance.numerics.determinism import seed_of, splitmix64, without_modes

PROJECTIONS = 16
SAMPLED = 4096  # elements of a tensor, beside one of each row and one of each column
COLUMNS, NORMS, SAMPLE = PARTS = ".columns", ".norms", ".sample"  # follow the key in the names of what is kept
LARGE_MODELS = 500_000_000  # elements of all models of a cell, from which on its large matrices are sketched
LARGE_MATRIX = 2**16  # elements

_BLOCK = 2**24  # elements of a matrix that are read at a time
_CHUNK = 512  # elements of a row that are added up at a time: the rounding of a sum grows with the root of its length
_FRACTION = 2.0**-52  # of a signed number of 53 bits, to [-1, 1)


def sketched_above(asked: int | None, elements: int) -> float:
    """Matrices with more elements than this are sketched. ``asked``: by the user. ``elements``: of all models."""
    if asked is not None:
        return asked
    return LARGE_MATRIX if elements > LARGE_MODELS else math.inf


def kept(name: str, tensor: Tensor, *, above: float) -> dict[str, Tensor]:
    """What a record keeps of a tensor ``KEY/NAME``, on the CPU: a copy, or the parts of a sketch, by name."""
    with without_modes(tensor) as tensor:
        if tensor.ndim < 2 or tensor.numel() <= above:
            return {name: tensor.to("cpu", copy=True)}
        key, _, parameter = name.partition("/")
        rows, columns, norms, sample = _sketch(tensor, parameter)
        parts = {key: rows, key + COLUMNS: columns, key + NORMS: norms, key + SAMPLE: sample}
        return {f"{part}/{parameter}": found.cpu() for part, found in parts.items()}


@torch.no_grad()
def _sketch(tensor: Tensor, parameter: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows, columns, norms, sample) of a tensor whose dimensions after the first are one; read block by block."""
    matrix = tensor.reshape(len(tensor), -1)
    height, width = matrix.shape
    of_columns = projections(f"{parameter} columns", width, device=matrix.device)  # what rows are multiplied by
    of_rows = projections(f"{parameter} rows", height, device=matrix.device)
    rows, norms = torch.zeros_like(of_rows), torch.zeros_like(of_rows[:, 0])
    columns = torch.zeros_like(of_columns)
    high = max(1, _BLOCK // width)
    for top in range(0, height, high):
        here = slice(top, top + high)
        block = matrix[here].double()
        norms[here] = block.square().sum(1).sqrt()
        columns += block.T @ of_rows[here]
        for left in range(0, width, _CHUNK):
            rows[here] += block[:, left : left + _CHUNK] @ of_columns[left : left + _CHUNK]
    at = sampled(parameter, height, width, device=matrix.device)
    return rows, columns, norms, matrix[at // width, at % width][None]


def projections(name: str, length: int, *, device: torch.device) -> Tensor:
    """The random vectors, float64 (length, PROJECTIONS): uniform numbers of variance 1 / PROJECTIONS."""
    places = torch.arange(length * PROJECTIONS, device=device)
    signed = splitmix64(places, seed=seed_of(name)) >> 11
    return (signed.double() * (_FRACTION * math.sqrt(3 / PROJECTIONS))).view(length, PROJECTIONS)


def sampled(parameter: str, height: int, width: int, *, device: torch.device) -> Tensor:
    """The places (SAMPLED + height + width,) of the sampled elements in the flattened matrix: some anywhere, one in
    each row, and one in each column. All elements are equally likely, and one may be there twice."""
    numbers = torch.arange(SAMPLED + height + width, device=device)
    hashed = splitmix64(numbers, seed=seed_of(f"{parameter} sample")).bitwise_and_(2**63 - 1)
    anywhere, of_rows, of_columns = hashed.split([SAMPLED, height, width])
    in_rows = torch.arange(height, device=device) * width + of_rows % width
    in_columns = of_columns % height * width + torch.arange(width, device=device)
    return torch.cat([anywhere % (height * width), in_rows, in_columns])


def numbers_kept(shape: tuple[int, ...], *, above: float) -> int:
    """How many numbers a record keeps of a tensor of this shape."""
    whole = math.prod(shape)
    if len(shape) < 2 or whole <= above:
        return whole
    height, width = shape[0], whole // shape[0]
    return height * (PROJECTIONS + 2) + width * (PROJECTIONS + 1) + SAMPLED


def is_part(name: str) -> bool:
    """Whether a tensor of a record is no tensor by itself, but a part of a sketch beside that of its rows."""
    return name.partition("/")[0].endswith(PARTS)


def is_projected(name: str, names: Container[str]) -> bool:
    """Whether a tensor of a record with these ``names`` is part of a sketch, and not the sample of its elements."""
    key, _, parameter = name.partition("/")
    return not key.endswith(SAMPLE) and f"{key_of(name)}{SAMPLE}/{parameter}" in names


def key_of(name: str) -> str:
    """The key of the observable that a tensor of a record belongs to."""
    key = name.partition("/")[0]
    return next((key.removesuffix(part) for part in PARTS if key.endswith(part)), key)


def whole_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of tensors by name, from those of what is kept of them; of a sketched one as a matrix."""
    found = {}
    for name, shape in shapes.items():
        if not is_part(name):
            key, _, parameter = name.partition("/")
            columns = shapes.get(f"{key}{COLUMNS}/{parameter}")
            found[name] = (shape[0], columns[0]) if columns else shape
    return found
