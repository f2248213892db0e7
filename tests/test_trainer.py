"""Numbers of a training step that are put together over micro-batches and ranks."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from impl.trainer import largest, of_all_ranks


@pytest.mark.parametrize("numbers", [[math.nan, 1.0], [1.0, math.nan]])
def test_a_number_that_is_nan_is_not_lost_behind_another(numbers: list[float]) -> None:
    assert math.isnan(largest(numbers))
    assert largest([1.0, 3.0, 2.0]) == 3.0


def beside(*others: list[float]) -> Any:
    """The context of a rank beside others that have gathered these numbers, and the same sums."""
    return SimpleNamespace(
        config=SimpleNamespace(device="cpu"),
        all_reduce_tensor=lambda numbers: numbers * (1 + len(others)),
        all_gather=lambda own: [own, *others],
    )


def test_sums_are_added_up_and_the_largest_number_of_any_rank_and_micro_batch_is_kept() -> None:
    sums = {"loss": torch.tensor(0.5, dtype=torch.float64), "count": torch.tensor(3.0, dtype=torch.float64)}
    highest = {"ratio": [torch.tensor(1.0), torch.tensor(4.0)], "value": [torch.tensor(2.0), torch.tensor(-1.0)]}
    found = of_all_ranks(beside([3.0, 5.0], [-1.0, 7.0]), sums, highest)
    assert found == {"loss": 1.5, "count": 9.0, "ratio": 4.0, "value": 7.0}
    assert of_all_ranks(beside(), sums, {}) == {"loss": 0.5, "count": 3.0}


@pytest.mark.parametrize(("own", "other"), [([math.nan, 1.0], 2.0), ([1.0, math.nan], 2.0), ([1.0, 1.0], math.nan)])
def test_a_largest_number_is_nan_if_one_micro_batch_of_one_rank_has_it(own: list[float], other: float) -> None:
    sums = {"loss": torch.tensor(1.0, dtype=torch.float64)}
    found = of_all_ranks(beside([other]), sums, {"ratio": [torch.tensor(number) for number in own]})
    assert math.isnan(found["ratio"])
