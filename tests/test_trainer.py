"""Numbers of a training step that are put together over micro-batches and ranks."""

import math

import pytest

from impl.trainer import largest


@pytest.mark.parametrize("numbers", [[math.nan, 1.0], [1.0, math.nan]])
def test_a_number_that_is_nan_is_not_lost_behind_another(numbers: list[float]) -> None:
    assert math.isnan(largest(numbers))
    assert largest([1.0, 3.0, 2.0]) == 3.0
