"""Reads megatron-core's distributed checkpoints: splits whole tensors under Megatron's names into Hugging Face's.

The rows of a fused tensor follow from the model's configuration, so reading needs the model's folder. The mapping is
the one that ranks use for loading and saving (impl/megatron/hf_mapping.py), for a single rank that holds everything.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conformance.core.errors import UsageError, first_few
from conformance.core.io import read_json
from impl.checkpoints.safe_pickle import METADATA, read_metadata, read_torch_file
from impl.checkpoints.training_state import WRITTEN, Checkpoint, StoredTensor
from impl.convert.torch_distributed import read_value, stored_tensors, tensor_reader, writers
from impl.megatron.hf_mapping import EMBEDDING, FUSED, HEAD, all_parameters, parts
from impl.megatron.model_config import read_shape
from impl.megatron.spans import Part, Rank, copy_to_full

FILE, COMMON, COMMON_ENTRY = "metadata.json", "common.pt", "common_state/shard_0_1"
_LAYER = re.compile(r"(.*\bdecoder\.layers)\.(\d+)(\..+)")
ALONE = Rank(rank=0, size=1)
# Prefixes of a parameter's name for each kind; the first one found is used. Without a prefix, the tensor is the weight
# that ranks compute with. It is the master in float32 and of frozen parameters.
PREFIXES: dict[str, tuple[str, ...]] = {
    "weight": ("optimizer.state.param.", "optimizer.state.fp32_param.", ""),
    **{kind: (f"optimizer.state.{kind}.",) for kind in WRITTEN if kind not in ("weight", "step")},
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Locates a Hugging Face tensor: a part of the tensors ``keys``, concatenated row by row.

    layer: the index in tensors that stack a parameter of all layers, else None.
    """

    part: Part
    keys: tuple[str, ...]
    layer: int | None = None


def open_megatron(folder: Path) -> Checkpoint:
    """Opens a checkpoint with the library's names and stacked layers; see ``named`` for Hugging Face's names."""
    settings = read_json(folder / FILE)
    metadata = read_metadata(folder / METADATA)
    common = _common(folder, metadata)
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
    found, step = open_megatron(folder), _step(_common(folder, metadata))
    tensors, used = [], set[str]()
    for name in all_parameters(shape):
        due = parts(name, shape, ALONE)
        for kind, prefixes in PREFIXES.items():
            places = [place for prefix in prefixes for place in _places(prefix + _stored_name(name), stored)]
            used |= {key for keys, _ in places for key in keys}
            if not places and kind == "weight":
                raise UsageError(f"{folder} lacks {name}; give the --model of this checkpoint, with as many layers")
            for keys, layer in places[:1]:
                stack = [] if layer is None else [shape.layers]
                _check_shape(folder, keys, [stored[key].size for key in keys], due, stack=stack)
                dtype = stored[keys[0]].properties.dtype
                for part in due:
                    place = Place(part=part, keys=keys, layer=layer)
                    tensors.append(StoredTensor(kind=kind, name=part.name, shape=part.shape, dtype=dtype, place=place))
    if more := [key for key in stored if key not in used and not key.startswith("optimizer.")]:
        raise UsageError(f"{folder} has tensors that {model} lacks: {first_few(more, most=3)}; give its own --model")
    trained = dict.fromkeys(one.name for one in tensors if one.kind == "exp_avg")
    if step is not None:
        value = torch.tensor(step, dtype=torch.float64)
        tensors += [StoredTensor(kind="step", name=name, shape=(), dtype=value.dtype, place=value) for name in trained]
    return Checkpoint(
        format=found.format, facts=found.facts, tensors=tuple(tensors), progress=found.progress, read=_reading(whole)
    )


def _common(folder: Path, metadata: Any) -> dict[str, Any]:
    """Reads the values that all ranks share: from a file, or since 2026 from an entry of the other files."""
    found: dict[str, Any] = {}
    if (folder / COMMON).exists():
        found = read_torch_file(folder / COMMON)
    elif COMMON_ENTRY in metadata.state_dict_metadata:
        found = read_value(folder, metadata, COMMON_ENTRY)[0]
    return found


def _reading(whole: Callable[[str], torch.Tensor]) -> Callable[[StoredTensor], torch.Tensor]:
    def read(tensor: StoredTensor) -> torch.Tensor:
        if tensor.kind == "step":
            step: torch.Tensor = tensor.place
            return step
        read = [whole(key) for key in tensor.place.keys]
        fused = torch.cat(read if tensor.place.layer is None else [stack[tensor.place.layer] for stack in read])
        full = torch.empty(tensor.shape, dtype=tensor.dtype)
        copy_to_full(tensor.place.part, fused, full)
        return full

    return read


def _stored_name(name: str) -> str:
    for plain, fused in FUSED.items():
        if name.endswith(f".{plain}"):
            return name.removesuffix(plain) + fused
    return name


def _places(key: str, stored: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], int | None]]:
    """Yields where a tensor is: its keys, and the layer's index in tensors that stack all layers, else None.

    A tensor has one key, or two if the library stores gate and up separately.
    """
    layer = _LAYER.fullmatch(key)
    for name, index in ((key, None), *([(layer[1] + layer[3], int(layer[2]))] if layer else [])):
        for keys in ((name,), (f"{name}_w", f"{name}_v")):
            if all(one in stored for one in keys):
                yield keys, index


def _check_shape(
    folder: Path, keys: Sequence[str], sizes: Sequence[Sequence[int]], due: Sequence[Part], *, stack: Sequence[int]
) -> None:
    """Raises UsageError if a tensor has another shape than in the model. A vocabulary may be padded.

    stack: the number of layers if the tensors stack all of them, else empty.
    """
    part = due[0]
    wanted = list(part.shape)
    if part.spans:
        wanted[part.dim] = max(span.own + span.length for one in due for span in one.spans)
    at = len(stack)
    found = [*sizes[0][:at], sum(size[at] for size in sizes), *sizes[0][at + 1 :]]
    if part.spans and keys[0].endswith((EMBEDDING, HEAD)):
        found[0] = min(found[0], wanted[0])
    if found != [*stack, *wanted]:
        raise UsageError(
            f"{folder}: {keys[0]} has shape {found}, but the model's is {[*stack, *wanted]}; give its own --model"
        )


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
