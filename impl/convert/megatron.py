"""Reads megatron-core's distributed checkpoints: splits whole tensors under Megatron's names into Hugging Face's.

The rows of a fused tensor follow from the model's configuration, so reading needs the model's folder. The mapping is
the one that ranks use for loading and saving (impl/megatron/hf_mapping.py), for a single rank that holds everything.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conformance.core.errors import UsageError
from conformance.core.io import read_json
from impl.checkpoints.safe_pickle import METADATA, read_metadata, read_torch_file
from impl.checkpoints.training_state import WRITTEN
from impl.convert.contents import Checkpoint, StoredTensor
from impl.convert.torch_distributed import stored_tensors, tensor_reader, writers
from impl.megatron.hf_mapping import FUSED, all_parameters, parts
from impl.megatron.model_config import read_shape
from impl.megatron.spans import Part, Rank, copy_to_full

FILE, COMMON = "metadata.json", "common.pt"
STACKED = re.compile(r"(^|\.)decoder\.layers\.(?!\d)")
ALONE = Rank(rank=0, size=1)
# Prefixes of a parameter's name for each kind; the first one found is used. Without a prefix, the tensor is the weight
# that ranks compute with. It is the master in float32 and of frozen parameters.
PREFIXES: dict[str, tuple[str, ...]] = {
    "weight": ("optimizer.state.param.", "optimizer.state.fp32_param.", ""),
    **{kind: (f"optimizer.state.{kind}.",) for kind in WRITTEN if kind not in ("weight", "step")},
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Locates a Hugging Face tensor: a part of the tensors ``keys``, concatenated row by row."""

    part: Part
    keys: tuple[str, ...]


def open_megatron(folder: Path) -> Checkpoint:
    """Opens a checkpoint with the library's names and stacked layers; see ``named`` for Hugging Face's names."""
    settings = read_json(folder / FILE)
    metadata = read_metadata(folder / METADATA)
    common = _common(folder)
    step = _step(common)
    tensors = tuple(
        StoredTensor(
            kind="other" if key.startswith("optimizer.") else "weight",
            name=key,
            shape=tuple(entry.size),
            dtype=entry.properties.dtype,
        )
        for key, entry in stored_tensors(metadata).items()
    )
    return Checkpoint(
        format="megatron dist_checkpointing",
        facts={
            "backend": settings.get("sharded_backend"),
            "writers": writers(metadata),
            **({} if step is None else {"step": step}),
        },
        tensors=tensors,
        progress=_progress(common),
    )


def named(folder: Path, model: Path) -> Checkpoint:
    """Opens a checkpoint with the names of the model in the Hugging Face folder ``model``, and readable tensors.

    Raises UsageError if the checkpoint is of another model, or has another structure.
    """
    shape = read_shape(model)
    if shape.mixture:
        raise UsageError(
            f"{model} has experts, which cannot be converted from megatron-core's checkpoints; load {folder} with the "
            f"backend megatron, and export a training state or a Hugging Face folder"
        )
    metadata = read_metadata(folder / METADATA)
    stored, whole = stored_tensors(metadata), tensor_reader(folder, metadata)
    if any(STACKED.search(key) for key in stored):
        raise UsageError(
            f"{folder} stores all layers of a parameter stacked in one tensor, which is not read; export a Hugging "
            f"Face folder with Megatron Bridge: python examples/conversion/convert_checkpoints.py export --hf-model "
            f"{model} --megatron-path {folder} --hf-path NEW"
        )
    found, step = open_megatron(folder), _step(_common(folder))
    tensors = []
    for name in all_parameters(shape):
        for kind, prefixes in PREFIXES.items():
            keys = next((keys for prefix in prefixes if (keys := _keys(prefix + _stored_name(name), stored))), ())
            if not keys and kind == "weight":
                raise UsageError(f"{folder} lacks {name}; give the --model of this checkpoint, with as many layers")
            for part in parts(name, shape, ALONE) if keys else ():
                dtype = stored[keys[0]].properties.dtype
                tensors.append(
                    StoredTensor(
                        kind=kind, name=part.name, shape=part.shape, dtype=dtype, place=Place(part=part, keys=keys)
                    )
                )
                rows = sum(stored[key].size[0] for key in keys)
                _check_rows(folder, name, part, rows)
    trained = dict.fromkeys(one.name for one in tensors if one.kind == "exp_avg")
    if step is not None:
        value = torch.tensor(step, dtype=torch.float64)
        tensors += [StoredTensor(kind="step", name=name, shape=(), dtype=value.dtype, place=value) for name in trained]
    return Checkpoint(
        format=found.format, facts=found.facts, tensors=tuple(tensors), progress=found.progress, read=_reading(whole)
    )


def _common(folder: Path) -> dict[str, Any]:
    """Reads the file that all ranks share; newer versions of the library may write none."""
    if not (folder / COMMON).exists():
        return {}
    found: dict[str, Any] = read_torch_file(folder / COMMON)
    return found


def _reading(whole: Callable[[str], torch.Tensor]) -> Callable[[StoredTensor], torch.Tensor]:
    def read(tensor: StoredTensor) -> torch.Tensor:
        if tensor.kind == "step":
            step: torch.Tensor = tensor.place
            return step
        fused = torch.cat([whole(key) for key in tensor.place.keys])
        full = torch.empty(tensor.shape, dtype=tensor.dtype)
        copy_to_full(tensor.place.part, fused, full)
        return full

    return read


def _stored_name(name: str) -> str:
    for plain, fused in FUSED.items():
        if name.endswith(f".{plain}"):
            return name.removesuffix(plain) + fused
    return name


def _keys(key: str, stored: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns a tensor's keys: one, or two if the library stores gate and up separately; empty if it is missing."""
    for keys in ((key,), (f"{key}_w", f"{key}_v")):
        if all(one in stored for one in keys):
            return keys
    return ()


def _check_rows(folder: Path, name: str, part: Part, rows: int) -> None:
    """Raises UsageError if a fused tensor is too short for the model. A vocabulary may be padded."""
    if part.dim == 0:
        due = max((span.own + span.length for span in part.spans), default=part.shape[0])
        if rows < due:
            raise UsageError(f"{folder} has {rows} rows of {name}, but the model has {due}; give its own --model")


def _states(common: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the nested dictionaries with the key ``optimizer``, outermost first."""
    inner = common.get("optimizer")
    while isinstance(inner, dict):
        yield inner
        inner = inner.get("optimizer")


def _step(common: Mapping[str, Any]) -> float | None:
    """Returns the optimizer's number of updates, which all parameters share; None for SGD."""
    for state in _states(common):
        if "common_step" in state.get("state", {}):
            return float(state["state"]["common_step"])
        for group in state.get("param_groups", ()):
            if "step" in group:
                return float(group["step"])
    return None


def _progress(common: Mapping[str, Any]) -> dict[str, float]:
    """Returns the progress as Trainable.named_tensors defines it."""
    schedule = common.get("scheduler") or common.get("opt_param_scheduler") or {}
    found = {"schedule": float(schedule["num_steps"])} if "num_steps" in schedule else {}
    scaler = next((state["grad_scaler"] for state in _states(common) if state.get("grad_scaler")), None)
    if scaler:
        found |= {"loss_scale": float(scaler["scale"]), "good_steps": float(scaler["growth_tracker"])}
    return found
