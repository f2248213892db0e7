"""Sketches matrices that are too large for a record. A sketch is compared as the matrix itself would be.

Each row is multiplied by PROJECTIONS random vectors. The projection is linear and keeps norms: the norm of a projected
row is an unbiased estimate of the norm of the row, and the difference of two projections is the projection of the
difference. So the projected rows, (rows, PROJECTIONS), go through the same comparison as a tensor. A sketch also holds

* projected columns, (columns, PROJECTIONS), which locate a difference within a row,
* the exact norm of each row, from which norms of gradients follow to the last digit,
* a sample of elements, (1, SAMPLED + rows + columns) in the tensor's own dtype, with at least one of each row and of
  each column, by which updates and digits are judged element by element.

The random numbers are uniform, have mean 0 and variance 1, and follow from the parameter's name and a position alone.
Every device and version computes the same bits, because several processes compute sketches of tensors (here and in
parity.summaries) that are then subtracted. docs/explanations/tolerances.md proves which errors a sketch detects.
Vectors, such as biases and the weights of norms, are never sketched.

Sketches and digests of a backend's tensors are computed outside of the modes that watch and lift the backend
(conformance.numerics.float64_tier, conformance.worker.evidence). An operator inside of a mode costs as much as a small
kernel, and a model of a billion parameters needs thousands of operators per step.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

PROJECTIONS = 16
SAMPLED = 4096  # sampled elements of a tensor, in addition to one of each row and one of each column
COLUMNS, NORMS, SAMPLE = PARTS = ".columns", ".norms", ".sample"  # suffixes of the key in the names of a sketch's parts
LARGE_MODELS = 500_000_000  # elements of all models of a cell; above, large matrices are sketched
LARGE_MATRIX = 2**16  # elements

_BLOCK = 2**24  # elements of a matrix that are read at a time
_CHUNK = 512  # elements of a row that are summed at a time: rounding grows with the square root of the length
_FRACTION = 2.0**-52  # maps a signed number of 53 bits to [-1, 1)


def seed_of(name: str) -> int:
    """Derives a signed 64-bit seed from the name of a parameter."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)


def splitmix64(positions: Tensor, *, seed: int) -> Tensor:
    """Hashes int64 positions by splitmix64 (Steele, Lea, Flood, OOPSLA 2014).

    The masks are needed because shifts of int64 carry the sign.
    """
    x = positions.mul(-7046029254386353131).add_(seed)
    x.bitwise_xor_((x >> 30).bitwise_and_((1 << 34) - 1)).mul_(-4658895280553007687)
    x.bitwise_xor_((x >> 27).bitwise_and_((1 << 37) - 1)).mul_(-7723592293110705685)
    return x.bitwise_xor_((x >> 31).bitwise_and_((1 << 33) - 1))


@contextmanager
def without_all_modes() -> Iterator[None]:
    """Disables all modes inside of the block, and with them subclasses such as DTensor."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


@contextmanager
def without_modes(tensor: Tensor) -> Iterator[Tensor]:
    """Yields ``tensor`` detached, and disables all modes inside of the block.

    Modes see the detaching itself. So a LeakWatch learns the dtype of the tensor, even if no operator of the backend
    has returned it. For a subclass such as DTensor, modes stay enabled, because torch dispatches modes and subclasses
    by the same mechanism.
    """
    tensor = tensor.detach()
    if type(tensor) is Tensor:
        with without_all_modes():
            yield tensor
    else:
        yield tensor


def sketched_above(requested: int | None, elements: int) -> float:
    """Returns the number of elements above which matrices are sketched.

    requested: the user's threshold, if any. elements: of all models together.
    """
    if requested is not None:
        return requested
    return LARGE_MATRIX if elements > LARGE_MODELS else math.inf


def kept(tensors: Iterable[tuple[str, Tensor]], *, above: float) -> dict[str, Tensor]:
    """Returns what a record keeps of each tensor ``KEY/NAME``, on the CPU: a copy, or the parts of a sketch.

    Raises ValueError for a tensor without memory of its own, such as a DTensor. Where modes are disabled, torch would
    read its memory all the same, and the process would end.
    """
    found = on_cpu(part for name, tensor in tensors for part in _parts(name, tensor, above))
    for name, tensor in found.items():
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            kind = type(tensor).__name__
            raise ValueError(f"{name} is a {kind}, which holds no numbers itself; give those of DTensor.full_tensor()")
    return found


def _parts(name: str, tensor: Tensor, above: float) -> Iterator[tuple[str, Tensor]]:
    with without_modes(tensor) as tensor:
        if tensor.ndim < 2 or tensor.numel() <= above:
            yield name, tensor
            return
        key, _, parameter = name.partition("/")
        for suffix, values in zip(("", *PARTS), _sketch(tensor, parameter), strict=True):
            yield f"{key}{suffix}/{parameter}", values


_Key = TypeVar("_Key")
SMALL = 2**20  # bytes of a tensor that is copied together with others
_TOGETHER = 2**26  # bytes of tensors that are copied at once


def on_cpu(tensors: Iterable[tuple[_Key, Tensor]]) -> dict[_Key, Tensor]:
    """Copies tensors to the CPU. Small tensors of a GPU are copied together, because each copy waits for the GPU.

    Each tensor is read before the next one is asked for, because its memory may then be used again.
    """
    found: dict[_Key, Tensor] = {}
    waiting: dict[_Key, Tensor] = {}
    total = 0
    for key, tensor in tensors:
        if is_small(tensor):
            found[key] = waiting[key] = tensor.clone()
            total += tensor.nbytes
        else:
            found[key] = tensor.to("cpu", copy=True)
        if total > _TOGETHER:
            found |= _together(waiting)
            waiting, total = {}, 0
    return found | _together(waiting)


def is_small(tensor: Tensor) -> bool:
    """Whether copying this tensor to the CPU would mostly be waiting for its GPU."""
    return tensor.device.type != "cpu" and tensor.nbytes <= SMALL and type(tensor) is Tensor


def _together(tensors: Mapping[_Key, Tensor]) -> dict[_Key, Tensor]:
    """Copies tensors to the CPU, those of one dtype and device with one wait."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[_Key]] = defaultdict(list)
    for key, tensor in tensors.items():
        by_kind[tensor.dtype, tensor.device].append(key)
    found: dict[_Key, Tensor] = {}
    with without_all_modes():
        for keys in by_kind.values():
            pieces = torch.cat([tensors[key].flatten() for key in keys]).cpu()
            sizes = [tensors[key].numel() for key in keys]
            for key, piece in zip(keys, pieces.split(sizes), strict=True):
                found[key] = piece.view(tensors[key].shape).clone()
    return found


