"""Placement: megatron-core's CUDA is the CPU inside its calls, no number changes, and nothing is left behind."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from conformance.backends import on_cpu


@pytest.fixture
def placement() -> Any:
    """Returns impl.megatron.device_placement, which imports megatron-core."""
    return pytest.importorskip("impl.megatron.device_placement")


def step(device: str | None) -> dict[str, torch.Tensor]:
    """Forward, backward through a custom function and a checkpoint, and an update of a small network."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.RMSNorm(16), torch.nn.SiLU(), torch.nn.Linear(16, 8))
    model.to(torch.get_default_dtype())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 32, device=device).view(4, 8).requires_grad_()
    logits = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True)
    loss = torch.nn.functional.cross_entropy(logits, torch.arange(4, device=device)) + model(x).square().mean()
    loss.backward()
    optimizer.step()
    gradients = {f"gradient/{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "random": torch.rand(4, device=device), **gradients, **model.state_dict()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_number_changes(placement: Any, dtype: torch.dtype) -> None:
    with default_dtype(dtype):
        plain = step(device=None)
        with placement.placed("cpu", exact=dtype == torch.float64):
            moved = step(device="cuda")
    assert plain.keys() == moved.keys()
    assert all(torch.equal(plain[name], moved[name]) and moved[name].device.type == "cpu" for name in plain)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def attributes(placement: Any) -> list[Any]:
    every = (*placement._REPLACEMENTS, *on_cpu._REPLACEMENTS)
    return [vars(owner).get(name) for owner, names in every for name in names] + [placement.clip_grads.l2_norm_impl]


def test_nothing_is_left_even_after_an_exception(placement: Any) -> None:
    before = attributes(placement)
    with contextlib.suppress(RuntimeError), placement.placed("cpu", exact=True):
        assert attributes(placement) != before
        with placement.placed("cpu", exact=True):
            assert torch.zeros(1, device="cuda", pin_memory=True).cuda().device.type == "cpu"
        raise RuntimeError
    assert attributes(placement) == before
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_dtypes_have_the_names_that_megatron_looks_for(placement: Any) -> None:
    with placement.placed("cpu", exact=False):
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(1).type(torch.float64).dtype == torch.float64  # a conversion stays one
    with placement.placed("cpu", exact=True):
        assert torch.zeros(1, dtype=torch.float64).type() == "torch.cuda.FloatTensor"


def test_on_a_gpu_the_norm_is_replaced_and_in_the_exact_tier_the_names_of_dtypes(placement: Any) -> None:
    before = attributes(placement)
    for exact, dtype in ((False, torch.float32), (True, torch.float64)):
        with placement.placed("cuda:0", exact=exact), placement.placed("cuda:0", exact=exact):
            assert attributes(placement) == [*before[:-1], placement._l2_norm]
            assert torch.zeros(1, dtype=dtype).type() == "torch.FloatTensor"
        assert attributes(placement) == before


def test_a_norm_of_another_package_stays(placement: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of Apex or TransformerEngine, where megatron-core has found one."""
    monkeypatch.setattr(placement.clip_grads, "l2_norm_impl", sum)
    with placement.placed("cuda:0", exact=False):
        assert placement.clip_grads.l2_norm_impl is sum
