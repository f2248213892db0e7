"""Replicas: checks that numbers that several ranks claim to share are really equal. Serves claim 3.

Ranks exchange digests. Only pieces whose bits differ are exchanged themselves, one at a time, to measure the distance.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from conformance.backend import Shard

Piece = tuple[str, str, str]  # group, name, region


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


def compare(groups: Mapping[str, Iterable[Shard]]) -> dict[str, Replicas]:
    """Compare every piece of each group between the ranks that hold it. Collective; all ranks pass the same groups.

    An entry of ``differing`` has ``name``, ``region``, ``ranks``, and ``relative``: the largest ||x - x_0|| / ||x_0||
    in float64, where x_0 is the piece of the first of these ranks.
    """
    mine = {(key, s.name, s.region): s.tensor.detach().cpu() for key, shards in groups.items() for s in shards}
    digests = {piece: hashlib.sha256(_bytes(tensor)).digest() for piece, tensor in mine.items()}
    everyone: list[dict[Piece, bytes]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, digests)
    holders: dict[Piece, list[int]] = defaultdict(list)
    for rank, held in enumerate(everyone):
        for piece in held:
            holders[piece].append(rank)
    differing: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for piece, ranks in holders.items():
        if len({everyone[rank][piece] for rank in ranks}) == 1:
            continue
        copies: list[torch.Tensor | None] = [None] * len(everyone)
        dist.all_gather_object(copies, mine.get(piece))
        relative = _distance([copy for copy in copies if copy is not None])
        key, name, region = piece
        differing[key].append({"name": name, "region": region, "ranks": ranks, "relative": relative})
    return {
        key: Replicas(
            offered=sum(piece[0] == key for held in everyone for piece in held),
            compared=sum(piece[0] == key and len(ranks) > 1 for piece, ranks in holders.items()),
            differing=differing[key],
        )
        for key in groups
    }


def pieces(groups: Mapping[str, Iterable[Shard]]) -> dict[str, dict[str, list[int]]]:
    """By the name of each tensor and the region of each of its pieces, the ranks that hold the piece. Collective.

    Two models with a tensor of the same name are taken together.
    """
    mine = {(shard.name, shard.region) for shards in groups.values() for shard in shards}
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


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
