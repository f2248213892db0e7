"""Claim 3: what ranks claim to share is compared on all of them, and nothing that is not a number is equal."""

import math

import pytest
import torch

from conformance.run.replicas import _distance


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_copy_that_is_not_finite_is_infinitely_far_off(at: int, wrong: float) -> None:
    copies = [torch.ones(3) for _ in range(3)]
    copies[at][1] = wrong
    assert _distance(copies) == math.inf


def test_copies_of_another_shape_are_infinitely_far_off() -> None:
    assert _distance([torch.ones(3), torch.ones(4)]) == math.inf


def test_the_furthest_copy_counts_relative_to_the_first() -> None:
    assert _distance([torch.full((4,), 2.0), torch.full((4,), 2.0), torch.full((4,), 3.0)]) == pytest.approx(0.5)
