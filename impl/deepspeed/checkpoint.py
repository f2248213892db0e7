"""Saves and loads DeepSpeed's checkpoints, also through its universal form if the layout has changed.

An additional file in the checkpoint, FILE, says how the checkpoint is partitioned
(impl/deepspeed/checkpoint_layout.py).

DeepSpeed ends a save with barriers, at which all ranks would wait for a rank whose disk is full. Its engines that write
beside the training need libaio or the package datastates, and one of them waits for the files in the next step.
Therefore DeepSpeed's default engine writes into memory here, and a thread writes to the disk.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.checkpoint import ds_to_universal

from conformance.core.errors import UsageError
from conformance.core.io import read_json
from impl.deepspeed.checkpoint_layout import Cut, check, fits, frozen_parts, how_cut
from impl.deepspeed.tensors import ReadRegion
from impl.interface.distributed import agree, on_first
from impl.interface.trainable import Writing

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


@contextlib.contextmanager
def _files_written(engine: Any, when: Writing) -> Iterator[None]:
    """Raises a failed write on all ranks, after the ``with`` statement or in the work added to ``when``; collective.

    The engine writes nothing else to the disk, so no rank raises while the others wait in the engine's barriers.
    """
    failed: list[Exception] = []
    copies: list[tuple[Path, io.BytesIO]] = []
    library, write = engine.checkpoint_engine, engine.checkpoint_engine.save

    def save(state_dict: Any, path: str) -> None:
        try:
            if when.copies:
                write(state_dict, copy := io.BytesIO())
                copies.append((Path(path), copy))
            else:
                write(state_dict, path)
        except Exception as error:
            failed.append(error)

    library.save, engine._copy_recovery_script = save, lambda path: None
    try:
        yield
    finally:
        del library.save, engine._copy_recovery_script
    agree("DeepSpeed writes a checkpoint", next(iter(failed), None))
    when.add(lambda: _write(copies))


def _write(copies: list[tuple[Path, io.BytesIO]]) -> None:
    for path, copy in copies:
        path.write_bytes(copy.getbuffer())


TAG, LATEST, FILE = "state", "latest", "cut.json"


def save(engine: DeepSpeedEngine, path: Path, own: Cut, when: Writing) -> None:
    """Writes a checkpoint into the folder ``path``; collective."""
    on_first(f"making {path / TAG}", lambda: (path / TAG).mkdir(parents=True, exist_ok=True))
    with _files_written(engine, when):
        engine.save_checkpoint(str(path), tag=TAG, save_latest=False)

    def write_others() -> None:
        (path / FILE).write_text(json.dumps(dataclasses.asdict(own)), encoding="utf-8")
        (path / LATEST).write_text(TAG, encoding="utf-8")
        engine._copy_recovery_script(str(path))

    on_first(f"writing {path}", write_others)


def load(engine: DeepSpeedEngine, path: Path, own: Cut, *, write_frozen: Callable[[ReadRegion], None]) -> None:
    """Loads a checkpoint of ``save``; collective. ``write_frozen`` sets the parameters that the engine does not train.

    Raises UsageError, before the engine is changed, if there is no checkpoint or DeepSpeed cannot load it.
    """
    if not (path / FILE).is_file():
        raise UsageError(f"DeepSpeed found no checkpoint in {path}; give the folder that was passed to save_ckpt")
    saved = Cut(**read_json(path / FILE))
    check(saved, own)
    if fits(saved, own):
        engine.load_checkpoint(str(path), tag=TAG)
    else:
        with _universal(path, all_trained=all(p.requires_grad for p in engine.module.parameters())) as folder:
            _load_universal(engine, folder)
            # docs/findings/deepspeed-universal-frozen.md: DeepSpeed leaves frozen parameters as they were.
            write_frozen(_regions(folder / TAG))


@contextlib.contextmanager
def _universal(path: Path, *, all_trained: bool) -> Iterator[Path]:
    """Converts the checkpoint ``path`` into the universal form, in a temporary folder that all ranks can read.

    The folder is beside the checkpoint, because the checkpoint itself may only have files that its manifest lists.
    """
    first = dist.get_rank() == 0
    made = (
        tempfile.TemporaryDirectory(dir=path.parent.parent, prefix=f"{path.name}-")
        if first
        else contextlib.nullcontext()
    )
    with made as folder:
        broadcast = [folder]
        dist.broadcast_object_list(broadcast)
        assert broadcast[0]
        converted = Path(broadcast[0])
        on_first(f"converting {path}", lambda: _convert(path / TAG, converted / TAG, all_trained=all_trained))
        yield converted
        dist.barrier()


def _convert(tag: Path, out: Path, *, all_trained: bool) -> None:
    make_universal(tag, out, all_trained=all_trained)
    if not all_trained:
        for name, parts in frozen_parts(tag):
            add_parameter(out, name, parts, how_cut(tag))


def _regions(tag: Path) -> ReadRegion:
    """Reads regions of parameters in a universal checkpoint by the engine's names; the last parameter stays open."""

    @lru_cache(maxsize=1)
    def whole(name: str) -> torch.Tensor:
        found: torch.Tensor = torch.load(tag / "zero" / name / "fp32.pt", mmap=True)["param"]
        return found

    def region(name: str, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        return whole(name)[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))]

    return region


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
