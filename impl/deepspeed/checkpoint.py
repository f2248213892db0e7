"""DeepSpeed's own checkpoints, also of another number of ranks, by way of its universal form.

Its files are cut as its optimizer is, so they fit optimizers of the same class only; beside them lies a file that says
which that was. What DeepSpeed cannot read it refuses after it has changed some of the state, or never, so it is refused
here before.
"""

import argparse
import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.checkpoint import ds_to_universal

from conformance.validation import UsageError
from impl.strategy import ContextConfig

TAG, FILE = "state", "cut.json"
WAY_ON = 'hand over a state instead, which every layout reads (export_state and import_state; save = "state" in a cell)'


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a checkpoint is cut: by which class of optimizer, over how many ranks.

    ranks: those that ZeRO cuts over; they may be data ranks, of a ring or of Ulysses. universal: whether DeepSpeed's
    universal form has what the optimizer keeps.
    """

    stage: str
    precision: str
    tp: int
    ulysses: int
    ranks: int
    universal: bool


def cut_of_engine(engine: DeepSpeedEngine, config: ContextConfig) -> Cut:
    """What ``save`` writes of an engine, and ``load`` wants."""
    stage, layout = engine.zero_optimization_stage(), config.layout
    both = "zero1" if config.precision == "bf16" else "zero1 or zero2"  # in bf16, ZeRO-1 has a class of its own
    return Cut(
        stage={0: "zero0", 1: both, 2: "zero2" if config.precision == "bf16" else both, 3: "zero3"}[stage],
        precision=config.precision,
        tp=layout.tp,
        ulysses=layout.ulysses,
        ranks=layout.world_size // layout.tp,
        universal="betas" in engine.basic_optimizer.defaults,
    )


def save(engine: DeepSpeedEngine, path: Path, own: Cut) -> None:
    """Write a checkpoint into the folder ``path``; collective."""
    engine.save_checkpoint(str(path), tag=TAG)
    if dist.get_rank() == 0:
        (path / FILE).write_text(json.dumps(dataclasses.asdict(own)), encoding="utf-8")
    dist.barrier()


def load(engine: DeepSpeedEngine, path: Path, own: Cut) -> None:
    """Read what ``save`` wrote; collective. Raises UsageError, with nothing changed, where DeepSpeed cannot."""
    if not (path / FILE).is_file():
        raise UsageError(f"DeepSpeed found no checkpoint in {path}; give the folder that save_ckpt got")
    saved = Cut(**json.loads((path / FILE).read_text(encoding="utf-8")))
    check(saved, own)
    if saved.ranks == own.ranks or own.stage == "zero0":
        engine.load_checkpoint(str(path), tag=TAG)
    else:
        with _universal(path) as folder:
            _load_universal(engine, folder)


def check(saved: Cut, own: Cut) -> None:
    """Raises UsageError where DeepSpeed cannot read a checkpoint that is cut as ``saved`` is."""
    for name in ("stage", "precision", "tp"):
        before, now = getattr(saved, name), getattr(own, name)
        if before != now:
            told = f"{name} {before}, and this is {name} {now}" if name != "stage" else f"{before}, and this is {now}"
            raise UsageError(f"DeepSpeed's checkpoint is of {told}, which cannot read it; {WAY_ON}")
    if saved.ranks == own.ranks or own.stage == "zero0":
        return
    reason = ""
    if own.tp > 1:
        reason = "under AutoTP"
    elif own.ulysses > 1 and own.stage != "zero3":
        reason = "into Ulysses below zero3"
    elif not own.universal:
        reason = "of AdamW only, and not of this optimizer"
    if reason:
        raise UsageError(
            f"the checkpoint is cut over {saved.ranks} ranks and this layout cuts over {own.ranks}; DeepSpeed's "
            f"universal checkpoint, which goes between them, is not read {reason}; {WAY_ON}"
        )


@contextlib.contextmanager
def _universal(path: Path) -> Iterator[Path]:
    """The same checkpoint in the universal form, in a folder beside it, which all ranks see; removed in the end."""
    first = dist.get_rank() == 0
    made = tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.name}-") if first else contextlib.nullcontext()
    with made as folder:
        if first:
            arguments = argparse.Namespace(
                input_folder=str(path / TAG),
                output_folder=f"{folder}/{TAG}",
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,  # what ZeRO-1 and 2 do not write
            )
            ds_to_universal.main(arguments)
        told = [folder]
        dist.broadcast_object_list(told)
        assert told[0]
        yield Path(told[0])
        dist.barrier()


def _load_universal(engine: DeepSpeedEngine, folder: Path) -> None:
    optimizer = engine.basic_optimizer
    settings = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]
    engine._config.load_universal_checkpoint = True
    try:
        engine.load_checkpoint(str(folder), tag=TAG)
    finally:
        engine._config.load_universal_checkpoint = False
    # docs/findings/deepspeed-universal-groups.md: ZeRO-3 gives all groups the settings of the first, and one tensor
    # that counts the updates, in which each of them counts.
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group |= own
    for state in optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()
