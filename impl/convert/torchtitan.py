"""Reads torchtitan's checkpoints of Llama 3 and Qwen3 under the names of Hugging Face.

torchtitan saves the model's state dict without a prefix. Its Llama 3 rotates adjacent pairs of q and k, while Hugging
Face rotates the two halves of a head, so the rows of both differ in their order; its Qwen3 has Hugging Face's order.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch

from conformance.core.errors import UsageError, first_few, shown
from conformance.core.io import read_json
from conformance.models.folder_checks import CONFIG
from impl.checkpoints.training_state import Checkpoint, StoredTensor

FORM = " of torchtitan"
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


def has_names(keys: Iterable[str]) -> bool:
    return any(map(_MARK.fullmatch, keys))


def is_weight(key: str) -> bool:
    return key in ("norm.weight", *_HEADS) or _MARK.match(key) is not None or _LAYER.fullmatch(key) is not None


def named(found: Checkpoint, folder: Path, model: Path | None) -> Checkpoint:
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
