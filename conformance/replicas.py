"""Replicas: are the pieces that several ranks claim to share really equal? Serves claim 3.

Ranks exchange digests; only pieces whose bits differ are exchanged themselves and measured.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from conformance.backend import Kind, Shard

MEASURED = 64  # pieces with different bits that are exchanged; the first of them tell enough


@dataclass(frozen=True, kw_only=True)
class Result:
    """``compared``: pieces held by two or more ranks. ``differing``: JSON values, one per piece whose bits differ."""

    compared: int
    differing: list[dict[str, Any]]


def compare(kind: Kind, shards: Iterable[Shard]) -> Result:
    """Compare every piece over the ranks that hold it; collective.

    A differing entry gives kind, tensor, region, ranks, and ``relative``: the largest distance to the first holder's
    piece, ||x - x_0|| / ||x_0||, in float64.
    """
    mine = {(shard.name, shard.region): shard.tensor.detach().cpu() for shard in shards}
    digests = {key: hashlib.sha256(_bytes(tensor)).digest() for key, tensor in mine.items()}
    everyone: list[dict[tuple[str, str], bytes]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, digests)
    holders: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, held in enumerate(everyone):
        for key in held:
            holders[key].append(rank)
    shared = {key: ranks for key, ranks in holders.items() if len(ranks) > 1}
    unequal = [key for key, ranks in shared.items() if len({everyone[r][key] for r in ranks}) > 1][:MEASURED]
    pieces: list[dict[tuple[str, str], torch.Tensor]] = [{} for _ in everyone]
    if unequal:
        dist.all_gather_object(pieces, {key: mine[key] for key in unequal if key in mine})
    differing = [
        {
            "kind": kind,
            "tensor": name,
            "region": region,
            "ranks": shared[name, region],
            "relative": _distance([pieces[rank][name, region] for rank in shared[name, region]]),
        }
        for name, region in unequal
    ]
    return Result(compared=len(shared), differing=differing)


def _distance(copies: list[torch.Tensor]) -> float:
    first = copies[0].double()
    if any(copy.shape != first.shape for copy in copies):
        return float("inf")
    norm = float(first.norm()) or 1.0
    return max(float((copy.double() - first).norm()) for copy in copies[1:]) / norm


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
