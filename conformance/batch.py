"""Batch: the frozen input of one optimizer step, the same for the oracle and for every backend.

Also says, once, which data-parallel rank and micro-batch a row belongs to. Serves the claim that a difference between
two backends can never come from the data.
"""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Document:
    """One training sample. ``targets[i]``: token i is predicted (from tokens 0..i-1); targets[0] is False."""

    tokens: tuple[int, ...]
    targets: tuple[bool, ...]

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.targets) > 0
        assert not self.targets[0], "the first token of a document has nothing to be predicted from"


@dataclass(frozen=True)
class Row:
    """What one sequence of a micro-batch holds: one document, or several that are packed and must not see each other.

    ``index`` is the row's place in the whole optimizer step; log-probs are reported under it.
    """

    index: int
    documents: tuple[Document, ...]

    @property
    def length(self) -> int:
        return sum(len(d.tokens) for d in self.documents)

    @property
    def target_count(self) -> int:
        return sum(sum(d.targets) for d in self.documents)


@dataclass(frozen=True)
class Batch:
    """All rows of one optimizer step, over all ranks and micro-batches. ``max_len`` bounds a row, in tokens."""

    step: int
    max_len: int
    rows: tuple[Row, ...]

    @property
    def target_count(self) -> int:
        """Number of target tokens of the optimizer step: the denominator of its loss."""
        return sum(row.target_count for row in self.rows)

    def micro_batches(self, *, dp_rank: int, dp_size: int, accumulation: int) -> list[tuple[Row, ...]]:
        """The rows of one data-parallel rank, cut into ``accumulation`` micro-batches of equal numbers of rows.

        Raises ValueError where the rows cannot be divided evenly.
        """
        parts = dp_size * accumulation
        if len(self.rows) % parts:
            raise ValueError(
                f"{len(self.rows)} rows per step cannot be divided over dp={dp_size} x accumulation={accumulation}; "
                f"set data.rows to a multiple of {parts}"
            )
        size = len(self.rows) // parts
        first = dp_rank * accumulation
        return [self.rows[(first + i) * size : (first + i + 1) * size] for i in range(accumulation)]


def write_batches(path: Path, batches: list[Batch]) -> None:
    """Freeze batches in a JSON file."""
    steps = [
        {
            "step": b.step,
            "max_len": b.max_len,
            "rows": [
                [{"tokens": d.tokens, "targets": [int(t) for t in d.targets]} for d in r.documents] for r in b.rows
            ],
        }
        for b in batches
    ]
    path.write_text(json.dumps(steps), encoding="utf-8")


def read_batches(path: Path) -> list[Batch]:
    """Read what ``write_batches`` froze."""
    return [
        Batch(
            step=b["step"],
            max_len=b["max_len"],
            rows=tuple(
                Row(i, tuple(Document(tuple(d["tokens"]), tuple(map(bool, d["targets"]))) for d in row))
                for i, row in enumerate(b["rows"])
            ),
        )
        for b in json.loads(path.read_text(encoding="utf-8"))
    ]
