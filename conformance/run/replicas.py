"""Replicas: are the pieces that several ranks claim to share really equal? Serves claim 3.

Ranks exchange digests; only pieces whose bits differ are exchanged themselves, one at a time, and measured.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from conformance.backend import Kind, Shard


@dataclass(frozen=True, kw_only=True)
class Result:
    """``offered``: pieces of all ranks together. ``compared``: of them, by name and region, those of two or more ranks.

    ``differing``: JSON values, one per piece whose bits differ.
    """

    offered: int
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
    differing = []
    for (name, region), ranks in shared.items():
        if len({everyone[rank][name, region] for rank in ranks}) == 1:
            continue
        copies: list[torch.Tensor | None] = [None] * len(everyone)
        dist.all_gather_object(copies, mine.get((name, region)))
        relative = _distance([copy for copy in copies if copy is not None])
        differing.append({"kind": kind, "tensor": name, "region": region, "ranks": ranks, "relative": relative})
    return Result(offered=sum(map(len, everyone)), compared=len(shared), differing=differing)


def _distance(copies: list[torch.Tensor]) -> float:
    """Largest distance to the first copy, relative to it; infinite where shapes differ or a number is not finite."""
    first = copies[0].double()
    if any(copy.shape != first.shape or not copy.isfinite().all() for copy in copies):
        return float("inf")
    norm = float(first.norm()) or 1.0
    return max(float((copy.double() - first).norm()) for copy in copies[1:]) / norm


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
