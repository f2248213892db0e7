"""Measures the memory of exports and of loading in ranks."""

import contextlib
import gc
from pathlib import Path
from typing import Any

from memory import give_back, peak_above, resident
from resume_tasks import Training

from conformance.numerics.float64_tier import exact_tier
from conformance.runtime import RankContext
from impl.checkpoints.training_state import export_state
from impl.models.export import write_model


def load_large(context: RankContext, *, training: dict[str, Any], folder: str) -> dict[str, int]:
    """Set up a training of the model in ``folder``: the largest memory beyond that before, and what stays of it.

    Another training has been there before, which has loaded libraries and opened process groups.
    """
    give_back()
    small, large = Training(**training), Training(**training | {"models": {"policy": folder}})
    with exact_tier() if small.config.precision == "exact" else contextlib.nullcontext():
        small.set_up(context).teardown()
        made = []
        gc.collect()
        before = resident("VmRSS")
        peak = peak_above(lambda: made.append(large.set_up(context)))
        held = resident("VmRSS") - before
        made.pop().teardown()
    return {"peak": peak, "held": held}


def export_large(
    context: RankContext,
    *,
    training: dict[str, Any],
    folder: str,
    out: str,
    file_size: int,
) -> dict[str, int]:
    """Train the model in ``folder`` for a step and export it; the peaks of both exports."""
    give_back()
    of = Training(**training | {"models": {"policy": folder}})
    backend = of.set_up(context)
    backend.train_step(of.read_batches()[0], lambda model: None)
    model: Any = backend.models["policy"]

    def save_model() -> None:
        weights = model.named_tensors("weight")
        write_model(Path(out) / "model", source=Path(folder), weights=weights, dtype="source", file_size=file_size)

    state = Path(out) / "state"
    state.mkdir(parents=True, exist_ok=True)
    peaks = {
        "model": peak_above(save_model),
        "state": peak_above(lambda: export_state(state, model, file_size=file_size)),
    }
    backend.teardown()
    return peaks
