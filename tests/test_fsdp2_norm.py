"""The sums of squares behind FSDP2's gradient norm, in the exact tier to the last digits."""

import math

import pytest
import torch

from impl.fsdp2.norm import sums_of_squares


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float64, 4e-16), (torch.float32, 1e-13), (torch.bfloat16, 1e-13)]
)
def test_a_million_numbers_lose_no_digits(dtype: torch.dtype, allowed: float) -> None:
    numbers = torch.randn(10**6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    right = math.fsum((numbers.double() ** 2).tolist())
    (found,) = sums_of_squares([numbers])
    assert found.dtype == torch.float64
    assert abs(found.item() / right - 1) < allowed