@torch.no_grad()
def _sketch(tensor: Tensor, parameter: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (rows, columns, norms, sample); dimensions after the first are flattened, and blocks are read in turn."""
    matrix = tensor.reshape(len(tensor), -1)
    height, width = matrix.shape
    of_columns = projections(f"{parameter} columns", width, device=matrix.device)  # rows are multiplied by these
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
    """Draws random vectors, float64 (length, PROJECTIONS): uniform numbers of variance 1 / PROJECTIONS."""
    positions = torch.arange(length * PROJECTIONS, device=device)
    signed = splitmix64(positions, seed=seed_of(name)) >> 11
    return (signed.double() * (_FRACTION * math.sqrt(3 / PROJECTIONS))).view(length, PROJECTIONS)


def sampled(parameter: str, height: int, width: int, *, device: torch.device) -> Tensor:
    """Draws the positions (SAMPLED + height + width,) of the sampled elements in the flattened matrix.

    SAMPLED positions are anywhere, one is in each row, and one in each column. All elements are equally likely, and an
    element may be drawn twice.
    """
    numbers = torch.arange(SAMPLED + height + width, device=device)
    hashed = splitmix64(numbers, seed=seed_of(f"{parameter} sample")).bitwise_and_(2**63 - 1)
    anywhere, of_rows, of_columns = hashed.split([SAMPLED, height, width])
    in_rows = torch.arange(height, device=device) * width + of_rows % width
    in_columns = of_columns % height * width + torch.arange(width, device=device)
    return torch.cat([anywhere % (height * width), in_rows, in_columns])


def numbers_kept(shape: tuple[int, ...], *, above: float) -> int:
    """Counts the numbers that a record keeps of a tensor of this shape."""
    whole = math.prod(shape)
    if len(shape) < 2 or whole <= above:
        return whole
    height, width = shape[0], whole // shape[0]
    return height * (PROJECTIONS + 2) + width * (PROJECTIONS + 1) + SAMPLED


def is_part(name: str) -> bool:
    """Returns whether a tensor of a record is a part of a sketch other than the projected rows."""
    return name.partition("/")[0].endswith(PARTS)


def is_projected(name: str, names: Container[str]) -> bool:
    """Returns whether a tensor of a record with these ``names`` belongs to a sketch and is not its sample."""
    key, _, parameter = name.partition("/")
    return not key.endswith(SAMPLE) and f"{key_of(name)}{SAMPLE}/{parameter}" in names


def key_of(name: str) -> str:
    """Returns the key of the observable to which a tensor of a record belongs."""
    key = name.partition("/")[0]
    return next((key.removesuffix(part) for part in PARTS if key.endswith(part)), key)


def whole_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the original tensors by name. A sketched tensor has the shape of its flattened matrix."""
    originals = {}
    for name, shape in shapes.items():
        if not is_part(name):
            key, _, parameter = name.partition("/")
            columns = shapes.get(f"{key}{COLUMNS}/{parameter}")
            originals[name] = (shape[0], columns[0]) if columns else shape
    return originals
