"""Experts in the files of a Hugging Face folder: stacked, as transformers holds and exports them, or as published.

Published ones are a matrix each, ``experts.3.up_proj.weight``; Mixtral's have names of their own. The names of this
package are those of the stacked ones, ``experts.gate_up_proj`` and ``experts.down_proj``.
"""

import re
from collections.abc import Mapping

import torch

from impl.files import SliceReader

_OF_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def name_in(files: SliceReader, name: str) -> str:
    """The name of a tensor of a mixture's layer in these files."""
    return name if name in files else name.replace(".mlp.", ".block_sparse_moe.")


def of_expert(files: SliceReader, name: str, expert: int, *, dim: int, start: int, stop: int) -> torch.Tensor:
    """Rows or columns [start:stop] of the matrix of one expert in the stacked tensor ``name``."""
    if name in files:
        return files.of_stacked(name, expert, dim, start, stop)
    prefix, _, kind = name.rpartition(".")
    if kind == "down_proj":
        return files(_apart(files, f"{prefix}.{expert}.", kind), dim, start, stop)
    gate, up = (_apart(files, f"{prefix}.{expert}.", part) for part in ("gate_proj", "up_proj"))
    size = files.shape(gate)[0]
    assert dim == 0
    assert stop <= size or start >= size, "rows of the gate or of up"
    return files(gate, 0, start, stop) if stop <= size else files(up, 0, start - size, stop - size)


def _apart(files: SliceReader, prefix: str, part: str) -> str:
    name = f"{prefix}{part}.weight"
    if name in files:
        return name
    of_mixtral = f"{prefix}{_OF_MIXTRAL[part]}.weight".replace(".mlp.", ".block_sparse_moe.")
    return of_mixtral if of_mixtral in files else name


def stacked_shapes(found: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of a folder's tensors, with matrices of experts stacked where a layer has them all, of one shape."""
    names = {name: _own_name(name) for name in found}
    plain = {own: found[name] for name, own in names.items()}
    experts = {own: match for own in plain if (match := _EXPERT.fullmatch(own))}
    for prefix in {match[1] for match in experts.values()}:
        of_layer = {own: match for own, match in experts.items() if match[1] == prefix}
        kinds = {kind: {plain[own] for own, m in of_layer.items() if m[3] == kind} for kind in _OF_MIXTRAL}
        count = 1 + max(int(match[2]) for match in of_layer.values())
        if len(of_layer) != 3 * count or any(len(shapes) != 1 for shapes in kinds.values()):
            continue  # check_weights tells what is missing
        (gate,), (up,), (down,) = kinds.values()
        if gate == up:
            plain = {name: shape for name, shape in plain.items() if name not in of_layer}
            plain[f"{prefix}gate_up_proj"] = (count, 2 * gate[0], *gate[1:])
            plain[f"{prefix}down_proj"] = (count, *down)
    return plain


def _own_name(name: str) -> str:
    """A published name, in the words of transformers today."""
    if ".block_sparse_moe." not in name:
        return name
    of_expert = {theirs: ours for ours, theirs in _OF_MIXTRAL.items()}
    name = re.sub(r"\.(w[123])\.weight$", lambda found: f".{of_expert[found[1]]}.weight", name)
    return name.replace(".block_sparse_moe.", ".mlp.")
