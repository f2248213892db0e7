"""Frozen parameters of DeepSpeed's checkpoints, put together from the files of all ranks.

DeepSpeed's universal conversion goes by the optimizer's state, which they have none of: at ZeRO-3 it leaves them out,
and at ZeRO-1 and 2 it copies what the first tensor-parallel rank has of them, in float32. The files hold all of them.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from conformance.validation import UsageError
from impl.checkpoints.pickles import read_torch_file

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
