"""Compiled layers (impl/engine/hugging_face.py) of ranks that compute alike are compiled alike."""

from pathlib import Path

import pytest
import torch
from cells import cell_of, ranks_of, slow
from torch._inductor import config

from conformance.data.inputs import prepare_inputs
from conformance.runtime import Pool
from conformance.spec.scenario import scenario_to_json
from impl.engine.hugging_face import compile_layers, forget_compiled


class Layer(torch.nn.Linear):
    """As the layer of a model, here without anything else around it."""


class Model(torch.nn.Sequential):
    _no_split_modules = ("Layer",)


@pytest.mark.exhaustive  # compiles
@pytest.mark.parametrize("deterministic", [True, False])
def test_ranks_that_compute_alike_take_no_kernel_by_the_clock(deterministic: bool) -> None:
    """docs/findings/inductor-ranks-choose.md. The pass is called for the forward and for the backward pass."""
    asked: list[bool] = []
    model = Model(Layer(4, 4))
    compile_layers(model, deterministic=deterministic, shipped=True)
    try:
        with config.patch(post_grad_custom_post_pass=lambda _: asked.append(config.deterministic)):
            model(torch.ones(1, 4)).sum().backward()
    finally:
        forget_compiled()
    assert asked == [deterministic, deterministic]


@pytest.mark.parametrize(
    ("backend", "layout", "deterministic"),
    [
        slow("fsdp2", "dp2.compile", False),
        ("fsdp2", "tp2.compile", True),
        ("deepspeed", "dp2.zero2.compile", False),
        slow("deepspeed", "tp2.zero1.compile", True),
    ],
)
def test_ranks_compute_alike_where_tensors_are_cut(
    pool: Pool, tmp_path: Path, backend: str, layout: str, deterministic: bool
) -> None:
    scenario = cell_of(backend, "sft-padded", "llama", layout, "bf16").scenario
    models = {role: str(folder) for role, folder in prepare_inputs(scenario, tmp_path).models.items()}
    asked = {"backend": backend, "scenario": scenario_to_json(scenario), "layout": layout, "models": models}
    outcome = pool.run(
        key="shared",
        config=ranks_of(backend, 2),
        task="backend_tasks:asked_for",
        kwargs=asked,
        log_dir=tmp_path / "logs",
        budget_s=120.0,
    )
    assert outcome.results == [[deterministic], [deterministic]], outcome.reason
