"""Distributes the tokens of a micro-batch over context-parallel ranks, and restores their order.

There are three ways to split the tokens. *Slices*: the documents of all rows are laid end to end, without padding, and
split into equal slices; documents may cross their edges. *Documents*: each document is split into equal pieces, one for
each rank in order, or zigzag (rank r holds pieces r and 2 * size - 1 - r, so causal attention is equal work for all
ranks). *Rows*: each row is split in the same way as a document. A length that does not divide is padded at its end;
padding is never a target.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from impl.interface.micro_batches import NO_TARGET, MicroBatch

SplitMode = Literal["slices", "documents", "rows"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Assigns the tokens of a micro-batch to ranks.

    source: int64 (size, rows, length), by rank: the token's index in the flattened micro-batch, or -1 for padding.
    starts: int32 (documents + 1,), the indices at which documents begin, and the total length. For ``slices`` they
        count the tokens of all ranks, for ``documents`` those of one rank (equal on all ranks); None for ``rows``.
    """

    source: Tensor
    starts: Tensor | None


def place(inputs: MicroBatch, *, split: SplitMode, size: int, zigzag: bool, multiple: int) -> Placement:
    """Distributes the tokens of a micro-batch, which is on the CPU, over ``size`` ranks.

    The number of tokens per row and rank is a multiple of ``multiple``.
    """
    rows, length = inputs.positions.shape
    pieces = 2 if zigzag else 1  # number of pieces of each document or row on each rank
    if split == "rows":
        tokens = torch.arange(rows * length).view(rows, length)
        whole = _padded(tokens, size * math.lcm(pieces, multiple))
        return Placement(source=_split(whole, size, zigzag), starts=None)
    tokens = torch.where(inputs.real.flatten())[0]
    begins = torch.where(inputs.positions.flatten()[tokens] == 0)[0]
    if split == "slices":
        whole = _padded(tokens, size * multiple)
        ends = [len(tokens)] if len(whole) == len(tokens) else [len(tokens), len(whole)]
        starts = torch.cat([begins, torch.tensor(ends)])
        return Placement(source=whole.view(size, 1, -1), starts=starts.int())
    documents = [
        _split(_padded(document, size * pieces), size, zigzag) for document in tokens.tensor_split(begins[1:])
    ]  # (size, part) each
    source = torch.cat(documents, dim=1)
    lengths = [document.shape[1] for document in documents]
    if filler := -source.shape[1] % multiple:
        source = torch.cat([source, source.new_full((size, filler), -1)], dim=1)
        lengths.append(filler)
    return Placement(source=source[:, None], starts=torch.tensor([0, *lengths]).cumsum(0).int())


def _padded(tokens: Tensor, multiple: int) -> Tensor:
    """Pads (..., length) with -1 to a multiple."""
    return torch.nn.functional.pad(tokens, (0, -tokens.shape[-1] % multiple), value=-1)


def _split(whole: Tensor, size: int, zigzag: bool) -> Tensor:
    """Splits (..., length) into (size, ..., length / size)."""
    if not zigzag:
        return torch.stack(whole.chunk(size, dim=-1))
    pieces = whole.chunk(2 * size, dim=-1)
    return torch.stack([torch.cat([pieces[r], pieces[-1 - r]], dim=-1) for r in range(size)])


def shard_inputs(inputs: MicroBatch, source: Tensor) -> MicroBatch:
    """Returns one rank's part of a micro-batch; ``source`` (rows, length): the rank's part of Placement.source.

    Labels and positions are those of the whole documents.
    """
    real = source >= 0
    at = source.clamp(min=0)
    return MicroBatch(
        tokens=inputs.tokens.flatten()[at].where(real, 0),
        labels=inputs.labels.flatten()[at].where(real, NO_TARGET),
        positions=inputs.positions.flatten()[at].where(real, 0),
        real=inputs.real.flatten()[at] & real,
        columns={name: column.flatten()[at].where(real, 0) for name, column in inputs.columns.items()},
        kept=inputs.kept,
    )


def restore(parts: Tensor, source: Tensor, *, rows: int, length: int) -> Tensor:
    """Puts the parts of all ranks back into the order of the micro-batch: (rows, length), 0 where no rank has a token.

    ``parts``, ``source``: (size, rows, length), by rank; ``parts`` and the result may have further dimensions.
    """
    tokens, further = rows * length, parts.shape[3:]
    whole = parts.new_zeros(tokens + 1, *further)  # the last element is for padding; a mask would wait for the GPU
    at = source.where(source >= 0, tokens)  # (size, rows, length)
    return whole.index_copy(0, at.flatten(), parts.flatten(0, 2))[:tokens].view(rows, length, *further)
