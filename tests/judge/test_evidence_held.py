"""Checks which storages count as weights of a rank when its gradients are ready (conformance.worker.evidence)."""

import pytest
import torch
from torch import Tensor

from conformance.worker.evidence import Watch

SIZE, BYTES = 8, 8 * 8 * 4  # a square matrix of float32


def held_after(keep: str) -> int:
    """Bytes that are counted after a backward pass of ``x @ w`` in which this is kept alive beside the weight."""
    weight = torch.randn(SIZE, SIZE)
    kept: list[Tensor] = []

    class Product(torch.autograd.Function):
        """As ZeRO-3 does it: the weight of the backward pass is another tensor than that of the forward pass."""

        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x @ weight

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            again = weight.clone()
            bucket = torch.empty(2 * SIZE * SIZE).copy_(torch.cat([again.flatten(), again.flatten()]))
            result = gradient @ again.t()
            kept.extend({"gathered again": [again], "bucket": [bucket], "gradient": [result], "nothing": []}[keep])
            return result

    with Watch() as watch:
        x = torch.randn(SIZE, SIZE, requires_grad=True)
        Product.apply(2 * x).sum().backward()  # type: ignore[no-untyped-call]
        del x
        watch.count_live_storages()
    return sum(size * count for size, count in watch.held_weights.items())


@pytest.mark.parametrize(("keep", "more"), [("nothing", 0), ("gathered again", BYTES), ("bucket", 0), ("gradient", 0)])
def test_held_bytes_count_weights_and_not_gradients(keep: str, more: int) -> None:
    assert held_after(keep) == BYTES + more


def test_tensors_without_numbers_are_not_held() -> None:
    with Watch() as watch:
        weight = torch.empty(SIZE, SIZE, device="meta")
        product = weight @ weight.t()
        watch.count_live_storages()
        assert (watch.checksums(), watch.held_weights) == ({}, {}), product


def test_a_buffer_that_is_only_cleared_is_not_held() -> None:
    buffers = torch.empty(SIZE, SIZE), torch.empty(SIZE, SIZE)
    with Watch() as watch:
        buffers[0].zero_()
        buffers[1].add_(1)
        watch.count_live_storages()
    assert watch.held_weights == {BYTES: 1}
