"""Shards: what this rank holds of each parameter, under canonical names, and which ranks hold the same.

A DTensor says itself where its shard lies (the protocol of distributed checkpoints), a plain tensor is whole. Pieces
that several ranks hold are counted once, for the first rank that holds them, so that sums over ranks are sums over
elements.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from conformance.hashing import seed_of
from conformance.validation import UsageError, shown
from parity.names import Names, canonical
from parity.sketch import Box, whole
from parity.together import world_size


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """What a rank holds of what has one canonical name: a parameter, or some rows of one that is fused."""

    name: str
    parameter: nn.Parameter
    part: slice  # its rows of the whole parameter
    rows: slice  # its rows of the local tensor
    box: Box
    seed: int

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor that is cut as the parameter is: its weights, or its gradient."""
        if isinstance(tensor, DTensor):
            assert isinstance(self.parameter, DTensor)
            if tensor.placements != self.parameter.placements:  # a gradient that waits for its sum, of a copy here
                tensor = tensor.redistribute(self.parameter.device_mesh, self.parameter.placements)
            tensor = tensor.to_local()
        return _rows(tensor, self.rows)

    def gathered(self, tensor: Tensor) -> Tensor:
        """The whole of such a tensor, from all ranks."""
        return _rows(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, self.part)


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    return (tensor.detach() if tensor.dim() else tensor.detach().reshape(1))[rows]


def pieces_of(model: nn.Module, names: Names | None) -> tuple[Piece, ...]:
    """All parameters, tied ones once, in the order in which the model defines them."""
    found: dict[str, Piece] = {}
    for raw, parameter in model.named_parameters():
        for piece in _named(canonical(raw), parameter, names):
            if piece.name in found:
                raise UsageError(
                    f"two parameters have the canonical name {piece.name}, one of them is {raw}; give names="
                )
            found[piece.name] = piece
    return tuple(found.values())


def tied_names(model: nn.Module, pieces: Sequence[Piece], names: Names | None) -> dict[str, str]:
    """Further names of tied parameters, and the name that each is recorded under."""
    own = {(id(piece.parameter), piece.part.start, piece.part.stop): piece.name for piece in pieces}
    first = {raw for raw, _ in model.named_parameters()}
    found: dict[str, str] = {}
    for raw, parameter in model.named_parameters(remove_duplicate=False):
        for name, (start, stop) in _parts(canonical(raw), parameter, names).items() if raw not in first else ():
            if (kept := own.get((id(parameter), start, stop), name)) != name:
                found[name] = kept
    return found


def left_out(model: nn.Module, names: Names | None) -> dict[str, str]:
    """Which parameters ``names`` leaves without a name, and how many of their rows."""
    found = {}
    for raw, parameter in model.named_parameters() if names else ():
        rows = whole(tuple(parameter.shape)).shape[0]
        named = sum(stop - start for start, stop in _parts(canonical(raw), parameter, names).values())
        if named < rows:
            found[canonical(raw)] = f"{rows - named} of {rows} rows"
    return found


def _parts(name: str, parameter: nn.Parameter, names: Names | None) -> dict[str, tuple[int, int]]:
    """The rows of a parameter, from and to, that have each name. Raises UsageError for what are no parts of it."""
    count = whole(tuple(parameter.shape)).shape[0]
    said = names(name) if names else name
    parts = {said: slice(None)} if isinstance(said, str) else said
    if not isinstance(parts, Mapping) or "" in parts:
        raise UsageError(f"names= gives {shown(said)} for {name}; it has to give a name, or the rows of several")
    found: dict[str, tuple[int, int]] = {}
    for part, rows in parts.items():
        start, stop, step = rows.indices(count) if isinstance(rows, slice) else (0, 0, 1)
        if step != 1 or (stop <= start and count):
            raise UsageError(f"names= gives {part} the rows {rows} of {name}, which has {count}; give some, in one run")
        if twice := next((other for other, (low, high) in found.items() if start < high and low < stop), ""):
            raise UsageError(f"names= gives rows of {name} to {twice} and again to {part}; give each to one")
        found[part] = start, stop
    return found


def _named(name: str, parameter: nn.Parameter, names: Names | None) -> Iterator[Piece]:
    box = _box(parameter)
    for part, (start, stop) in _parts(name, parameter, names).items():
        # The rows of this rank that belong to the part, as places in the local tensor.
        low = min(max(start - box.offsets[0], 0), box.sizes[0])
        high = max(low, min(stop - box.offsets[0], box.sizes[0]))
        yield Piece(
            name=part,
            parameter=parameter,
            part=slice(start, stop),
            rows=slice(low, high),
            box=Box(
                shape=(stop - start, *box.shape[1:]),
                offsets=(max(box.offsets[0] - start, 0), *box.offsets[1:]),
                sizes=(high - low, *box.sizes[1:]),
            ),
            seed=seed_of(part),
        )


def _box(parameter: Tensor) -> Box:
    if not isinstance(parameter, DTensor):
        return whole(tuple(parameter.shape))
    (chunk,) = parameter.__create_chunk_list__()
    return replace(whole(tuple(parameter.shape)), offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes))


@dataclass(frozen=True, kw_only=True)
class Holders:
    """Who holds what: for every piece by name, the ranks that hold each box of it, the first of which counts."""

    ranks: dict[str, tuple[tuple[int, ...], ...]]

    def counts(self, name: str, rank: int) -> bool:
        return any(holders[0] == rank for holders in self.ranks[name])


def find_holders(pieces: Sequence[Piece]) -> Holders:
    """Ask all ranks once what they hold. Raises UsageError on every rank if one has other names."""
    own: dict[str, Any] = {p.name: (p.box.offsets, p.box.sizes) for p in pieces}
    everybody = [own] * world_size()
    if world_size() > 1:
        dist.all_gather_object(everybody, own)
    for rank, boxes in enumerate(everybody):
        if list(boxes) != list(everybody[0]):
            raise UsageError(
                f"rank {rank} has other parameters than rank 0, as in a pipeline; record a run without pipeline stages"
            )
    ranks: dict[str, dict[Any, list[int]]] = {piece.name: defaultdict(list) for piece in pieces}
    for rank, boxes in enumerate(everybody):
        for name, box in boxes.items():
            ranks[name][box].append(rank)
    return Holders(ranks={name: tuple(map(tuple, boxes.values())) for name, boxes in ranks.items()})
