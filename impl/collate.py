"""Rows to tensors: padding, packing by position ids, and labels shifted inside each document."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from conformance.batch import Row

NO_TARGET = -100  # the label that torch's cross-entropy ignores


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One micro-batch: int64 (rows, length), and ``real``, bool (rows, length), False in padding.

    ``labels[r, i]`` is the token that position i predicts, or NO_TARGET. ``positions`` restart at 0 in every document:
    that is how transformers, given neither attention mask nor cache, tells packed documents apart. Padding forms a
    document of its own. ``columns`` are floats (rows, length) by name, 0 in padding, that stand where the labels stand:
    number i of a row belongs to the token that position i predicts; a document's only number is repeated.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    real: torch.Tensor
    columns: dict[str, torch.Tensor]

    @property
    def targets(self) -> torch.Tensor:
        """Bool (rows, length): True where a target is predicted."""
        return self.labels != NO_TARGET

    def to(self, device: str) -> "MicroBatch":
        moved = {field.name: getattr(self, field.name).to(device) for field in fields(self) if field.name != "columns"}
        return MicroBatch(**moved, columns={name: column.to(device) for name, column in self.columns.items()})


def collate(rows: Sequence[Row], *, multiple_of: int = 1) -> MicroBatch:
    """Pad rows to the longest of them, rounded up to ``multiple_of`` (sequence shards have to be equal)."""
    longest = max(row.length for row in rows)
    length = -(-longest // multiple_of) * multiple_of
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    labels = torch.full_like(tokens, NO_TARGET)
    positions = torch.zeros_like(tokens)
    real = torch.arange(length) < torch.tensor([row.length for row in rows])[:, None]
    columns = {name: torch.zeros(len(rows), length) for name in rows[0].documents[0].columns}  # in the default dtype
    for r, row in enumerate(rows):
        start = 0
        for document in row.documents:
            end = start + len(document.tokens)
            tokens[r, start:end] = torch.tensor(document.tokens)
            targets = torch.tensor(document.targets)[1:]
            labels[r, start : end - 1] = tokens[r, start + 1 : end].where(targets, NO_TARGET)
            positions[r, start:end] = torch.arange(end - start)
            for name, column in document.columns.items():
                numbers = column if isinstance(column, float) else torch.tensor(column[1:], dtype=torch.float64)
                columns[name][r, start : end - 1] = numbers
            start = end
        positions[r, start:] = torch.arange(length - start)
    return MicroBatch(tokens=tokens, labels=labels, positions=positions, real=real, columns=columns)
