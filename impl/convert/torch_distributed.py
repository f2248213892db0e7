"""Reads checkpoints of torch.distributed.checkpoint: those of FSDP2, torchtitan and megatron-core.

torchtitan's of Llama 3 and Qwen3 get the names of Hugging Face. They hold the model's state dict without a prefix. Its
Llama 3 rotates adjacent pairs of q and k, while Hugging Face rotates the two halves of a head, so the rows of both
differ in their order; its Qwen3 has Hugging Face's order.

megatron-core's hold whole tensors under its own names, which ``named`` splits into Hugging Face's. The rows of a fused
tensor follow from the model's configuration, so reading needs the model's folder. The mapping is the one that ranks use
for loading and saving (impl/megatron/hf_mapping.py), for a single rank that holds everything.

Their ``.metadata`` is a pickle. Only impl.checkpoints.safe_pickle reads it, even when the library loads a tensor.
"""

import io
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata

from conformance.core.errors import UsageError, first_few, one_line, shown
from conformance.core.io import read_json
from conformance.models.folder_checks import CONFIG
from impl.checkpoints.safe_pickle import METADATA, check_sums, read_metadata, read_torch_bytes, read_torch_file
from impl.checkpoints.training_state import WRITTEN, Checkpoint, StoredTensor
from impl.megatron.hf_mapping import EMBEDDING, FUSED, HEAD, all_parameters, parts
from impl.megatron.model_config import read_shape
from impl.megatron.spans import Part, Rank, copy_to_full

HEAD_ALONE = "lm_head.weight"  # its name in a model's own state dict, which some trainers save without a prefix
_STATE = re.compile(r"optimizer\.state\.(.+)\.([^.]+)")


def open_fsdp2(folder: Path) -> Checkpoint:
    """Opens a checkpoint of FSDP2: ``model.NAME``, ``optimizer.state.NAME.KIND``, schedule and loss scale."""
    metadata = read_metadata(folder / METADATA)
    stored = stored_tensors(metadata)
    prefix = "" if HEAD_ALONE in stored else "model."
    of = TORCHTITAN if any(map(_MARK.fullmatch, stored)) else ""
    is_weight = _is_torchtitan_weight if of else lambda key: key.startswith("model.") or key == HEAD_ALONE
    tensors = tuple(_describe(key, entry, prefix, is_weight=is_weight) for key, entry in stored.items())
    whole = tensor_reader(folder, metadata)

    def read(tensor: StoredTensor) -> torch.Tensor:
        return whole(tensor.place)

    values = {
        name: read_value(folder, metadata, key)
        for name, key in (
            ("schedule", "scheduler.last_epoch"),
            ("schedule", "lr_scheduler.last_epoch"),  # of torchtitan
            ("loss_scale", "scaler.scale"),
            ("good_steps", "scaler._growth_tracker"),
        )
        if isinstance(metadata.state_dict_metadata.get(key), BytesStorageMetadata)
    }
    steps = {float(read(tensor)) for tensor in tensors if tensor.kind == "step"}
    return Checkpoint(
        format=f"torch.distributed.checkpoint{of}",
        facts={"writers": writers(metadata), **({"step": max(steps)} if steps else {})},
        tensors=tensors,
        progress={name: float(value) for name, value in values.items()},
        read=read,
    )


def tensor_reader(folder: Path, metadata: Metadata) -> Callable[[str], torch.Tensor]:
    """Returns a function that reads whole tensors by key; the library assembles them from the pieces in its files."""
    stored, reader = stored_tensors(metadata), _Reader(folder, metadata)
    pieces = defaultdict[str, list[Any]](list)
    for index, place in (metadata.storage_data or {}).items():
        pieces[index.fqn].append(place)

    def read(key: str) -> torch.Tensor:
        for place in pieces[key]:
            path, piece = _piece(folder, place)
            check_sums(io.BytesIO(piece), f"{path}, {shown(key)},")
        tensor = torch.empty(tuple(stored[key].size), dtype=stored[key].properties.dtype)
        try:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # it warns of a single process
                dcp.load({key: tensor}, storage_reader=reader, no_dist=True)
        except (Exception, CheckpointException) as error:  # the latter is not an Exception
            failures = getattr(error, "failures", {})
            cause = next((one for one, _ in failures.values()), error)
            raise UsageError(
                f"{folder}: the tensor {shown(key)} cannot be read: {type(cause).__name__}: {one_line(cause)}; a file "
                f"is missing or damaged, give another checkpoint"
            ) from None
        return tensor

    return read


def stored_tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    found = metadata.state_dict_metadata.items()
    return {key: entry for key, entry in found if isinstance(entry, TensorStorageMetadata)}


def _describe(key: str, entry: TensorStorageMetadata, prefix: str, *, is_weight: Callable[[str], bool]) -> StoredTensor:
    kind, name = "other", key
    if match := _STATE.fullmatch(key):
        if match[2] in WRITTEN:
            name, kind = match.groups()
    elif is_weight(key):
        kind, name = "weight", key.removeprefix(prefix)
    return StoredTensor(kind=kind, name=name, shape=tuple(entry.size), dtype=entry.properties.dtype, place=key)


