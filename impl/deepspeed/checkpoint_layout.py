"""How a DeepSpeed checkpoint is partitioned, and which checkpoints a layout can load.

A checkpoint is partitioned like the state of DeepSpeed's optimizer, so only an optimizer of the same class can load it.
For a checkpoint that it cannot load, DeepSpeed raises errors that do not name the cause, some of them after it has
changed weights (docs/findings/deepspeed-checkpoint-changes.md); ``check`` refuses such a checkpoint first.

Frozen parameters of DeepSpeed's checkpoints, put together from the files of all ranks.

DeepSpeed's universal conversion goes by the optimizer's state, which they have none of: at ZeRO-3 it leaves them out,
and at ZeRO-1 and 2 it copies what the first tensor-parallel rank has of them, in float32. The files hold all of them.
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

WAY_ON = (
    'hand over a state instead, which every layout reads (export_state and import_state; save = "state" in a cell; '
    "parity convert makes one of a checkpoint)"
)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How the files of a checkpoint are partitioned.

    stage: the ZeRO stage, or the two stages that share an optimizer class. ranks: the number of ranks that ZeRO
    partitions over, which are those of data parallelism, ring and Ulysses together. optimizer: the class name of the
    base optimizer. groups: the order of its parameter groups; checkpoints of before 2026-11-25 do not say it.
    """

    stage: str
    precision: str
    tp: int
    ulysses: int
    ranks: int
    optimizer: str
    groups: str = "with the largest first"


def largest_group_last(stage: int) -> bool:
    """Whether the engine gets the largest of its parameter groups last."""
    return stage in (1, 2)


def engine_cut(layout: Layout, precision: PrecisionName, *, optimizer: str) -> Cut:
    """How the checkpoints of an engine are partitioned. ``optimizer``: the class name of its base optimizer."""
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
    """Whether the files are partitioned like this layout, so that DeepSpeed loads them without its universal form."""
    return saved.tp == own.tp and (saved.ranks == own.ranks or own.stage == "zero0")


def check(saved: Cut, own: Cut) -> None:
    """Raise UsageError if an engine partitioned as ``own`` cannot load a checkpoint partitioned as ``saved``."""
    for name in ("stage", "precision", "optimizer", "groups"):
        before, now = getattr(saved, name), getattr(own, name)
        if before != now:
            raise UsageError(f"DeepSpeed reads a checkpoint of {name} {before} into the same only, not {now}; {WAY_ON}")
    if fits(saved, own):
        return
    reason = ""
    if own.stage == "zero0":
        reason = "zero0"
    elif "Adam" not in own.optimizer:
        reason = f"{own.optimizer}, only for AdamW"
    elif own.stage != "zero3" and any(cut.ulysses > 1 and cut.tp == 1 for cut in (saved, own)):
        reason = "Ulysses below zero3"  # its mpu lacks functions that DeepSpeed calls then
    elif own.stage == "zero3" and own.tp not in (1, saved.tp):
        reason = "another tp at zero3"  # it would copy whole tensors into the space of tensor-parallel parts
    if reason:
        raise UsageError(
            f"the checkpoint is cut over tp{saved.tp} and {saved.ranks} ranks of ZeRO, and this layout over tp{own.tp} "
            f"and {own.ranks}; DeepSpeed's universal form, which goes between them, is not for {reason}; {WAY_ON}"
        )


_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


HOW_CUT = "universal_checkpoint_info"


def how_cut(tag: Path) -> Mapping[str, Any]:
    """What the checkpoint says of how AutoTP cut its parameters; empty where nothing was cut."""
    return read_torch_file(min(tag.glob("*_model_states.pt"))).get(HOW_CUT) or {}


def frozen_shapes(model: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what a file of model states holds and the optimizer does not; of one tensor-parallel rank."""
    told = model.get("frozen_param_shapes")
    if told is None:  # ZeRO-1 does not tell them apart from the others
        trained = {name for group in model.get("param_shapes") or () for name in group}
        others = trained.union(model.get("buffer_names") or (), model.get("shared_params") or ())
        told = {name: tensor.shape for name, tensor in (model["module"] or {}).items() if name not in others}
    return {name: tuple(shape) for name, shape in told.items()}


def frozen_dtype(model: Mapping[str, Any], name: str) -> torch.dtype:
    found: torch.dtype = (model.get("frozen_param_fragments") or model["module"])[name].dtype
    return found


def frozen_parts(tag: Path) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Each frozen parameter, as the part of every tensor-parallel rank. Raises UsageError where a file is missing."""
    files = {(int(m[2]), int(m[1] or 0)): file for file in tag.iterdir() if (m := _FILE.fullmatch(file.name))}
    ranks = [{at[i] for at in files} for i in (0, 1)]
    if len(files) != len(ranks[0]) * len(ranks[1]) or any(one != set(range(len(one))) for one in ranks):
        raise UsageError(f"{tag} lacks files of model states of some ranks; give the folder with those of all ranks")
    models = [[read_torch_file(files[tp, dp]) for dp in sorted(ranks[1])] for tp in sorted(ranks[0])]
    for name in frozen_shapes(models[0][0]):
        yield name, [_part(name, of_ranks, tag) for of_ranks in models]


def _part(name: str, models: list[Mapping[str, Any]], tag: Path) -> torch.Tensor:
    """What the ranks of a tensor-parallel part have of a parameter: at ZeRO-3 a piece each, the last one padded."""
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
