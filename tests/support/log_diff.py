"""Writes training logs and compares them as the command ``parity diff`` does."""

import argparse
import json
import math
from pathlib import Path

from reports.logdiff.command import DIFF

STEPS = range(1, 81)


def write(
    folder: Path, name: str, *, factor: float = 1.0, from_step: int = 1, seed: float = 0.0, **changes: float
) -> str:
    """A log whose loss is multiplied by ``factor`` from a step on; ``changes`` replace losses by step, as s50=1.0."""
    rows = []
    for step in STEPS:
        loss = 1 + math.exp(-step / 20) + 0.01 * math.sin(step * (1.0 + seed))
        row = {
            "step": step,
            "tokens": 64 * step,
            "loss": loss,
            "lr": 1e-3,
            "grad_norm": 1 + 0.1 * math.cos(step + seed),
        }
        row["loss"] = changes.get(f"s{step}", row["loss"] * (factor if step >= from_step else 1.0))
        rows.append(json.dumps(row))
    (folder / name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    return str(folder / name)


def diff(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    DIFF.add_arguments(parser)
    return DIFF.run(parser.parse_args(list(map(str, arguments))))


def constant_columns(folder: Path, name: str, **values: float) -> str:
    """A log of constant columns; a double underscore stands for a slash."""
    rows = [{"step": step, **{own.replace("__", "/"): value for own, value in values.items()}} for step in STEPS]
    (folder / name).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(folder / name)
