"""Converts checkpoints of ZeRO 1 to 3 to DeepSpeed's universal form in this process."""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import ds_to_universal

WEIGHT, *MOMENTS = "fp32", "exp_avg", "exp_avg_sq"


def make_universal(checkpoint: Path, out: Path, *, all_trained: bool) -> None:
    """Converts the folder of a tag into the new folder ``out``, in this process. Raises any error of DeepSpeed.

    all_trained: whether the model has no frozen parameters. The checkpoint describes for every parameter how AutoTP
        sharded it. A frozen parameter has no state to apply this to, which DeepSpeed's strict conversion rejects.
    """
    arguments = argparse.Namespace(
        input_folder=str(checkpoint),
        output_folder=str(out),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=all_trained,
        inject_missing_state=True,  # for entries that ZeRO-1 and 2 do not write
    )
    ds_to_universal.main(arguments)


def add_parameter(out: Path, name: str, parts: Sequence[torch.Tensor], info: Mapping[str, Any]) -> None:
    """Writes a parameter without a state into the universal checkpoint ``out``, replacing an existing one.

    parts: of the tensor-parallel ranks; ``info`` describes how AutoTP has sharded them. DeepSpeed's own function joins
        them. It requires moments, so it gets the weight in their place.
    """
    with tempfile.TemporaryDirectory(dir=out) as pieces:
        for rank, part in enumerate(parts):
            own = Path(pieces) / name / str(rank)
            own.mkdir(parents=True)
            torch.save(part.clone(), own / f"{WEIGHT}.00")  # a view would be saved with its whole storage
            for moment in MOMENTS:
                (own / f"{moment}.00").symlink_to(own / f"{WEIGHT}.00")
        shapes = [part.shape for part in parts]
        ds_to_universal.merge_tp_slices(dict(info), str(out / "zero"), pieces, len(parts), (name, shapes))
    for moment in MOMENTS:
        (out / "zero" / name / f"{moment}.pt").unlink()