def writers(metadata: Metadata) -> int:
    """Counts the ranks that have written a file; the first number of a file's name is the rank."""
    files = Counter(Path(stored.relative_path).name for stored in (metadata.storage_data or {}).values())
    return len({match[1] for name in files if (match := re.match(r"__(\d+)_", name))})


def read_value(folder: Path, metadata: Metadata, key: str) -> Any:
    """Reads a small value, which torch has saved separately within one of the files."""
    (stored,) = (entry for index, entry in (metadata.storage_data or {}).items() if index.fqn == key)
    path, piece = _piece(folder, stored)
    return read_torch_bytes(piece, source=path)


def _piece(folder: Path, stored: Any) -> tuple[Path, bytes]:
    """Reads the part of a file that holds a value or a part of a tensor."""
    path = _inside(folder, stored.relative_path)
    try:
        with path.open("rb") as file:
            file.seek(stored.offset)
            return path, file.read(stored.length)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; give another checkpoint") from None


def _inside(folder: Path, name: str) -> Path:
    if Path(name).name != name:
        raise UsageError(f"{folder / METADATA} names the file {name!r}, which is not in this folder")
    return folder / name


class _Reader(dcp.FileSystemReader):
    """Gives the library's reader metadata that has been read safely, so it does not unpickle the file."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        for stored in (metadata.storage_data or {}).values():
            _inside(folder, stored.relative_path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


TORCHTITAN = " of torchtitan"
_MODULES = {
    "tok_embeddings": "embed_tokens",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_HEADS = ("output.weight", "lm_head.weight")  # its name before and since 2026
_LAYER = re.compile(r"(layers\.\d+\.)(.+)")
_MARK = re.compile(r"(?:optimizer\.state\.)?(?:tok_embeddings\.weight|layers\.\d+\.(?:attention|feed_forward)\..+)")
_HEADS_OF = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
_ADVICE = (
    "run first torchtitan's python scripts/checkpoint_conversion/convert_to_hf.py {folder} NEW --hf_assets_path MODEL "
    "--model_name NAME --model_flavor FLAVOR"
)


def _is_torchtitan_weight(key: str) -> bool:
    return key in ("norm.weight", *_HEADS) or _MARK.match(key) is not None or _LAYER.fullmatch(key) is not None


def as_hugging_face(found: Checkpoint, folder: Path, model: Path | None) -> Checkpoint:
    """Gives the tensors the names and the order of rows of the Hugging Face folder ``model``. Raises UsageError."""
    advice = _ADVICE.format(folder=folder)
    if model is None:
        raise UsageError(f"{folder} has torchtitan's names: add --model, for Llama 3 and Qwen3; for others {advice}")
    config = read_json(model / CONFIG)
    if config.get("model_type") not in ("llama", "qwen3"):
        raise UsageError(f"{folder} has torchtitan's names, read for Llama 3 and Qwen3 only; {advice}")
    names = {one.name: None if one.kind == "other" else _hf_name(one.name) for one in found.tensors}
    if unknown := [key for key, name in names.items() if name is None]:
        raise UsageError(f"{folder} has tensors that no Llama 3 or Qwen3 has: {first_few(unknown, most=3)}; {advice}")
    assert found.read is not None
    read = _ordered(found.read, config, names) if config["model_type"] == "llama" else found.read
    tensors = tuple(replace(one, name=names[one.name] or "", place=one) for one in found.tensors)
    return replace(found, tensors=tensors, read=lambda one: read(one.place))


def _hf_name(key: str) -> str | None:
    if key in _HEADS:
        return "lm_head.weight"
    if key == "norm.weight":
        return "model.norm.weight"
    layer = _LAYER.fullmatch(key)
    prefix, rest = layer.groups() if layer else ("", key)
    module = _MODULES.get(rest.removesuffix(".weight").replace(".qkv_linear.", "."))
    return None if module is None or not rest.endswith(".weight") else f"model.{prefix}{module}.weight"


def _ordered(
    read: Callable[[StoredTensor], torch.Tensor], config: dict[str, int], names: dict[str, str | None]
) -> Callable[[StoredTensor], torch.Tensor]:
    """Reads tensors with the rows of q and k, and of their moments, in Hugging Face's order."""
    heads = config["num_attention_heads"]

    def in_order(one: StoredTensor) -> torch.Tensor:
        tensor = read(one)
        module = (names[one.name] or "").split(".")[-2]
        if module not in _HEADS_OF or tensor.dim() != 2:
            return tensor
        count = config.get(_HEADS_OF[module]) or heads
        if tensor.shape[0] % (2 * count):
            raise UsageError(f"{shown(one.name)} has {tensor.shape[0]} rows, which {count} heads do not divide")
        pairs: torch.Tensor = tensor.unflatten(0, (count, -1, 2))
        return pairs.transpose(1, 2).reshape(tensor.shape)

    return in_order


MEGATRON_FILE, COMMON, COMMON_ENTRY = "metadata.json", "common.pt", "common_state/shard_0_1"
_STACKED_LAYER = re.compile(r"(.*\bdecoder\.layers)\.(\d+)(\..+)")
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
    settings = read_json(folder / MEGATRON_FILE)
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
    layer = _STACKED_LAYER.fullmatch(key)
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
