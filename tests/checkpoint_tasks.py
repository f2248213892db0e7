"""Tasks that tests of exports and conversions run in ranks: train a step with any backend, and write what it has."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from conformance.backend import BackendEntry
from conformance.batch import read_batches
from conformance.layout import Layout
from conformance.run.exact import exact_tier
from conformance.scenario import parse_scenario
from conformance.world import RankContext
from impl.model_folder import write_model
from impl.training_state import export_state


def write_state(path: Path, model: Any) -> None:
    path.mkdir(exist_ok=True)  # by any rank
    export_state(path, model)


def write_all(
    context: RankContext,
    *,
    target: str,
    scenario: dict[str, Any],
    layout: str,
    models: dict[str, str],
    batches: str,
    out: str,
    wanted: list[str],
) -> None:
    """Train two steps; write what is ``wanted`` of it: folders of these names, and the masters in a file."""
    config = parse_scenario(scenario)
    backend: Any = BackendEntry(name="", target=target).load()()
    with exact_tier() if config.precision == "exact" else contextlib.nullcontext():
        folders = {role: Path(folder) for role, folder in models.items()}
        backend.setup(config, Layout.parse(layout), folders, context.device)
        for batch in read_batches(Path(batches))[:2]:
            backend.train_step(batch, lambda model: None)
        folder, model = Path(out), backend.models["policy"]
        masters = {name: weight.cpu() for name, weight in model.named_tensors("weight")}
        if context.rank == 0:
            save_file({name: weight.contiguous() for name, weight in masters.items()}, folder / "masters.safetensors")
        writers = {
            "checkpoint": model.save_ckpt,
            "state": lambda path: write_state(path, model),
            "masters": lambda path: model.save_model(path, dtype="masters"),
            "source": model.save_model,
        }
        for name in wanted:
            writers[name](folder / name)
        backend.teardown()


def write_without_room(context: RankContext, *, source: str, out: str) -> tuple[int, str]:
    """Write a model where the first rank may make no file of its size; tensors that were asked for, and the error."""
    asked = 0

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal asked
        for name, weight in load_file(Path(source) / "model.safetensors").items():
            asked += 1
            yield name, weight

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if context.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
    try:
        write_model(Path(out), source=Path(source), weights=weights(), dtype="masters", file_size=30_000)
    except OSError as error:
        return asked, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return asked, ""
