"""Source: what is trained on next, and where in the data that is. Here of documents; of roll-outs in experience.py.

The order of documents follows from the seed and the epoch (impl/data_position.py), and which of them a step takes only
from the position: it knows neither ranks nor checkpoints. So a training that was interrupted loses none and repeats
none, also when it goes on with another number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from conformance.batch import Batch, Document, Row
from conformance.scenario import DataConfig
from impl.data_position import DataPosition


@dataclass(frozen=True, kw_only=True)
class Work:
    """``batches``: of the updates up to the next place where a training can be interrupted, one each. ``numbers``: what
    is known of them beforehand, for the log."""

    batches: Sequence[Batch]
    numbers: dict[str, float] = field(default_factory=dict)


class Source(Protocol):
    position: DataPosition  # after the work that was given last

    def next(self, step: int) -> Work:
        """The work that begins with optimizer step ``step`` (from 0); collective."""
        ...


@dataclass
class DocumentSource:
    """Rows of documents, an optimizer step at a time."""

    documents: Sequence[Document]
    data: DataConfig
    position: DataPosition

    def next(self, step: int) -> Work:
        rows = []
        for index in range(self.data.rows):
            documents, self.position = next_row(self.documents, self.position, self.data)
            rows.append(Row(index, documents))
        return Work(batches=[Batch(step, self.data.max_len, tuple(rows))])


def next_row(
    documents: Sequence[Document], position: DataPosition, data: DataConfig
) -> tuple[tuple[Document, ...], DataPosition]:
    """One document, or when packed the next ones in order for as long as they fit; and the position after them."""
    row: list[Document] = []
    while True:
        (number,), after = position.take(1)
        if row and not fits(row, documents[number], data):
            return tuple(row), position
        row.append(documents[number])
        position = after


def fits(row: Sequence[Document], document: Document, data: DataConfig) -> bool:
    """Whether a document goes into a row that has others."""
    return data.packed and sum(len(one.tokens) for one in (*row, document)) <= data.max_len
