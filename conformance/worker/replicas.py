"""Compares numbers that several ranks claim to share (docs/principles.md).

Ranks exchange digests. Pieces whose bits differ are then exchanged themselves, one at a time, to measure the distance.
A rank copies only a few of them at once, because together they may be as large as its part of the model. For the next
ones it walks all its pieces again: an adapter may make them for the walk only.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from conformance.backends.protocol import Shard
from conformance.numerics.determinism import splitmix64, without_modes
from conformance.runtime import mark

Source = Callable[[], Iterable[Shard]]  # yields this rank's pieces again with every call
Piece = tuple[str, str, str]  # group, name, region
HASHED_AT_ONCE = 2**24  # words of 64 bits
COPIED_AT_ONCE = 2**28  # bytes of differing pieces, or one larger piece; fewer bytes need more walks


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The comparison of one group of pieces.

    offered: number of pieces of all ranks together.
    compared: number of distinct (name, region) keys that at least two ranks hold.
    differing: one JSON object for each key whose bytes are not identical on all ranks that hold it.
    """

    offered: int
    compared: int
    differing: list[dict[str, Any]]


def compare(groups: Mapping[str, Source]) -> dict[str, Replicas]:
    """Compares every piece of each group between the ranks that hold it. Collective; all ranks pass the same groups.

    An entry of ``differing`` has ``name``, ``region``, ``ranks``, and ``relative``: the largest ||x - x_0|| / ||x_0||
    in float64, where x_0 is the piece of the first of these ranks.
    """
    digests = _digests(groups)
    everyone: list[dict[Piece, tuple[bytes, int]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, digests)
    holders: dict[Piece, list[int]] = defaultdict(list)
    for rank, of_rank in enumerate(everyone):
        for piece in of_rank:
            holders[piece].append(rank)
    sizes = {
        piece: max(everyone[rank][piece][1] for rank in ranks)
        for piece, ranks in holders.items()
        if len({everyone[rank][piece][0] for rank in ranks}) > 1
    }
    differing: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for together in _portions(sizes):
        for piece, relative in _distances(groups, {piece: holders[piece][0] for piece in together}).items():
            key, name, region = piece
            differing[key].append({"name": name, "region": region, "ranks": holders[piece], "relative": relative})
    return {
        key: Replicas(
            offered=sum(piece[0] == key for of_rank in everyone for piece in of_rank),
            compared=sum(piece[0] == key and len(ranks) > 1 for piece, ranks in holders.items()),
            differing=differing[key],
        )
        for key in groups
    }


def _digests(groups: Mapping[str, Source]) -> dict[Piece, tuple[bytes, int]]:
    """Returns the digest and the number of bytes of this rank's pieces. Raises ValueError if a piece is named twice."""
    found: dict[Piece, tuple[bytes, int]] = {}
    for key, source in groups.items():
        for shard in source():
            piece = (key, shard.name, shard.region)
            if piece in found:
                raise ValueError(
                    f"local_shards names {shard.name}, region {shard.region}, twice for {key}; yield each piece of a "
                    f"rank once"
                )
            found[piece] = (digest_of(shard.tensor), shard.tensor.nbytes)
    return found


def _portions(sizes: Mapping[Piece, int]) -> Iterator[list[Piece]]:
    """Splits the pieces, in order, into groups that may be copied at once. ``sizes``: in bytes."""
    portion: list[Piece] = []
    total = 0
    for piece, size in sizes.items():
        if portion and total + size > COPIED_AT_ONCE:
            yield portion
            portion, total = [], 0
        portion.append(piece)
        total += size
    if portion:
        yield portion


def _distances(groups: Mapping[str, Source], first: Mapping[Piece, int]) -> dict[Piece, float]:
    """Returns the largest distance of a copy of each piece from that of its ``first`` rank. Collective."""
    named = (((key, s.name, s.region), s.tensor) for key, source in groups.items() for s in source())
    copied = {piece: tensor.detach().to("cpu", copy=True) for piece, tensor in named if piece in first}
    distances: dict[Piece, float] = {}
    for piece, rank in first.items():
        copies = [copied.get(piece)]
        dist.broadcast_object_list(copies, src=rank)
        if copies[0] is not None and piece in copied:
            distances[piece] = _distance(copies[0], copied.pop(piece))
        mark()
    everyone: list[dict[Piece, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, distances)
    return {piece: max(of_rank[piece] for of_rank in everyone if piece in of_rank) for piece in first}


def pieces(groups: Mapping[str, Source]) -> dict[str, dict[str, list[int]]]:
    """Returns the ranks that hold each piece, by the name of the tensor and the region of the piece. Collective.

    Two models with a tensor of the same name are merged.
    """
    own_pieces = {(shard.name, shard.region) for source in groups.values() for shard in source()}
    everyone: list[set[tuple[str, str]]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own_pieces)
    holders: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, of_rank in enumerate(everyone):
        for name, region in sorted(of_rank):
            holders[name][region].append(rank)
    return holders


def _distance(first: torch.Tensor, copy: torch.Tensor) -> float:
    """Returns ||copy - first|| / ||first||; infinite if shapes differ or a number is not finite."""
    if copy.shape != first.shape or not (first.isfinite().all() and copy.isfinite().all()):
        return math.inf
    norm = float(first.norm(dtype=torch.float64)) or 1.0
    relative = float(copy.double().sub(first).norm()) / norm
    return relative if math.isfinite(relative) else math.inf


def digest_of(tensor: torch.Tensor) -> bytes:
    """Returns the SHA-256 of the bits of a tensor on the CPU, and a 64-bit hash on a GPU, which has no SHA-256."""
    with without_modes(tensor) as tensor:
        bits = tensor.contiguous().flatten().view(torch.uint8)
        if bits.device.type == "cpu":
            return hashlib.sha256(bits.numpy().tobytes()).digest()
        return hash_of_bits(bits).to_bytes(8, "little", signed=True)


def hash_of_bits(bits: torch.Tensor) -> int:
    """Returns the sum of splitmix64(word xor splitmix64(position)) over the 64-bit words of uint8 (bytes,). Different
    tensors collide with probability 2^-64."""
    total = 0
    for begin in range(0, len(bits), 8 * HASHED_AT_ONCE):
        block = bits[begin : begin + 8 * HASHED_AT_ONCE]
        words = torch.nn.functional.pad(block, (0, -len(block) % 8)).view(torch.int64)
        places = splitmix64(torch.arange(len(words), device=bits.device) + begin // 8, seed=len(bits))
        total += int(splitmix64(places.bitwise_xor_(words), seed=1).sum())
    return (total + 2**63) % 2**64 - 2**63
