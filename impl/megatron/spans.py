"""Parts of a parameter: which rows or columns of which Hugging Face tensor a Megatron rank holds, and copying them.

Which parts a parameter has is said in impl/megatron/convert.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from impl.files import SliceReader
from impl.megatron.published import name_in, of_expert


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
