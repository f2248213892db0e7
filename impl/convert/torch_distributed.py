"""Reads checkpoints of torch.distributed.checkpoint that FSDP2 wrote, and their common parts with megatron-core's.

torchtitan's of Llama 3 and Qwen3 get the names of Hugging Face. They hold the model's state dict without a prefix. Its
Llama 3 rotates adjacent pairs of q and k, while Hugging Face rotates the two halves of a head, so the rows of both
differ in their order; its Qwen3 has Hugging Face's order.

Their ``.metadata`` is a pickle. Only impl.checkpoints.safe_pickle reads it, even when the library loads a tensor.
"""

import io
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata

from conformance.core.errors import UsageError, first_few, one_line, shown
from conformance.core.io import read_json
from conformance.models.folder_checks import CONFIG
from impl.checkpoints.safe_pickle import METADATA, check_sums, read_metadata, read_torch_bytes
from impl.checkpoints.training_state import WRITTEN, Checkpoint, StoredTensor

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
