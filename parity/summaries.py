"""Finds the pieces of each parameter that a rank holds, summarizes them, and sums the summaries over ranks.

A sketch summarizes a tensor of any size in 131 numbers that add up over its shards. The numbers are sums (of squares,
and of numbers that are not finite), the squares of at most 64 groups of rows, and a count sketch of 64 buckets: every
element has a random sign and a random bucket, and a bucket is the signed sum of its elements (Charikar, Chen,
Farach-Colton, "Finding frequent items in data streams", ICALP 2002; as an estimate of the second moment: Alon,
Matias, Szegedy, "The space complexity of approximating the frequency moments", STOC 1996, and Thorup, Zhang,
"Tabulation based 4-universal hashing with applications to second moment estimation", SODA 2004).

A sketch is linear: the sketch of a difference is the difference of the sketches. Its squared norm estimates the squared
distance of two tensors without bias, with a relative standard deviation of at most sqrt(2 / 64) = 18 %, and so 9 % of
the distance itself. A difference in a single element is exact. Sign and bucket are a hash of the parameter's name and
the element's place in the whole parameter, so the sketches of shards add up to the sketch of the whole, whatever the
sharding.

Where a rank's elements lie in the whole parameter is found by parity/optimizer_shards.py. Pieces that
several ranks hold are counted once, on the first of these ranks, so that sums over ranks are sums over elements.

All sums of a step are one all_reduce. Each rank has slots in it for a checksum of each of its pieces, by which replicas
are compared. An error of one rank is raised on all ranks: the other ranks would wait for it in their next collective.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from conformance.core.errors import UsageError, one_line, shown
from conformance.numerics.sketch import seed_of, splitmix64
from parity.differences import Names, canonical
from parity.optimizer_shards import Box, Fragment, Held, fragments_of, whole_shape
from parity.record_files import Arrays, Line

BUCKETS = 64
ROW_GROUPS = 64
SUMS = ("present", "squares", "not_finite")  # the order in which they are stored
ROWS_AT = len(SUMS)
SKETCH_AT = ROWS_AT + ROW_GROUPS
WIDTH = SKETCH_AT + BUCKETS

# Every bucket is added up in so many places: threads of a GPU that add to one place wait for each other.
LANES = 256
CPU_BLOCK, GPU_BLOCK = 2**15, 2**22  # elements at a time; on a GPU 32 MiB for each of about six temporaries


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


T = TypeVar("T")


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


def add_up(vector: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place unless its device cannot communicate; collective."""
    if world_size() > 1:
        if dist.get_backend() == "nccl" and not vector.is_cuda:
            vector = vector.cuda()
        dist.all_reduce(vector)
    return vector


def together(action: Callable[[], T]) -> T:
    """Run ``action``, which may differ from rank to rank, and return this rank's result; collective.

    If it fails on a rank, all ranks raise: this rank its own error, the other ranks a UsageError with the same
    message, or a RuntimeError that names the failed rank if the error is not a UsageError. The action makes no
    collective calls.
    """
    try:
        result = action()
    except Exception as error:  # whatever it is, the other ranks need its message
        _agree(error)
        raise
    _agree(None)
    return result


