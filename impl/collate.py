"""Rows to tensors: padding, packing by position ids, and labels shifted inside each document."""

from dataclasses import dataclass

import torch

from conformance.batch import Row

NO_TARGET = -100  # the label that torch's cross-entropy ignores


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One micro-batch: int64 (rows, length), and ``real``, bool (rows, length), False in padding.

    ``labels[r, i]`` is the token that position i predicts, or NO_TARGET. ``positions`` restart at 0 in every document:
    that is how transformers, given neither attention mask nor cache, tells packed documents apart. Padding forms a
    document of its own.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    real: torch.Tensor

    def to(self, device: str) -> "Inputs":
        return Inputs(**{name: tensor.to(device) for name, tensor in vars(self).items()})


def collate(rows: tuple[Row, ...], *, multiple_of: int = 1) -> Inputs:
    """Pad rows to the longest of them, rounded up to ``multiple_of`` (sequence shards have to be equal)."""
    longest = max(row.length for row in rows)
    length = -(-longest // multiple_of) * multiple_of
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    labels = torch.full_like(tokens, NO_TARGET)
    positions = torch.zeros_like(tokens)
    real = torch.arange(length) < torch.tensor([row.length for row in rows])[:, None]
    for r, row in enumerate(rows):
        start = 0
        for document in row.documents:
            end = start + len(document.tokens)
            tokens[r, start:end] = torch.tensor(document.tokens)
            targets = torch.tensor(document.targets)[1:]
            labels[r, start : end - 1] = tokens[r, start + 1 : end].where(targets, NO_TARGET)
            positions[r, start:end] = torch.arange(end - start)
            start = end
        positions[r, start:] = torch.arange(length - start)
    return Inputs(tokens=tokens, labels=labels, positions=positions, real=real)
