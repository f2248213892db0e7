"""Converts rows to tensors: pads them, packs documents by position ids, and shifts labels inside each document."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from conformance.spec.batch import OF_INPUTS, Row
from impl.interface.distributed import moved

NO_TARGET = -100  # the label that torch's cross-entropy ignores


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Holds the tensors of one micro-batch. All tensors have the shape (rows, length).

    tokens: int64, 0 in padding.
    labels: int64; ``labels[r, i]`` is the token that position i predicts, or NO_TARGET.
    positions: int64; they restart at 0 in every document. transformers tells packed documents apart by them if it gets
        neither an attention mask nor a cache. The padding of a row counts as a document of its own.
    real: bool; False in padding.
    columns: floats by name, aligned with the labels: number i of a row belongs to the token that position i predicts,
        or, if the name begins with OF_INPUTS, to the token at position i. Columns are 0 in padding. A column with a
        single number for a document has that number at all its positions.
    origin: the micro-batch that ``to`` copied. Its ``positions`` and ``real`` have the same numbers and can be read
        without waiting for the device; the other tensors may have been replaced since.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    real: torch.Tensor
    columns: dict[str, torch.Tensor]
    origin: "MicroBatch | None" = field(default=None, repr=False, compare=False)

    @property
    def targets(self) -> torch.Tensor:
        """Returns bool (rows, length): True where a target is predicted."""
        return self.labels != NO_TARGET

    def to(self, device: str) -> "MicroBatch":
        """Copies the micro-batch to ``device``; the host does not wait for copies from the CPU to a GPU."""
        return MicroBatch(
            tokens=moved(self.tokens, device),
            labels=moved(self.labels, device),
            positions=moved(self.positions, device),
            real=moved(self.real, device),
            columns={name: moved(column, device) for name, column in self.columns.items()},
            origin=self,
        )


def collate(rows: Sequence[Row], *, multiple_of: int = 1) -> MicroBatch:
    """Builds a micro-batch as long as its longest row, rounded up to a multiple of ``multiple_of``."""
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
            tokens[r, start:end] = _tensor(document.tokens, np.int64)
            targets = _tensor(document.targets, np.bool_)[1:]
            labels[r, start : end - 1] = tokens[r, start + 1 : end].where(targets, NO_TARGET)
            positions[r, start:end] = torch.arange(end - start)
            for name, column in document.columns.items():
                if name.startswith(OF_INPUTS):
                    columns[name][r, start:end] = _tensor(column, np.float64)
                    continue
                numbers = column if isinstance(column, float) else _tensor(column[1:], np.float64)
                columns[name][r, start : end - 1] = numbers
            start = end
        positions[r, start:] = torch.arange(length - start)
    return MicroBatch(tokens=tokens, labels=labels, positions=positions, real=real, columns=columns)


def _tensor(values: Sequence[float] | float, dtype: type[np.generic]) -> torch.Tensor:
    """Converts one value or several to a tensor. numpy reads a tuple eight times as fast as torch does."""
    return torch.from_numpy(np.array(values, dtype=dtype))
