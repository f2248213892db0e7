"""What torch may choose among kernels on a GPU, by tier. The flags are torch's own and can be set without a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from conformance.numerics.float64_tier import WORKSPACE, settings_of
from conformance.spec.precision import PrecisionName


@pytest.fixture(autouse=True)
def _tf32() -> Iterator[None]:
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def flags() -> tuple[Any, ...]:
    utils: Any = torch.utils.deterministic
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        utils.fill_uninitialized_memory,
    )


@pytest.mark.parametrize(
    ("precision", "device", "deterministic"),
    [("exact", "cuda:0", "yes"), ("fp32", "cuda:1", "yes"), ("bf16", "cuda:0", "no"), ("exact", "cpu", "no")],
)
def test_exact_and_fp32_are_deterministic_and_without_tf32_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, precision: PrecisionName, device: str, deterministic: str
) -> None:
    """Half precision is judged as libraries run it. What is in force is told, and put back."""
    monkeypatch.setenv(WORKSPACE, ":16:8")
    before, tf32 = flags(), "no" if deterministic == "yes" else "yes"
    with settings_of(precision, device) as told:
        assert told == {"deterministic": deterministic, "tf32": tf32, WORKSPACE: ":16:8"}
        if deterministic == "yes":
            assert flags() == (True, False, False, False)
            assert torch.is_deterministic_algorithms_warn_only_enabled()
        else:
            assert flags() == before
    assert flags() == before
