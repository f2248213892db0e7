"""Reduction: the one all_reduce of a step, which adds up what the ranks saw of their shards.

What does not add up goes along in slots, one for each rank: a checksum of each piece, by which replicas are compared.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parity.files import Arrays
from parity.shards import Holders
from parity.sketch import ROWS_AT, SKETCH_AT, SUMS
from parity.together import add_up, own_rank, world_size

PRESENT, SQUARES, NOT_FINITE = (SUMS.index(name) for name in ("present", "squares", "not_finite"))
SAME = 1e-9  # of the norm: replicas hold the same bits, and their float64 sums differ by their order at most


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """What all ranks saw together.

    summaries: float64 [K, P, WIDTH], of K kinds and P pieces; numbers: the sums of further numbers; drift: for each
    kind, by the name of a piece whose replicas differ, their largest difference relative to the norm.
    """

    summaries: NDArray[np.float64]
    numbers: list[float]
    drift: tuple[dict[str, float], ...]

    def arrays(self, kinds: Sequence[str]) -> Arrays:
        """The summaries as a record keeps them, by kind and name of the array."""
        found: Arrays = {}
        for kind, summary in zip(kinds, self.summaries, strict=True):
            sums, rows, sketch = np.split(summary, [ROWS_AT, SKETCH_AT], axis=1)
            for name, array in {"sums": sums, "rows": rows, "sketch": sketch}.items():
                found[f"{kind}.{name}"] = np.ascontiguousarray(array)
        return found


def reduce_over_ranks(
    summaries: Tensor, numbers: Sequence[float], *, names: Sequence[str], holders: Holders
) -> Reduced:
    """Add up over all ranks the summaries [K, P, WIDTH] of the pieces with ``names``, and ``numbers``.

    A piece that several ranks hold is counted once. ``present`` becomes the part of all pieces that there are.
    """
    ranks, rank = world_size(), own_rank()
    counted = torch.tensor([holders.counts(name, rank) for name in names], device=summaries.device)
    slots = torch.zeros(ranks, *summaries.shape[:2], dtype=torch.float64, device=summaries.device)
    slots[rank] = summaries[..., SKETCH_AT:].sum(-1) + summaries[..., NOT_FINITE]
    sums = summaries.where(counted[:, None], 0.0)
    further = torch.tensor(numbers, dtype=torch.float64, device=summaries.device)
    parts = add_up(torch.cat([sums.flatten(), slots.flatten(), further])).cpu().numpy()
    total = parts[: sums.numel()].reshape(sums.shape).copy()
    everybody = parts[sums.numel() : sums.numel() + slots.numel()].reshape(slots.shape)
    total[..., PRESENT] /= [len(holders.ranks[name]) for name in names]
    drift = tuple(dict(_drift(total[k], everybody[:, k], names=names, holders=holders)) for k in range(len(total)))
    return Reduced(summaries=total, numbers=parts[sums.numel() + slots.numel() :].tolist(), drift=drift)


def _drift(
    total: NDArray[np.float64], checksums: NDArray[np.float64], *, names: Sequence[str], holders: Holders
) -> Iterator[tuple[str, float]]:
    """Pieces whose replicas differ: ``total`` [P, WIDTH], ``checksums`` [ranks, P]."""
    for column, name in enumerate(names):
        apart = max(float(np.ptp(checksums[list(ranks), column])) for ranks in holders.ranks[name])
        norm = float(np.sqrt(total[column, SQUARES]))
        if apart > SAME * norm:
            yield name, apart / norm if norm else float(np.finfo(np.float64).max)
