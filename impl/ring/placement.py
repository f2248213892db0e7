"""Placement: which rank of the ring holds which token of a micro-batch, and back.

Three ways to cut. *Slices*: the documents of all rows are laid end to end and cut into equal slices; documents cross
the edges. *Documents*: each document is cut into equal pieces, one for each rank, in order or zigzag (rank r holds
pieces r and 2 * size - 1 - r, so that causal attention is the same work for all). *Rows*: each row is cut like that as
a whole. Lengths that do not divide are padded; padding is never a target, and nothing attends to it but padding.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from impl.collate import NO_TARGET, Inputs

Cut = Literal["slices", "documents", "rows"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """source: int64 (size, rows, length): for each place, the token's index in the micro-batch (flattened), or -1.

    starts: int32 (documents + 1,), where documents begin, and the total length. Of all ranks' tokens together where
    ``slices`` were cut, of each rank's own (the same on all) where ``documents`` were; None for ``rows``.
    """

    source: Tensor
    starts: Tensor | None


def place(positions: Tensor, *, cut: Cut, size: int, zigzag: bool, multiple: int) -> Placement:
    """Place the tokens of a micro-batch on ``size`` ranks, each a ``multiple`` of tokens per row.

    ``positions``: int64 (rows, length) on the CPU; a document begins wherever it is 0, and at least with every row.
    """
    rows, length = positions.shape
    pieces = 2 if zigzag else 1  # a rank holds of what is cut
    if cut == "rows":
        part = _rounded(length, size * math.lcm(pieces, multiple))
        whole = torch.arange(rows)[:, None] * length + torch.arange(part)
        whole[:, length:] = -1
        return Placement(source=_cut(whole, size, zigzag), starts=None)
    begins = torch.cat([torch.where(positions.flatten() == 0)[0], torch.tensor([rows * length])])
    if cut == "slices":
        total = _rounded(rows * length, size * multiple)
        whole = torch.arange(total)
        whole[rows * length :] = -1
        begins = begins if total == rows * length else torch.cat([begins, torch.tensor([total])])
        return Placement(source=whole.view(size, 1, -1), starts=begins.int())
    documents = []
    for begin, end in zip(begins.tolist(), begins.tolist()[1:], strict=False):
        whole = torch.arange(begin, begin + _rounded(end - begin, size * pieces))
        whole[end - begin :] = -1
        documents.append(_cut(whole, size, zigzag))  # (size, part)
    held = sum(d.shape[1] for d in documents)
    if held % multiple:
        documents.append(torch.full((size, _rounded(held, multiple) - held), -1))
    lengths = torch.tensor([0, *(d.shape[1] for d in documents)])
    return Placement(source=torch.cat(documents, dim=1)[:, None], starts=lengths.cumsum(0).int())


def _rounded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _cut(whole: Tensor, size: int, zigzag: bool) -> Tensor:
    """(..., length) -> (size, ..., length / size)"""
    if not zigzag:
        return torch.stack(whole.chunk(size, dim=-1))
    pieces = whole.chunk(2 * size, dim=-1)
    return torch.stack([torch.cat([pieces[r], pieces[-1 - r]], dim=-1) for r in range(size)])


def shard_inputs(inputs: Inputs, source: Tensor) -> Inputs:
    """The part of a micro-batch that one rank holds; ``source`` (rows, length) is its part of a placement.

    Labels were shifted and positions counted before the cut, in the whole documents.
    """
    real = source >= 0
    at = source.clamp(min=0)
    return dataclasses.replace(
        inputs,
        tokens=inputs.tokens.flatten()[at].where(real, 0),
        labels=inputs.labels.flatten()[at].where(real, NO_TARGET),
        positions=inputs.positions.flatten()[at].where(real, 0),
    )


def restore(parts: Tensor, source: Tensor, *, rows: int) -> Tensor:
    """All ranks' parts (size, rows, length) in the order of the micro-batch: (rows, length); ``source`` alike."""
    real = source >= 0
    whole = parts.new_zeros(int(real.sum()))
    return whole.index_put((source[real],), parts[real]).view(rows, -1)
