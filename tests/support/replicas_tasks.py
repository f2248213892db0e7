"""Compares the pieces that ranks hold, as tasks for tests/judge/test_replicas.py."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from memory import give_back, peak_above

from conformance.backends.protocol import Shard
from conformance.runtime import RankContext
from conformance.worker import rank_state


def compare_pieces(context: RankContext, *, held: list[list[tuple[str, str, list[float]]]]) -> dict[str, Any]:
    """What is found of the weights that each rank holds, as (name, region, numbers)."""
    own = [Shard(name, region, torch.tensor(numbers)) for name, region, numbers in held[context.rank]]
    return vars(rank_state.compare({"weight": lambda: own})["weight"])


def drift_apart(context: RankContext, *, pieces: int, size: int, copied_at_once: int) -> dict[str, int]:
    """Compare pieces of ``size`` bytes, of which none is the same on two ranks and each is made anew, as by a backend
    that converts its gradients: how many differ, how often they were made, and the largest memory meanwhile. What a
    first comparison loads of libraries, which depends on what this process did before, is not in it."""
    give_back()
    rank_state.compare({"weight": lambda: [Shard("small", "full", torch.full((4,), 1.0 + context.rank))]})
    walks, found = 0, []

    def source() -> Iterator[Shard]:
        nonlocal walks
        walks += 1
        for number in range(pieces):
            yield Shard(f"w{number}", "full", torch.full((size // 4,), 1.0 + context.rank))

    with mock.patch.object(rank_state, "COPIED_AT_ONCE", copied_at_once):
        peak = peak_above(lambda: found.append(rank_state.compare({"weight": source})))
    return {"differing": len(found[0]["weight"].differing), "walks": walks, "peak": peak}
