"""Experts as published: one matrix each in a folder, stacked in the model, as transformers holds them.

A folder may have either: the published one has ``experts.3.up_proj.weight`` (Mixtral: ``block_sparse_moe`` and w1, w3,
w2 for gate, up and down), one that a backend has exported has ``experts.gate_up_proj``.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def in_memory(name: str) -> str:
    """The published name of a tensor, with the names of modules that transformers has today."""
    if ".block_sparse_moe." not in name:
        return name
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return re.sub(r"\.(w[123])\.weight$", lambda found: f".{_MIXTRAL[found[1]]}.weight", name)


def stacked(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a folder, with the matrices of experts stacked where a layer has all of them, of one shape."""
    found = {in_memory(name): tensor for name, tensor in found.items()}
    plain = {name: tensor for name, tensor in found.items() if not _EXPERT.fullmatch(name)}
    parts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in found.items():
        if match := _EXPERT.fullmatch(name):
            of_layer = parts.setdefault(match[1], {"gate_proj": {}, "up_proj": {}, "down_proj": {}})
            of_layer[match[3]][int(match[2])] = tensor
    for prefix, of_layer in parts.items():
        whole = {part: _stack(matrices) for part, matrices in of_layer.items()}
        gate, up, down = whole["gate_proj"], whole["up_proj"], whole["down_proj"]
        if gate is not None and up is not None and down is not None and gate.shape == up.shape:
            plain |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}.down_proj": down}
    return plain  # of others, check_shapes says that they are missing


def _stack(matrices: Mapping[int, Tensor]) -> Tensor | None:
    """Those of experts 0, 1, ...; None if one is missing, or has a shape of its own."""
    same = len({matrix.shape for matrix in matrices.values()}) == 1
    whole = same and sorted(matrices) == list(range(len(matrices)))
    return torch.stack([matrices[number] for number in range(len(matrices))]) if whole else None


def stacked_shapes(found: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The same for shapes."""
    tensors = {name: torch.empty(shape, device="meta") for name, shape in found.items()}
    return {name: tuple(tensor.shape) for name, tensor in stacked(tensors).items()}
