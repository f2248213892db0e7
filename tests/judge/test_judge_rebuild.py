"""The norm by which a rebuilt update is clipped: the cell's own, where only the order of additions tells them apart."""

import pytest

from conformance.judge.rebuilt import _reported
from conformance.spec.precision import PRECISIONS, PrecisionName

MANY = 56_370_688  # torch's norm of so many numbers is 1.3e-14 off, measured


@pytest.mark.parametrize(
    ("own", "numbers", "precision", "is_used"),
    [
        (1 + 1.3e-14, MANY, "exact", True),
        (1 + 1.3e-14, 5_000, "exact", False),
        (1 + 1e-12, MANY, "exact", False),
        (1 + 3e-6, MANY, "fp32", False),
        (1 + 3e-6, MANY, "bf16", False),
        (None, 100, "exact", False),
    ],
)
def test_a_reported_norm_is_used_within_its_rounding(
    own: float | None, numbers: int, precision: PrecisionName, is_used: bool
) -> None:
    assert _reported(own, 1.0, numbers, PRECISIONS[precision].master) == (own if is_used else 1.0)
