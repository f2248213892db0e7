"""Whole tensors of two records that were written with ``full=True``: exact distances, and where they are largest."""

from collections.abc import Iterator

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from conformance.validation import UsageError, one_line
from parity.files import Line, Run
from parity.quantities import Pair, Stage

COMPARED_WHOLE = 4


def exact(pair: Pair, stage: Stage) -> Iterator[str]:
    """Sentences about the worst tensors of a stage; none if it has no tensors, or a side did not keep them."""
    if stage.name not in ("weights", "gradients", "update"):
        return
    for name in [quantity.what for quantity in stage.different if not quantity.said][:COMPARED_WHOLE]:
        x, y = (_whole_values(run, stage, name) for run in (pair.a, pair.b))
        if x is None or y is None:
            return
        apart = (x - y).abs()
        worst = [int(place) for place in np.unravel_index(int(apart.argmax()), apart.shape)]
        size = max(float(x.norm()), float(y.norm()))
        count = f"{int((apart > 0).sum())} of {apart.numel()} elements"
        yield (
            f"{name}: exactly {float(apart.norm()) / size:.6g} apart, in {count}, "
            f"most at {worst}: {float(x[tuple(worst)]):.6g} and {float(y[tuple(worst)]):.6g}."
        )


def _whole_values(run: Run, stage: Stage, name: str) -> Tensor | None:
    """What a stage is about, in float64."""
    if stage.step is None:
        return _read(run, run.loaded, f"weight/{name}")
    line = run.steps[stage.step]
    if stage.name == "gradients":
        return _read(run, line, f"gradient/{name}")
    earlier = [run.loaded, *(step for step in run.steps[: stage.step] if step["stepped"])]
    before, after = _read(run, earlier[-1], f"weight/{name}"), _read(run, line, f"weight/{name}")
    return None if before is None or after is None else after - before


def _read(run: Run, line: Line, key: str) -> Tensor | None:
    path = run.tensors(line)
    if path is None:
        return None
    try:
        with safe_open(path, framework="pt") as file:
            found: Tensor = file.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} cannot be read ({one_line(error)}); record the training again") from None
    return found.double()
