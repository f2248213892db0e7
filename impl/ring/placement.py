"""Placement: which rank of the ring holds which token of a micro-batch, and back.

Three ways to cut. *Slices*: the documents of all rows are laid end to end, without padding, and cut into equal slices;
documents cross the edges. *Documents*: each document is cut into equal pieces, one for each rank, in order or zigzag
(rank r holds pieces r and 2 * size - 1 - r, so that causal attention is the same work for all). *Rows*: each row is cut
like that as a whole. Lengths that do not divide are padded at their ends; padding is never a target.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from impl.collate import NO_TARGET, MicroBatch

Cut = Literal["slices", "documents", "rows"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """source: int64 (size, rows, length): for each place, the token's index in the micro-batch (flattened), or -1.

    starts: int32 (documents + 1,), where documents begin, and the total length. Of all ranks' tokens together where
    ``slices`` were cut, of each rank's own (the same on all) where ``documents`` were; None for ``rows``.
    """

    source: Tensor
    starts: Tensor | None


def place(inputs: MicroBatch, *, cut: Cut, size: int, zigzag: bool, multiple: int) -> Placement:
    """Place the tokens of a micro-batch (on the CPU) on ``size`` ranks, each a ``multiple`` of tokens per row."""
    rows, length = inputs.positions.shape
    pieces = 2 if zigzag else 1  # a rank holds of what is cut
    if cut == "rows":
        tokens = torch.arange(rows * length).view(rows, length)
        whole = _padded(tokens, size * math.lcm(pieces, multiple))
        return Placement(source=_cut(whole, size, zigzag), starts=None)
    tokens = torch.where(inputs.real.flatten())[0]
    begins = torch.where(inputs.positions.flatten()[tokens] == 0)[0]  # of documents
    if cut == "slices":
        whole = _padded(tokens, size * multiple)
        ends = [len(tokens)] if len(whole) == len(tokens) else [len(tokens), len(whole)]
        starts = torch.cat([begins, torch.tensor(ends)])
        return Placement(source=whole.view(size, 1, -1), starts=starts.int())
    documents = [
        _cut(_padded(document, size * pieces), size, zigzag) for document in tokens.tensor_split(begins[1:])
    ]  # (size, part) each
    held = torch.cat(documents, dim=1)
    lengths = [document.shape[1] for document in documents]
    if filler := -held.shape[1] % multiple:
        held = torch.cat([held, held.new_full((size, filler), -1)], dim=1)
        lengths.append(filler)
    return Placement(source=held[:, None], starts=torch.tensor([0, *lengths]).cumsum(0).int())


def _padded(tokens: Tensor, multiple: int) -> Tensor:
    """(..., length) -> (..., length rounded up), with -1."""
    return torch.nn.functional.pad(tokens, (0, -tokens.shape[-1] % multiple), value=-1)


def _cut(whole: Tensor, size: int, zigzag: bool) -> Tensor:
    """(..., length) -> (size, ..., length / size)"""
    if not zigzag:
        return torch.stack(whole.chunk(size, dim=-1))
    pieces = whole.chunk(2 * size, dim=-1)
    return torch.stack([torch.cat([pieces[r], pieces[-1 - r]], dim=-1) for r in range(size)])


def shard_inputs(inputs: MicroBatch, source: Tensor) -> MicroBatch:
    """The part of a micro-batch that one rank holds; ``source`` (rows, length) is its part of a placement.

    Labels were shifted and positions counted before the cut, in the whole documents.
    """
    real = source >= 0
    at = source.clamp(min=0)
    return MicroBatch(
        tokens=inputs.tokens.flatten()[at].where(real, 0),
        labels=inputs.labels.flatten()[at].where(real, NO_TARGET),
        positions=inputs.positions.flatten()[at].where(real, 0),
        real=inputs.real.flatten()[at] & real,
        columns={name: column.flatten()[at].where(real, 0) for name, column in inputs.columns.items()},
    )


def restore(parts: Tensor, source: Tensor, *, rows: int, length: int) -> Tensor:
    """All ranks' parts (size, rows, length) in the order of the micro-batch: (rows, length); ``source`` alike."""
    placed = source >= 0
    whole = parts.new_zeros(rows * length)
    return whole.index_put((source[placed],), parts[placed]).view(rows, length)
