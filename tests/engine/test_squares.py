"""The sums of squares behind gradient norms, to the last digits, also on a CPU."""

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from impl.engine.optimizers import sums_of_squares


@pytest.fixture
def placement() -> Any:
    """Returns impl.megatron.device_placement, which imports megatron-core."""
    return pytest.importorskip("impl.megatron.device_placement")


@cache
def numbers(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(10**6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@cache
def square_of(tensor: torch.Tensor) -> float:
    return math.fsum((tensor.double() ** 2).tolist())


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float64, 4e-16), (torch.float32, 1e-13), (torch.bfloat16, 1e-13)]
)
def test_a_million_numbers_lose_no_digits(dtype: torch.dtype, allowed: float) -> None:
    tensor = numbers(dtype)
    (found,) = sums_of_squares([tensor])
    assert found.dtype == torch.float64
    assert abs(found.item() / square_of(tensor) - 1) < allowed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_deepspeeds_norm_on_a_cpu_has_the_digits_of_its_dtype(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    process = pytest.importorskip("impl.deepspeed.global_state")
    tensors = [numbers(dtype), numbers(dtype)[:1000]]
    monkeypatch.setattr(torch.Tensor, "norm", process._norm)
    for tensor in tensors:
        assert abs(tensor.norm().item() / math.sqrt(square_of(tensor)) - 1) <= torch.finfo(dtype).eps
        assert torch.equal(tensor.norm(2.0), tensor.norm())
    columns = tensors[0].view(-1, 4)
    assert torch.equal(columns.norm(dim=1), torch.linalg.vector_norm(columns, dim=1))
    assert torch.equal(tensors[1].norm(1), torch.linalg.vector_norm(tensors[1], 1))


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_megatrons_norm_has_the_digits_of_its_dtype(placement: Any, device: str) -> None:
    tensors, clip = [numbers(torch.float32), numbers(torch.float32)[:1000]], placement.clip_grads
    right = math.sqrt(sum(map(square_of, tensors)))
    with placement.placed(device, exact=False):
        norm, _ = clip.multi_tensor_applier(clip.l2_norm_impl, torch.zeros(1), [tensors], False)
    assert (norm.dtype, norm.shape) == (torch.float32, (1,))
    assert abs(norm.item() / right - 1) <= torch.finfo(torch.float32).eps / 2
    assert abs(torch.norm(tensors[0]).item() ** 2 / square_of(tensors[0]) - 1) > 1e-6  # which it would take


def test_megatrons_norm_reads_nothing_from_the_device(placement: Any) -> None:
    """Whoever reads a number, as the library does for every tensor, fails with tensors that have none."""
    with placement.placed("cuda:0", exact=False), FakeTensorMode():
        tensors, clip = [[torch.empty(3), torch.empty(2, 2)]], placement.clip_grads
        norm, _ = clip.multi_tensor_applier(clip.l2_norm_impl, torch.zeros(1), tensors, False)
        assert norm.shape == (1,)
        with pytest.raises(RuntimeError, match="data is not allocated"):
            clip.multi_tensor_applier(placement.local_multi_tensor_l2_norm, torch.zeros(1), tensors, False)
