"""The norm by which a rebuilt update is clipped: the cell's own, where only the order of additions tells them apart."""

import pytest

from conformance.judge.rebuilt import _reported
from conformance.spec.precision import PRECISIONS, PrecisionName


def used(own: float | None, *, numbers: int, precision: PrecisionName = "exact") -> float:
    return _reported(own, 1.0, numbers, PRECISIONS[precision].master)


def test_reported_norm_tolerance_grows_with_element_count() -> None:
    own = 1 + 1.3e-14  # torch's norm of 56 million numbers, measured
    assert used(own, numbers=56_370_688) == own
    assert used(own, numbers=5_000) == 1.0


@pytest.mark.parametrize(("precision", "off"), [("exact", 1e-12), ("fp32", 3e-6), ("bf16", 3e-6)])
def test_a_norm_that_is_wrong_does_not_excuse_an_update(precision: PrecisionName, off: float) -> None:
    assert used(1 + off, numbers=56_370_688, precision=precision) == 1.0


def test_without_a_reported_norm_the_rebuilt_one_counts() -> None:
    assert used(None, numbers=100) == 1.0
