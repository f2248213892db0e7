"""Compiled layers (impl/compiling.py) of ranks that compute alike are compiled alike."""

import pytest
import torch
from torch._inductor import config

from impl.compiling import compile_layers, forget_compiled


class Layer(torch.nn.Linear):
    """As the layer of a model, here without anything else around it."""


class Model(torch.nn.Sequential):
    _no_split_modules = ("Layer",)


@pytest.mark.exhaustive  # compiles
@pytest.mark.parametrize("alike", [True, False])
def test_ranks_that_compute_alike_take_no_kernel_by_the_clock(alike: bool) -> None:
    """docs/findings/inductor-ranks-choose.md. The pass is called for the forward and for the backward pass."""
    asked: list[bool] = []
    model = Model(Layer(4, 4))
    compile_layers(model, alike=alike, shipped=True)
    try:
        with config.patch(post_grad_custom_post_pass=lambda _: asked.append(config.deterministic)):
            model(torch.ones(1, 4)).sum().backward()
    finally:
        forget_compiled()
    assert asked == [alike, alike]
