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


def gather_rows(context: RankContext) -> dict[str, Any]:
    """What rank 0 gets of a row that still waits for other ranks, and what is said of one that holds no numbers."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (context.world_size,))
    row = all_reduce(torch.full((3,), 1.0 + context.rank), "sum", mesh)
    assert isinstance(row, AsyncCollectiveTensor)
    own = {"logprob/0": row, f"logprob/{1 + context.rank}": torch.tensor([0.5], dtype=torch.float64)}
    found = {name: (str(t.dtype), t.tolist()) for name, t in rank_state.rows_on_first_rank(own).items()}
    try:
        rank_state.rows_on_first_rank({"logprob/0": distribute_tensor(torch.ones(3), mesh, [Replicate()])})
    except ValueError as error:
        return {"found": found, "error": str(error)}
    return {"found": found, "error": ""}
