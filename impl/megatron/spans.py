"""Copies rows and columns between Hugging Face tensors and the parameters of a Megatron rank.

impl/megatron/hf_mapping.py lists the parts of each parameter.

Experts are stacked in files that transformers exports (``experts.gate_up_proj``, ``experts.down_proj``). In published
files each expert has its own matrices (``experts.3.up_proj.weight``, other names in Mixtral). This package uses the
stacked names.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from conformance.spec.scenario import FILE_PREFIX
from impl.interface.sharded_safetensors import SliceReader


class Span(NamedTuple):
    """Pairs rows or columns of a Hugging Face tensor with rows or columns of the parameter.

    ``length`` of them start at ``full`` in the Hugging Face tensor and at ``own`` in the parameter. ``step``: stride in
    the Hugging Face tensor; in the parameter they are contiguous.
    """

    full: int
    own: int
    length: int
    step: int = 1

    def of(self, matrix: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns the rows or columns of a Hugging Face matrix, as a view."""
        return matrix[(slice(None),) * dim + (slice(self.full, self.stop, self.step),)]

    @property
    def stop(self) -> int:
        return self.full + (self.length - 1) * self.step + 1


@dataclass(frozen=True, kw_only=True)
class Part:
    """Describes the part of one Hugging Face tensor that a rank's parameter holds.

    name, shape: those of the whole Hugging Face tensor. dim: 0 if the spans are rows, 1 if they are columns. spans:
    empty for a tensor that every rank holds whole. expert: index of the matrix in a tensor of stacked experts, else
    None. transposed: whether the parameter is the transpose of the Hugging Face matrix.
    """

    name: str
    shape: tuple[int, ...]
    dim: int = 0
    spans: tuple[Span, ...] = ()
    expert: int | None = None
    transposed: bool = False

    def matrix(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the matrix that the spans index, as a view of the whole Hugging Face tensor."""
        own = full if self.expert is None else full[self.expert]
        return own.T if self.transposed else own


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Identifies one of ``size`` tensor-parallel ranks."""

    rank: int
    size: int


Read = Callable[[Part, int, int], torch.Tensor]  # (part, start, stop) -> rows or columns [start:stop] of its matrix


def load_part(part: Part, own: torch.Tensor, read: Read) -> None:
    """Sets one part of a rank's parameter ``own`` from the Hugging Face tensor."""
    if not part.spans:
        own.copy_(read(part, 0, part.shape[0]))
    for span in part.spans:
        found = read(part, span.full, span.stop)
        own.narrow(part.dim, span.own, span.length).copy_(span._replace(full=0).of(found, part.dim))


def copy_to_full(part: Part, own: torch.Tensor, full: torch.Tensor) -> None:
    """Copies one part from a rank's parameter ``own`` into the whole Hugging Face tensor ``full``."""
    if not part.spans:
        full.copy_(own)
    for span in part.spans:
        span.of(part.matrix(full), part.dim).copy_(own.narrow(part.dim, span.own, span.length))


def reader(files: SliceReader) -> Read:
    """Returns a function that reads parts from the files of a Hugging Face folder or of a training state."""

    def read(part: Part, start: int, stop: int) -> torch.Tensor:
        if part.expert is None:
            return files(name_in(files, part.name), part.dim, start, stop)
        dim = 1 - part.dim if part.transposed else part.dim
        found = read_expert(files, part.name, part.expert, dim=dim, start=start, stop=stop)
        return found.T if part.transposed else found

    return read


_MIXTRAL_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def name_in(files: SliceReader, name: str) -> str:
    """Returns the name that a tensor of an adapter or of a mixture's layer has in these files."""
    known = (one for one in (name, FILE_PREFIX + name) if one in files)
    return next(known, name.replace(".mlp.", ".block_sparse_moe."))


def read_expert(files: SliceReader, name: str, expert: int, *, dim: int, start: int, stop: int) -> torch.Tensor:
    """Reads rows or columns [start:stop] of the matrix of one expert in the stacked tensor ``name``."""
    if name in files:
        return files.of_stacked(name, expert, dim, start, stop)
    prefix, _, kind = name.rpartition(".")
    if kind == "down_proj":
        return files(_published_name(files, f"{prefix}.{expert}.", kind), dim, start, stop)
    gate, up = (_published_name(files, f"{prefix}.{expert}.", part) for part in ("gate_proj", "up_proj"))
    size = files.shape(gate)[0]
    assert dim == 0
    assert stop <= size or start >= size, "rows of the gate or of up"
    return files(gate, 0, start, stop) if stop <= size else files(up, 0, start - size, stop - size)


def _published_name(files: SliceReader, prefix: str, part: str) -> str:
    name = f"{prefix}{part}.weight"
    if name in files:
        return name
    mixtral = f"{prefix}{_MIXTRAL_NAMES[part]}.weight".replace(".mlp.", ".block_sparse_moe.")
    return mixtral if mixtral in files else name


def stacked_shapes(found: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Maps a folder's tensors to shapes, with experts stacked where a layer has all of them, with one shape."""
    names = {name: _transformers_name(name) for name in found}
    plain = {own: found[name] for name, own in names.items()}
    experts = {own: match for own in plain if (match := _EXPERT.fullmatch(own))}
    for prefix in {match[1] for match in experts.values()}:
        of_layer = {own: match for own, match in experts.items() if match[1] == prefix}
        kinds = {kind: {plain[own] for own, m in of_layer.items() if m[3] == kind} for kind in _MIXTRAL_NAMES}
        count = 1 + max(int(match[2]) for match in of_layer.values())
        if len(of_layer) != 3 * count or any(len(shapes) != 1 for shapes in kinds.values()):
            continue  # check_weights names the missing ones
        (gate,), (up,), (down,) = kinds.values()
        if gate == up:
            plain = {name: shape for name, shape in plain.items() if name not in of_layer}
            plain[f"{prefix}gate_up_proj"] = (count, 2 * gate[0], *gate[1:])
            plain[f"{prefix}down_proj"] = (count, *down)
    return plain


def _transformers_name(name: str) -> str:
    """Translates a published name into today's name in transformers."""
    if ".block_sparse_moe." not in name:
        return name
    projections = {published: own for own, published in _MIXTRAL_NAMES.items()}
    name = re.sub(r"\.(w[123])\.weight$", lambda found: f".{projections[found[1]]}.weight", name)
    return name.replace(".block_sparse_moe.", ".mlp.")
