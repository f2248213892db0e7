"""Saves and loads DeepSpeed's own checkpoints; one of another layout is loaded by way of DeepSpeed's universal form.

An additional file in the checkpoint, FILE, says how the checkpoint is partitioned (impl/deepspeed/cut.py).
"""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from conformance.validation import UsageError
from impl.checkpoints.writing import Writing
from impl.deepspeed.cut import Cut, check, fits
from impl.deepspeed.universal import make_universal
from impl.deepspeed.writing import files_written
from impl.together import on_first

TAG, FILE = "state", "cut.json"


def save(engine: DeepSpeedEngine, path: Path, own: Cut, when: Writing) -> None:
    """Write a checkpoint into the folder ``path``; collective."""
    with files_written(engine, when):
        engine.save_checkpoint(str(path), tag=TAG)
    told = json.dumps(dataclasses.asdict(own))
    on_first(f"writing {path / FILE}", lambda: (path / FILE).write_text(told, encoding="utf-8"))


def load(engine: DeepSpeedEngine, path: Path, own: Cut) -> None:
    """Load a checkpoint of ``save``; collective.

    Raises UsageError, before the engine is changed, if there is no checkpoint or DeepSpeed cannot load it.
    """
    if not (path / FILE).is_file():
        raise UsageError(f"DeepSpeed found no checkpoint in {path}; give the folder that save_ckpt got")
    saved = Cut(**json.loads((path / FILE).read_text(encoding="utf-8")))
    check(saved, own)
    if fits(saved, own):
        engine.load_checkpoint(str(path), tag=TAG)
    else:
        with _universal(path, all_trained=all(p.requires_grad for p in engine.module.parameters())) as folder:
            _load_universal(engine, folder)


@contextlib.contextmanager
def _universal(path: Path, *, all_trained: bool) -> Iterator[Path]:
    """Convert the checkpoint ``path`` into the universal form, in a temporary folder that all ranks can read.

    The folder is beside the checkpoint, because the checkpoint itself may only have files that its manifest lists.
    """
    first = dist.get_rank() == 0
    made = (
        tempfile.TemporaryDirectory(dir=path.parent.parent, prefix=f"{path.name}-")
        if first
        else contextlib.nullcontext()
    )
    with made as folder:
        told = [folder]
        dist.broadcast_object_list(told)
        assert told[0]
        whole = Path(told[0])
        on_first(f"converting {path}", lambda: make_universal(path / TAG, whole / TAG, all_trained=all_trained))
        yield whole
        dist.barrier()


def _load_universal(engine: DeepSpeedEngine, folder: Path) -> None:
    optimizer = engine.basic_optimizer
    settings = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]
    engine._config.load_universal_checkpoint = True
    try:
        engine.load_checkpoint(str(folder), tag=TAG)
    finally:
        engine._config.load_universal_checkpoint = False
    # docs/findings/deepspeed-universal-groups.md: ZeRO-3 gives all groups the settings of the first group, and one
    # shared tensor for the number of updates, which each group then increments.
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group |= own
    for state in optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()
