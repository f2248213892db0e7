"""Trains a step with any backend in ranks, and writes its weights, for tests of exports and conversions."""

import contextlib
from pathlib import Path
from typing import Any

from resume_tasks import Training
from safetensors.torch import save_file

from conformance.numerics.float64_tier import exact_tier
from conformance.runtime import RankContext
from impl.checkpoints.training_state import export_state


def write_state(path: Path, model: Any) -> None:
    path.mkdir(exist_ok=True)  # by any rank
    export_state(path, model)


def write_all(
    context: RankContext,
    *,
    training: dict[str, Any],
    out: str,
    wanted: list[str],
) -> None:
    """Train two steps; write what is ``wanted`` of it: folders of these names, and the masters in a file."""
    of = Training(**training)
    with exact_tier() if of.config.precision == "exact" else contextlib.nullcontext():
        backend = of.set_up(context)
        for batch in of.read_batches()[:2]:
            backend.train_step(batch, lambda model: None)
        model: Any = backend.models["policy"]
        folder = Path(out)
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
