"""Describes how a DeepSpeed checkpoint is partitioned, and decides which checkpoints a layout can load.

A checkpoint is partitioned like the state of DeepSpeed's optimizer, so only an optimizer of the same class can load it.
For a checkpoint that it cannot load, DeepSpeed raises errors that do not name the cause, some of them after it has
changed weights (docs/findings/deepspeed-checkpoint-changes.md); ``check`` rejects such a checkpoint first.

Frozen parameters are collected from the files of all ranks. DeepSpeed's universal conversion follows the optimizer's
state, and they have none: at ZeRO-3 it omits them, and at ZeRO-1 and 2 it copies the part of the first tensor-parallel
rank, in float32.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conformance.core.errors import UsageError
from conformance.spec.layout import Layout
from conformance.spec.precision import BF16, PRECISIONS, PrecisionName
from impl.checkpoints.safe_pickle import read_torch_file
from impl.deepspeed.config import zero_stage

ADVICE = (
    'transfer a training state instead, which every layout reads (export_state and import_state; save = "state" in a '
    "cell; parity convert makes one from a checkpoint)"
)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Describes how the files of a checkpoint are partitioned.

    stage: the ZeRO stage, or the two stages that share an optimizer class.
    ranks: the number of ranks that ZeRO partitions over: data, context-parallel and Ulysses ranks together.
    optimizer: the class name of the base optimizer.
    groups: the order of its parameter groups; checkpoints from before 2026-11-25 do not contain it.
    """

    stage: str
    precision: str
    tp: int
    ulysses: int
    ranks: int
    optimizer: str
    groups: str = "with the largest first"


def largest_group_last(stage: int) -> bool:
    """Returns whether the engine gets the largest of its parameter groups last."""
    return stage in (1, 2)


def engine_cut(layout: Layout, precision: PrecisionName, *, optimizer: str) -> Cut:
    """Describes how an engine partitions checkpoints. ``optimizer``: the class name of its base optimizer."""
    stage = zero_stage(layout)
    one_class = stage in (1, 2) and PRECISIONS[precision].compute != BF16  # in bf16, ZeRO-1 has a class of its own
    return Cut(
        stage="zero1 or zero2" if one_class else f"zero{stage}",
        precision=precision,
        tp=layout.tp,
        ulysses=layout.ulysses,
        ranks=layout.world_size // layout.tp,
        optimizer=optimizer,
        groups="with the largest last" if largest_group_last(stage) and "Adam" in optimizer else Cut.groups,
    )


def fits(saved: Cut, own: Cut) -> bool:
    """Returns whether the files are partitioned as ``own``, so that DeepSpeed loads them without its universal form."""
    return saved.tp == own.tp and (saved.ranks == own.ranks or own.stage == "zero0")


def check(saved: Cut, own: Cut) -> None:
    """Raises UsageError if an engine partitioned as ``own`` cannot load a checkpoint partitioned as ``saved``."""
    for name in ("stage", "precision", "optimizer", "groups"):
        before, now = getattr(saved, name), getattr(own, name)
        if before != now:
            raise UsageError(f"DeepSpeed loads a checkpoint of {name} {before} only into the same, not {now}; {ADVICE}")
    if fits(saved, own):
        return
    reason = ""
    if own.stage == "zero0":
        reason = "zero0"
    elif "Adam" not in own.optimizer or "Muon" in own.optimizer:
        reason = f"{own.optimizer}, only AdamW"
    elif own.stage != "zero3" and any(cut.ulysses > 1 and cut.tp == 1 for cut in (saved, own)):
        reason = "Ulysses below zero3"  # its mpu lacks functions that DeepSpeed calls then
    elif own.stage == "zero3" and own.tp not in (1, saved.tp):
        reason = "another tp at zero3"  # DeepSpeed would copy whole tensors into the memory of tensor-parallel parts
    if reason:
        raise UsageError(
            f"the checkpoint is partitioned over tp{saved.tp} and {saved.ranks} ranks of ZeRO, but this layout over "
            f"tp{own.tp} and {own.ranks}; DeepSpeed's universal form does not support {reason}; {ADVICE}"
        )


_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


HOW_CUT = "universal_checkpoint_info"


def how_cut(tag: Path) -> Mapping[str, Any]:
    """Returns the checkpoint's description of how AutoTP sharded its parameters; empty if nothing was sharded."""
    return read_torch_file(min(tag.glob("*_model_states.pt"))).get(HOW_CUT) or {}


def frozen_shapes(model: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of the frozen parameters in a file of model states of one tensor-parallel rank."""
    shapes = model.get("frozen_param_shapes")
    if shapes is None:  # ZeRO-1 does not list frozen parameters separately
        trained = {name for group in model.get("param_shapes") or () for name in group}
        not_frozen = trained.union(model.get("buffer_names") or (), model.get("shared_params") or ())
        shapes = {name: tensor.shape for name, tensor in (model["module"] or {}).items() if name not in not_frozen}
    return {name: tuple(shape) for name, shape in shapes.items()}


def frozen_dtype(model: Mapping[str, Any], name: str) -> torch.dtype:
    found: torch.dtype = (model.get("frozen_param_fragments") or model["module"])[name].dtype
    return found


def frozen_parts(tag: Path) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yields each frozen parameter as the parts of all tensor-parallel ranks. Raises UsageError for missing files."""
    files = {(int(m[2]), int(m[1] or 0)): file for file in tag.iterdir() if (m := _FILE.fullmatch(file.name))}
    ranks = [{at[i] for at in files} for i in (0, 1)]
    if len(files) != len(ranks[0]) * len(ranks[1]) or any(one != set(range(len(one))) for one in ranks):
        raise UsageError(f"{tag} lacks the model states of some ranks; give the folder with the files of all ranks")
    models = [[read_torch_file(files[tp, dp]) for dp in sorted(ranks[1])] for tp in sorted(ranks[0])]
    for name in frozen_shapes(models[0][0]):
        yield name, [_part(name, of_ranks, tag) for of_ranks in models]


def _part(name: str, models: list[Mapping[str, Any]], tag: Path) -> torch.Tensor:
    """Assembles a parameter's tensor-parallel part from its ranks: at ZeRO-3 each has a piece, the last one padded."""
    shape = torch.Size(frozen_shapes(models[0])[name])
    if len(models) == 1 and (model := models[0]).get("module", {}).get(name, torch.empty(0)).shape == shape:
        whole: torch.Tensor = model["module"][name]
        return whole
    flat = torch.cat([model["frozen_param_fragments"][name].flatten() for model in models])
    if len(flat) < shape.numel():
        raise UsageError(
            f"{tag} has {len(flat)} numbers of {name}, which has {shape.numel()}; files of ranks are missing"
        )
    return flat[: shape.numel()].view(shape)
