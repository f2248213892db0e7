"""Checks that values that several ranks share are compared on all of them, and that NaN equals nothing."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.backends.protocol import Shard
from conformance.numerics import sketch
from conformance.runtime import Pool, WorkerGroupConfig
from conformance.worker import rank_state
from conformance.worker.rank_state import _distance, compare, digest_of, hash_of_bits

MIB = 2**20
ONES = torch.ones(3)
MANY = torch.arange(12.0).reshape(3, 4)


def in_ranks(pool: Pool, folder: Path, task: str, *, ranks: int, **arguments: Any) -> list[Any]:
    outcome = pool.run(
        key="replicas",
        config=WorkerGroupConfig(size=ranks, device="cpu", preload=("replicas_tasks",)),
        task=f"replicas_tasks:{task}",
        kwargs=arguments,
        log_dir=folder,
        budget_s=60.0,
        fresh=True,
    )
    assert outcome.state == "done", outcome.reason
    return outcome.results


# --- what several ranks hold ------------------------------------------------------------------------------------------


def test_pieces_of_one_name_and_region_are_compared_on_all_ranks_that_hold_them(pool: Pool, tmp_path: Path) -> None:
    same, alone, longer = ("same", "full", [1.0, 2.0]), ("cut", "0", [1.0]), ("shape", "full", [1.0, 2.0, 3.0])
    held = [
        [same, alone, ("last", "full", [3.0, 4.0])],
        [("shape", "full", [1.0, 2.0]), same, ("cut", "1", [2.0])],
        [("last", "full", [3.0, 5.0]), same, longer],
    ]
    found = in_ranks(pool, tmp_path, "compare_pieces", ranks=3, held=held)
    apart = [
        {"name": "last", "region": "full", "ranks": [0, 2], "relative": pytest.approx(1 / 5)},
        {"name": "shape", "region": "full", "ranks": [1, 2], "relative": math.inf},
    ]
    assert found == [{"offered": 9, "compared": 3, "differing": apart}] * 3


def test_rows_that_wait_for_other_ranks_are_gathered_and_those_without_numbers_refused(
    pool: Pool, tmp_path: Path
) -> None:
    """Neither ends the rank, as reading the memory of such a tensor does."""
    first, second = in_ranks(pool, tmp_path, "gather_rows", ranks=2)
    half = ["torch.float64", [0.5]]
    assert first["found"] == {"logprob/0": ["torch.float32", [3.0] * 3], "logprob/1": half, "logprob/2": half}
    assert second["found"] == {}
    assert first["error"].startswith("logprob/0 is a DTensor, which holds no numbers itself")


def test_the_furthest_copy_counts(pool: Pool, tmp_path: Path) -> None:
    held = [[("w", "full", [number] * 4)] for number in (2.0, 3.0, 2.5)]
    (first, *_) = in_ranks(pool, tmp_path, "compare_pieces", ranks=3, held=held)
    assert [entry["relative"] for entry in first["differing"]] == [pytest.approx(0.5)]


def test_of_pieces_that_all_differ_a_few_are_copied_at_a_time(pool: Pool, tmp_path: Path) -> None:
    """Together, they are as large as a rank's part of the model: here 32 MiB, of which 4 MiB may be copied at once.
    What exchanges one piece takes seven times as much as the piece."""
    drift = {"pieces": 16, "size": 2 * MIB, "copied_at_once": 4 * MIB}
    for found in in_ranks(pool, tmp_path, "drift_apart", ranks=2, **drift):
        assert (found["differing"], found["walks"]) == (16, 1 + 8)
        assert found["peak"] < 32 * MIB


def test_a_piece_that_is_larger_than_what_is_copied_at_a_time_is_copied_alone(pool: Pool, tmp_path: Path) -> None:
    drift = {"pieces": 3, "size": 4 * MIB, "copied_at_once": MIB}
    found, _ = in_ranks(pool, tmp_path, "drift_apart", ranks=2, **drift)
    assert (found["differing"], found["walks"]) == (3, 1 + 3)


def test_a_rank_that_names_a_piece_twice_is_told() -> None:
    """The second would take the place of the first, which nothing would compare."""
    with pytest.raises(ValueError, match="names w, region full, twice for weight"):
        compare({"weight": lambda: [Shard("w", "full", 2 * ONES), Shard("w", "full", ONES)]})


# --- distances --------------------------------------------------------------------------------------------------------


HUGE = torch.full((4,), 1e300, dtype=torch.float64)
NOT_FINITE = [torch.tensor([1.0, wrong, 1.0]) for wrong in (math.nan, math.inf)]


@pytest.mark.parametrize(
    ("copy", "other", "distance"),
    [
        *((ONES, wrong, math.inf) for wrong in NOT_FINITE),
        *((wrong, ONES, math.inf) for wrong in NOT_FINITE),
        (ONES, torch.ones(4), math.inf),
        (HUGE, -HUGE, math.inf),  # the norms are not numbers
        (torch.full((4,), 2.0), torch.full((4,), 3.0), 0.5),  # relative to the first
    ],
)
def test_distance_of_copies_is_relative_and_never_nan(copy: torch.Tensor, other: torch.Tensor, distance: float) -> None:
    assert _distance(copy.clone(), other.clone()) == pytest.approx(distance)


# --- digests ----------------------------------------------------------------------------------------------------------


def test_every_byte_counts_for_a_digest() -> None:
    digests = {digest_of(MANY)}
    for byte in range(MANY.nbytes):
        changed = MANY.clone()
        changed.view(torch.uint8).flatten()[byte] ^= 1
        digests.add(digest_of(changed))
    assert len(digests) == 1 + MANY.nbytes


def test_small_pieces_of_gpus_have_the_digests_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [Shard("w", "0", MANY[1:]), Shard("w", "1", torch.ones(2)), Shard("norm", "full", MANY.bfloat16())]
    on_the_cpu = rank_state._digests({"weight": lambda: shards})
    monkeypatch.setattr(sketch, "is_small", lambda tensor: len(tensor) < 3)
    monkeypatch.setattr(rank_state, "is_small", lambda tensor: len(tensor) < 3)
    assert rank_state._digests({"weight": lambda: shards}) == on_the_cpu
    with pytest.raises(ValueError, match="twice"):
        rank_state._digests({"weight": lambda: shards * 2})


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(torch.tensor([1.5]).expand(10), id="expanded"),
        pytest.param(torch.ones(1, 4).expand(3, 4), id="expanded matrix"),
        pytest.param(MANY.T, id="transposed"),
        pytest.param(MANY[:, ::3], id="every third column"),
        pytest.param(MANY[1:], id="later rows"),
        pytest.param(torch.nn.Parameter(MANY), id="parameter"),
        pytest.param(torch.nn.Parameter(MANY).T, id="transposed parameter"),
        pytest.param(torch.tensor(2.0), id="number"),
        pytest.param(torch.empty(0, 4), id="empty"),
        pytest.param(MANY.bfloat16(), id="bfloat16"),
    ],
)
def test_a_digest_is_of_the_numbers_however_they_lie_in_memory(given: torch.Tensor) -> None:
    copied = torch.empty(given.shape, dtype=given.dtype).copy_(given.detach())
    assert copied.is_contiguous()
    assert digest_of(given) == digest_of(copied)


def test_a_hash_is_the_same_in_several_blocks_and_knows_in_which_each_word_was(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = torch.arange(8 * 10, dtype=torch.uint8)  # ten words
    swapped = torch.cat([bits[32:64], bits[:32], bits[64:]])
    whole = hash_of_bits(bits)
    monkeypatch.setattr(rank_state, "HASHED_AT_ONCE", 4)
    assert hash_of_bits(bits) == whole
    assert hash_of_bits(swapped) != whole