def _agree(error: Exception | None) -> None:
    """Raise the error of one rank on the other ranks. If no rank has one, a single number is exchanged."""
    if world_size() == 1 or not add_up(torch.tensor(float(error is not None))):
        return
    own = None if error is None else (isinstance(error, UsageError), one_line(error))
    errors: list[tuple[bool, str] | None] = [None] * world_size()
    dist.all_gather_object(errors, own)
    if error is not None:
        return
    rank, (is_usage, message) = next((rank, one) for rank, one in enumerate(errors) if one is not None)
    raise UsageError(message) if is_usage else RuntimeError(f"rank {rank} failed: {message}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """What a rank holds of one canonical name: boxes of a parameter, or of some rows of a fused one.

    shape: of all boxes together. stepped: the tensor that holds these boxes, and their gradient.
    place: where the name comes in the order of the model: by part of the model, if a rank has several, and number.
    """

    name: str
    parameter: nn.Parameter
    stepped: Tensor
    fragments: tuple[Fragment, ...]
    shape: tuple[int, ...]
    place: tuple[int, int]
    group: str | None

    @property
    def boxes(self) -> tuple[Any, ...]:
        return tuple((fragment.box.offsets, fragment.box.sizes) for fragment in self.fragments)

    def values(self, tensor: Tensor) -> list[Tensor]:
        """Read the values of each fragment from a tensor that is sharded like the stepped one."""
        if isinstance(tensor, DTensor):
            assert isinstance(self.stepped, DTensor)
            if tensor.placements != self.stepped.placements:  # a gradient that waits for its sum, of a copy here
                tensor = tensor.redistribute(self.stepped.device_mesh, self.stepped.placements)
            tensor = tensor.to_local()
        return [fragment.values(tensor) for fragment in self.fragments]

    def summary(self, values: Sequence[Tensor], *, device: torch.device) -> Tensor:
        """Sum the summaries of the fragments' values: float64 [WIDTH]."""
        total = torch.zeros(WIDTH, dtype=torch.float64, device=device)
        for fragment, value in zip(self.fragments, values, strict=True):
            total += summarize(value, fragment.box, seed=seed_of(self.name)).to(device)
        total[SUMS.index("present")] = float(bool(self.fragments))
        return total


def pieces_of(parameters: Sequence[Held], names: Names | None) -> tuple[Piece, ...]:
    """List the pieces of what a rank holds of all parameters, in the order in which the model defines them."""
    found: dict[str, Piece] = {}
    for held in parameters:
        shape, fragments = whole_shape(held), fragments_of(held)
        for name, (start, stop) in _parts(held.name, shape, names).items():
            if name in found:
                raise UsageError(f"two parameters have the canonical name {name}, one is {held.name}; give names=")
            found[name] = Piece(
                name=name,
                parameter=held.parameter,
                stepped=held.stepped,
                fragments=tuple(
                    part for one in fragments for part in one.within(0, start, stop, to=0, length=stop - start)
                ),
                shape=(stop - start, *shape[1:]),
                place=(held.chunk, len(found)),
                group=held.group,
            )
    return tuple(found.values())


def tied_names(models: Sequence[nn.Module], parameters: Sequence[Held], names: Names | None) -> dict[str, str]:
    """Map further names of tied parameters to the name that each is recorded under."""
    own = {id(held.parameter): held for held in parameters}
    found: dict[str, str] = {}
    for model in models:
        first = {raw for raw, _ in model.named_parameters()}
        for raw, parameter in model.named_parameters(remove_duplicate=False):
            if raw in first or (held := own.get(id(parameter))) is None:
                continue
            kept = {rows: name for name, rows in _parts(held.name, whole_shape(held), names).items()}
            for name, rows in _parts(canonical(raw), whole_shape(held), names).items():
                if kept.get(rows, name) != name:
                    found[name] = kept[rows]
    return found


def left_out(parameters: Sequence[Held], names: Names | None) -> dict[str, str]:
    """Map parameters that ``names`` leaves without a name, in whole or in part, to the number of these rows."""
    found = {}
    for held in parameters if names else ():
        shape = whole_shape(held)
        named = sum(stop - start for start, stop in _parts(held.name, shape, names).values())
        if named < shape[0]:
            found[held.name] = f"{shape[0] - named} of {shape[0]} rows"
    return found


def _parts(name: str, shape: tuple[int, ...], names: Names | None) -> dict[str, tuple[int, int]]:
    """Give the rows of a parameter, from and to, of each name. Raises UsageError for rows that it does not have."""
    count = shape[0]
    given = names(name) if names else name
    parts = {given: slice(None)} if isinstance(given, str) else given
    if not isinstance(parts, Mapping) or "" in parts:
        raise UsageError(f"names= gives {shown(given)} for {name}; it has to give a name, or the rows of several")
    found: dict[str, tuple[int, int]] = {}
    for part, rows in parts.items():
        start, stop, step = rows.indices(count) if isinstance(rows, slice) else (0, 0, 1)
        if step != 1 or (stop <= start and count):
            raise UsageError(f"names= gives {part} the rows {rows} of {name}, which has {count}; give some, in one run")
        if twice := next((other for other, (low, high) in found.items() if start < high and low < stop), ""):
            raise UsageError(f"names= gives rows of {name} to {twice} and again to {part}; give each to one")
        found[part] = start, stop
    return found


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The parameters of all ranks, in the order of the model.

    parameters: what a record's header says of each name. ranks: the ranks that hold each set of boxes of a name. The
    first of them is counted.
    """

    parameters: dict[str, Line]
    ranks: dict[str, tuple[tuple[int, ...], ...]]

    @property
    def trained(self) -> list[str]:
        return [name for name, line in self.parameters.items() if line["trained"]]

    def counts(self, name: str, rank: int) -> bool:
        return any(holders[0] == rank for holders in self.ranks[name])


def find_layout(pieces: Sequence[Piece], groups: Mapping[int, str]) -> Layout:
    """Gather the pieces of all ranks; ``groups`` are those of the stepped tensors. Collective.

    Raises UsageError on every rank if one has a parameter of another shape.
    """
    own: dict[str, Any] = {
        piece.name: (
            {
                "shape": list(piece.shape),
                "dtype": str(piece.parameter.dtype).removeprefix("torch."),
                "trained": piece.parameter.requires_grad,
                "group": groups.get(id(piece.stepped), piece.group),
            },
            piece.place,
            piece.boxes,
        )
        for piece in pieces
    }
    everybody = [own] * world_size()
    if world_size() > 1:
        dist.all_gather_object(everybody, own)
    lines: dict[str, Line] = {}
    places: dict[str, tuple[int, int, int]] = {}  # a pipeline's parts in turn, and the first rank of each
    ranks: dict[str, dict[Any, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, parameters in enumerate(everybody):
        for name, (line, (part, number), boxes) in parameters.items():
            known = lines.setdefault(name, line)
            places.setdefault(name, (part, rank, number))
            if line["shape"] != known["shape"]:
                raise UsageError(f"{name} is of shape {line['shape']} on rank {rank} and of {known['shape']} on others")
            known["group"] = known["group"] or line["group"]
            if boxes:
                ranks[name][boxes].append(rank)
    ordered = sorted(lines, key=places.__getitem__)
    holders = {name: tuple(map(tuple, ranks[name].values())) for name in ordered}
    return Layout(parameters={name: lines[name] | {"shards": len(holders[name])} for name in ordered}, ranks=holders)


def assemble(pieces: Mapping[str, Piece], values: Mapping[str, Sequence[Tensor]], layout: Layout, name: str) -> Tensor:
    """Put a whole tensor together from the fragments' values of all ranks; collective."""
    line = layout.parameters[name]
    dtype = getattr(torch, line["dtype"])
    found = torch.zeros(line["shape"], dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    if layout.counts(name, own_rank()) and name in values:
        for fragment, value in zip(pieces[name].fragments, values[name], strict=True):
            box = fragment.box
            found[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] = value.cpu()
    return add_up(found).cpu()


PRESENT, SQUARES, NOT_FINITE = (SUMS.index(name) for name in ("present", "squares", "not_finite"))
SAME = 1e-9  # of the norm: replicas hold the same bits, and their float64 sums differ by their order at most


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """The sums over all ranks.

    summaries: float64 [K, P, WIDTH], of K kinds and P pieces. numbers: the sums of further numbers. drift: for each
    kind, the largest difference between replicas relative to the norm, by the name of a piece whose replicas differ.
    """

    summaries: NDArray[np.float64]
    numbers: list[float]
    drift: tuple[dict[str, float], ...]

    def arrays(self, kinds: Sequence[str]) -> Arrays:
        """Split the summaries into the arrays that a record holds, by kind and name of the array."""
        found: Arrays = {}
        for kind, summary in zip(kinds, self.summaries, strict=True):
            sums, rows, sketch = np.split(summary, [ROWS_AT, SKETCH_AT], axis=1)
            for name, array in {"sums": sums, "rows": rows, "sketch": sketch}.items():
                found[f"{kind}.{name}"] = np.ascontiguousarray(array)
        return found


def reduce_over_ranks(summaries: Tensor, numbers: Sequence[float], *, names: Sequence[str], layout: Layout) -> Reduced:
    """Sum the summaries [K, P, WIDTH] of the pieces with ``names``, and ``numbers``, over all ranks.

    A piece that several ranks hold is counted once. ``present`` becomes the part of all pieces that there are.
    """
    ranks, rank = world_size(), own_rank()
    counted = torch.tensor([layout.counts(name, rank) for name in names], device=summaries.device)
    slots = torch.zeros(ranks, *summaries.shape[:2], dtype=torch.float64, device=summaries.device)
    slots[rank] = summaries[..., SKETCH_AT:].sum(-1) + summaries[..., NOT_FINITE]
    sums = summaries.where(counted[:, None], 0.0)
    further = torch.tensor(numbers, dtype=torch.float64, device=summaries.device)
    parts = add_up(torch.cat([sums.flatten(), slots.flatten(), further])).cpu().numpy()
    total = parts[: sums.numel()].reshape(sums.shape).copy()
    everybody = parts[sums.numel() : sums.numel() + slots.numel()].reshape(slots.shape)
    total[..., PRESENT] /= [len(layout.ranks[name]) or 1 for name in names]
    drift = tuple(dict(_drift(total[k], everybody[:, k], names=names, layout=layout)) for k in range(len(total)))
    return Reduced(summaries=total, numbers=parts[sums.numel() + slots.numel() :].tolist(), drift=drift)


def _drift(
    total: NDArray[np.float64], checksums: NDArray[np.float64], *, names: Sequence[str], layout: Layout
) -> Iterator[tuple[str, float]]:
    """Yield pieces whose replicas differ: ``total`` [P, WIDTH], ``checksums`` [ranks, P]."""
    for column, name in enumerate(names):
        spread = max((float(np.ptp(checksums[list(ranks), column])) for ranks in layout.ranks[name]), default=0.0)
        norm = float(np.sqrt(total[column, SQUARES]))
        if spread > SAME * norm:
            yield name, spread / norm if norm else float(np.finfo(np.float64).max)
