"""Provides checkpoints written by ranks, and their expected conversions, for tests of conversions."""

from pathlib import Path
from typing import Any

import torch
from cells import BACKENDS, ranks_of
from safetensors.torch import load_file

from conformance.data.inputs import prepare_inputs
from conformance.runtime import Pool
from conformance.spec.scenario import scenario_to_json
from impl.convert.convert import convert, open_state, read
from impl.models.export import stored_dtypes


def train(pool: Pool, folder: Path, backend: str, asked: Any) -> None:
    """Train two steps, and write into ``folder`` what a backend has then: its checkpoint, a training state, models."""
    inputs = prepare_inputs(asked.scenario, folder / "inputs")
    outcome = pool.run(
        key=f"{backend} files",
        config=ranks_of(backend, asked.world_size),
        task="checkpoint_tasks:write_all",
        kwargs={
            "training": {
                "target": BACKENDS[backend].target,
                "scenario": scenario_to_json(asked.scenario),
                "layout": str(asked.phases[0].layout),
                "models": {role: str(path) for role, path in inputs.models.items()},
                "batches": str(inputs.batches),
            },
            "out": str(folder),
            "wanted": ["checkpoint", "state", "masters", "source"],
        },
        log_dir=folder / "logs",
        budget_s=240.0,
    )
    assert outcome.state == "done", outcome.reason


def assert_same_state(one: Path, other: Path) -> None:
    """Two training states hold the same bits."""
    first, second = open_state(one), open_state(other)
    found = [{(held.kind, held.name): read(held) for held in state.tensors} for state in (first, second)]
    assert found[0].keys() == found[1].keys()
    for key, tensor in found[0].items():
        assert tensor.dtype == found[1][key].dtype, key
        assert torch.equal(tensor, found[1][key]), key
    assert first.progress == second.progress


def assert_converted(folder: Path, source: Path, made: Path) -> None:
    """What becomes of a checkpoint in ``folder`` is what the ranks have exported, to the bit."""
    convert(folder / "checkpoint", made / "state", to="state", model=source, report=lambda *_: None)
    assert_same_state(made / "state", folder / "state")
    convert(folder / "checkpoint", made / "hf", to="hf", model=source, report=lambda *_: None)
    convert(folder / "state", made / "from state", to="hf", model=source, report=lambda *_: None)
    masters = load_file(folder / "masters.safetensors")
    for path in (made / "hf", made / "from state"):
        found = load_file(path / "model.safetensors")
        assert found.keys() == masters.keys()
        for name, dtype in stored_dtypes(source).items():
            assert found[name].dtype == dtype
            assert torch.equal(found[name], masters[name].to(dtype)), name
    assert {path.name for path in made.iterdir()} == {"state", "hf", "from state"}
