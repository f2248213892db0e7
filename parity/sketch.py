"""Summarizes a tensor of any size in 131 numbers that add up over its shards.

The numbers are sums (of squares, and of numbers that are not finite), the squares of at most 64 groups of rows,
and a count sketch of 64 buckets: every element has a random sign and a random bucket, and a bucket is the signed sum
of its elements (Charikar, Chen, Farach-Colton, "Finding frequent items in data streams", ICALP 2002; as an estimate
of the second moment: Alon, Matias, Szegedy, "The space complexity of approximating the frequency moments", STOC 1996,
and Thorup, Zhang, "Tabulation based 4-universal hashing with applications to second moment estimation", SODA 2004).

A sketch is linear: the sketch of a difference is the difference of the sketches. Its squared norm estimates the squared
distance of two tensors without bias, with a relative standard deviation of at most sqrt(2 / 64) = 18 %, and so 9 % of
the distance itself. A difference in a single element is exact. Sign and bucket are a hash of the parameter's name and
the element's place in the whole parameter, so the sketches of shards add up to the sketch of the whole, whatever the
sharding.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.numerics.determinism import splitmix64

BUCKETS = 64
ROW_GROUPS = 64
SUMS = ("present", "squares", "not_finite")  # the order in which they are stored
ROWS_AT = len(SUMS)
SKETCH_AT = ROWS_AT + ROW_GROUPS
WIDTH = SKETCH_AT + BUCKETS

# Every bucket is added up in so many places: threads of a GPU that add to one place wait for each other.
LANES = 256
CPU_BLOCK, GPU_BLOCK = 2**15, 2**22  # elements at a time; on a GPU 32 MiB for each of about six temporaries


@dataclass(frozen=True, kw_only=True)
class Box:
    """The part of a whole tensor that a piece holds: offsets and sizes in every dimension (at least one)."""

    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def whole(shape: tuple[int, ...]) -> Box:
    """Give the box of a tensor that is not sharded."""
    shape = shape or (1,)
    return Box(shape=shape, offsets=(0,) * len(shape), sizes=shape)


@torch.no_grad()
def summarize(values: Tensor, box: Box, *, seed: int) -> Tensor:
    """Compute a piece's share of the summary of a tensor: float64 [WIDTH], on the piece's device if that has float64.

    values: the piece, of ``box.sizes`` and any floating dtype. It is read block by block; only where it is not
    contiguous is a copy of it made.
    """
    device = values.device if values.device.type in ("cpu", "cuda") else torch.device("cpu")
    total = torch.zeros(WIDTH, dtype=torch.float64, device=device)
    total[SUMS.index("present")] = 1.0
    rows, width = box.sizes[0], math.prod(box.sizes[1:])
    if rows * width == 0:
        return total
    table = values.detach().reshape(rows, width)
    columns = _columns(box, device=device)  # [width] places within a row of the whole
    lanes = torch.zeros(BUCKETS * LANES, dtype=torch.float64, device=device)
    block = CPU_BLOCK if device.type == "cpu" else GPU_BLOCK
    wide = min(width, block)
    high = max(1, block // wide)
    for top in range(0, rows, high):
        row = box.offsets[0] + torch.arange(top, min(top + high, rows), device=device)  # [high] of the whole
        group = ROWS_AT + row * min(ROW_GROUPS, box.shape[0]) // box.shape[0]
        for left in range(0, width, wide):
            part = table[top : top + high, left : left + wide].to(device).double()  # [high, wide]
            lost = ~part.isfinite()
            part = part.where(~lost, 0.0)
            squares = part.square().sum(1)  # [high]
            total[1:ROWS_AT] += torch.stack([squares.sum(), lost.sum().double()])
            total.index_add_(0, group, squares)
            _add(lanes, part, row[:, None] * math.prod(box.shape[1:]) + columns[left : left + wide], seed=seed)
    total[SKETCH_AT:] = lanes.view(LANES, BUCKETS).sum(0)
    return total


def _columns(box: Box, *, device: torch.device) -> Tensor:
    """Give the places of a piece's elements within a row of the whole tensor, row-major: int64 [elements per row]."""
    places = torch.zeros(1, dtype=torch.int64, device=device)
    for whole_size, offset, size in zip(box.shape[1:], box.offsets[1:], box.sizes[1:], strict=True):
        here = torch.arange(offset, offset + size, device=device)
        places = (places[:, None] * whole_size + here).reshape(-1)
    return places


def _add(lanes: Tensor, values: Tensor, places: Tensor, *, seed: int) -> None:
    """Add signed values [n, m] to their buckets; ``places`` [n, m] are those of the elements in the whole tensor."""
    hashed = splitmix64(places.reshape(-1), seed=seed)
    signed = values.reshape(-1).where(hashed >= 0, -values.reshape(-1))  # the highest bit is the sign
    lane = torch.arange(hashed.numel(), device=hashed.device).bitwise_and_(LANES - 1)
    lanes.index_add_(0, lane.mul_(BUCKETS).add_(hashed.bitwise_and_(BUCKETS - 1)), signed)
