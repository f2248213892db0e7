"""Parts of a parameter: which rows or columns of which Hugging Face tensor a Megatron rank holds, and copying them.

Which parts a parameter has is said in impl/megatron/hf_mapping.py.

Experts in the files of a Hugging Face folder: stacked, as transformers holds and exports them, or as published.

Published ones are a matrix each, ``experts.3.up_proj.weight``; Mixtral's have names of their own. The names of this
package are those of the stacked ones, ``experts.gate_up_proj`` and ``experts.down_proj``.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from impl.interface.sharded_safetensors import SliceReader


class Span(NamedTuple):
    """``length`` rows or columns that start at ``theirs`` in a Hugging Face tensor and at ``own`` in the parameter.

    ``step``: of how many there it is one each; in the parameter they are next to each other.
    """

    theirs: int
    own: int
    length: int
    step: int = 1

    def of(self, matrix: torch.Tensor, dim: int) -> torch.Tensor:
        """The rows or columns of a Hugging Face matrix, as a view."""
        return matrix[(slice(None),) * dim + (slice(self.theirs, self.stop, self.step),)]

    @property
    def stop(self) -> int:
        return self.theirs + (self.length - 1) * self.step + 1


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a rank's parameter holds of one Hugging Face tensor.

    name, shape: those of the whole Hugging Face tensor. dim: 0 if the spans are rows, 1 if they are columns. spans:
    empty for a tensor that every rank holds whole. expert: of experts that are stacked in the tensor, the one whose
    matrix the spans are about. transposed: as it lies in the parameter, the other way round than there.
    """

    name: str
    shape: tuple[int, ...]
    dim: int = 0
    spans: tuple[Span, ...] = ()
    expert: int | None = None
    transposed: bool = False

    def matrix(self, full: torch.Tensor) -> torch.Tensor:
        """What the spans are about, of the whole Hugging Face tensor."""
        own = full if self.expert is None else full[self.expert]
        return own.T if self.transposed else own


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A rank among the ``size`` tensor-parallel ranks."""

    rank: int
    size: int


Read = Callable[[Part, int, int], torch.Tensor]  # (part, start, stop) -> rows or columns [start:stop] of its matrix


def load_part(part: Part, own: torch.Tensor, read: Read) -> None:
    """Set one part of a rank's parameter ``own`` from the Hugging Face tensor."""
    if not part.spans:
        own.copy_(read(part, 0, part.shape[0]))
    for span in part.spans:
        found = read(part, span.theirs, span.stop)
        own.narrow(part.dim, span.own, span.length).copy_(span._replace(theirs=0).of(found, part.dim))


def copy_to_full(part: Part, own: torch.Tensor, full: torch.Tensor) -> None:
    """Copy one part from a rank's parameter ``own`` to its place in the whole Hugging Face tensor ``full``."""
    if not part.spans:
        full.copy_(own)
    for span in part.spans:
        span.of(part.matrix(full), part.dim).copy_(own.narrow(part.dim, span.own, span.length))


def reader(files: SliceReader) -> Read:
    """Read parts from the files of a Hugging Face folder or of a training state."""

    def read(part: Part, start: int, stop: int) -> torch.Tensor:
        if part.expert is None:
            return files(name_in(files, part.name), part.dim, start, stop)
        dim = 1 - part.dim if part.transposed else part.dim
        found = of_expert(files, part.name, part.expert, dim=dim, start=start, stop=stop)
        return found.T if part.transposed else found

    return read


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
