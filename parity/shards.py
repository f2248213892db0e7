"""Shards: what this rank holds of each parameter, under canonical names, and which ranks hold the same.

A DTensor says itself where its shard lies (the protocol of distributed checkpoints), a plain tensor is whole. Pieces
that several ranks hold are counted once, for the first rank that holds them, so that sums over ranks are sums over
elements.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from conformance.validation import UsageError
from parity.names import Names, canonical
from parity.sketch import Box, seed_of, whole


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


def tied_names(model: nn.Module, pieces: Sequence[Piece]) -> dict[str, str]:
    """Further names of tied parameters, and the name that each is recorded under."""
    own = {id(piece.parameter): piece.name for piece in pieces}
    every = {canonical(raw): own[id(p)] for raw, p in model.named_parameters(remove_duplicate=False)}
    first = {canonical(raw) for raw, _ in model.named_parameters()}
    return {name: kept for name, kept in every.items() if name not in first}


def _named(name: str, parameter: nn.Parameter, names: Names | None) -> Iterator[Piece]:
    box = _box(parameter)
    said = names(name) if names else name
    parts = {said: slice(None)} if isinstance(said, str) else said
    for part, rows in parts.items():
        start, stop, step = rows.indices(box.shape[0])
        if step != 1 or stop <= start:
            raise UsageError(
                f"names= gives {part} the rows {rows} of {name}, which has {box.shape[0]}; give some, in one run"
            )
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


def find_holders(pieces: Sequence[Piece], *, problem: str) -> Holders:
    """Ask all ranks once what they hold. Raises UsageError on every rank if one has a ``problem``, or others' names."""
    own: tuple[str, dict[str, Any]] = (problem, {p.name: (p.box.offsets, p.box.sizes) for p in pieces})
    everybody: list[tuple[str, dict[str, Any]]] = [own]
    if world_size() > 1:
        everybody = [own] * world_size()
        dist.all_gather_object(everybody, own)
    if said := next((said for said, _ in everybody if said), ""):
        raise UsageError(said)
    for rank, (_, boxes) in enumerate(everybody):
        if list(boxes) != list(everybody[0][1]):
            raise UsageError(
                f"rank {rank} has other parameters than rank 0, as in a pipeline; record a run without pipeline stages"
            )
    ranks: dict[str, dict[Any, list[int]]] = {piece.name: defaultdict(list) for piece in pieces}
    for rank, (_, boxes) in enumerate(everybody):
        for name, box in boxes.items():
            ranks[name][box].append(rank)
    return Holders(ranks={name: tuple(map(tuple, boxes.values())) for name, boxes in ranks.items()})


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0
