"""Replicas: checks that numbers that several ranks claim to share are really equal. Serves claim 3.

Ranks exchange digests. Only pieces whose bits differ are exchanged themselves, one at a time, to measure the distance.
No more than one piece is copied at a time: together they may be as large as the model.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from conformance.backend import Shard
from conformance.hashing import splitmix64
from conformance.modes import without_modes

Source = Callable[[], Iterable[Shard]]  # this rank's pieces, anew with every call
Piece = tuple[str, str, str]  # group, name, region
HASHED_AT_ONCE = 2**24  # words of 64 bits


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
    """Compare every piece of each group between the ranks that hold it. Collective; all ranks pass the same groups.

    An entry of ``differing`` has ``name``, ``region``, ``ranks``, and ``relative``: the largest ||x - x_0|| / ||x_0||
    in float64, where x_0 is the piece of the first of these ranks.
    """
    digests = {(key, s.name, s.region): digest_of(s.tensor) for key, source in groups.items() for s in source()}
    everyone: list[dict[Piece, bytes]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, digests)
    holders: dict[Piece, list[int]] = defaultdict(list)
    for rank, held in enumerate(everyone):
        for piece in held:
            holders[piece].append(rank)
    apart = [p for p, ranks in holders.items() if len({everyone[rank][p] for rank in ranks}) > 1]
    mine = _copies(groups, set(apart)) if apart else {}
    differing: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for piece in apart:
        copies: list[torch.Tensor | None] = [None] * len(everyone)
        dist.all_gather_object(copies, mine.get(piece))
        relative = _distance([copy for copy in copies if copy is not None])
        key, name, region = piece
        differing[key].append({"name": name, "region": region, "ranks": holders[piece], "relative": relative})
    return {
        key: Replicas(
            offered=sum(piece[0] == key for held in everyone for piece in held),
            compared=sum(piece[0] == key and len(ranks) > 1 for piece, ranks in holders.items()),
            differing=differing[key],
        )
        for key in groups
    }


def _copies(groups: Mapping[str, Source], wanted: set[Piece]) -> dict[Piece, torch.Tensor]:
    """Of this rank's pieces the ``wanted`` ones, on the CPU."""
    named = (((key, s.name, s.region), s.tensor) for key, source in groups.items() for s in source())
    return {piece: tensor.detach().to("cpu", copy=True) for piece, tensor in named if piece in wanted}


def pieces(groups: Mapping[str, Source]) -> dict[str, dict[str, list[int]]]:
    """By the name of each tensor and the region of each of its pieces, the ranks that hold the piece. Collective.

    Two models with a tensor of the same name are taken together.
    """
    mine = {(shard.name, shard.region) for source in groups.values() for shard in source()}
    everyone: list[set[tuple[str, str]]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    holders: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, held in enumerate(everyone):
        for name, region in sorted(held):
            holders[name][region].append(rank)
    return holders


def _distance(copies: list[torch.Tensor]) -> float:
    """The largest distance to the first copy, relative to its norm; infinite if shapes differ or a number is not
    finite."""
    first = copies[0].double()
    if any(copy.shape != first.shape or not copy.isfinite().all() for copy in copies):
        return float("inf")
    norm = float(first.norm()) or 1.0
    return max(float((copy.double() - first).norm()) for copy in copies[1:]) / norm


def digest_of(tensor: torch.Tensor) -> bytes:
    """Of the bits of a tensor: SHA-256 of those on the CPU; of those on a GPU, which has no such function, a hash."""
    with without_modes(tensor) as tensor:
        bits = tensor.contiguous().flatten().view(torch.uint8)
        if bits.device.type == "cpu":
            return hashlib.sha256(bits.numpy().tobytes()).digest()
        return hash_of_bits(bits).to_bytes(8, "little", signed=True)


def hash_of_bits(bits: torch.Tensor) -> int:
    """The sum of splitmix64(word xor splitmix64(place)) over the 64-bit words of uint8 (bytes,): where two tensors
    differ, equal by chance once in 2^64."""
    total = 0
    for begin in range(0, len(bits), 8 * HASHED_AT_ONCE):
        block = bits[begin : begin + 8 * HASHED_AT_ONCE]
        words = torch.nn.functional.pad(block, (0, -len(block) % 8)).view(torch.int64)
        places = splitmix64(torch.arange(len(words), device=bits.device) + begin // 8, seed=len(bits))
        total += int(splitmix64(places.bitwise_xor_(words), seed=1).sum())
    return (total + 2**63) % 2**64 - 2**63
