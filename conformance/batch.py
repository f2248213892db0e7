"""Batch: the frozen input of one optimizer step, the same for the oracle and for every backend.

Also says, once, which data-parallel rank and micro-batch a row belongs to. Serves the claim that a difference between
two backends can never come from the data.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path

Column = tuple[float, ...] | float


@dataclass(frozen=True)
class Document:
    """One training sample. ``targets[i]``: token i is predicted (from tokens 0..i-1); targets[0] is False.

    ``columns`` hold what an objective knows of it beforehand (advantages, rewards, old log-probs), by name: a number
    for each token, where number i belongs to token i as a target, or one number for the whole document.
    """

    tokens: tuple[int, ...]
    targets: tuple[bool, ...]
    columns: Mapping[str, Column] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.targets) > 0
        assert not self.targets[0], "the first token of a document has nothing to be predicted from"
        for name, column in self.columns.items():
            assert isinstance(column, float) or len(column) == len(self.tokens), f"{name} needs a number per token"


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
    """All rows of one optimizer step, over all ranks and micro-batches. ``max_len`` bounds a row, in tokens.

    ``rollout``: of a step that begins a roll-out, all its mini-batches, this one first; old log-probs, values and
    advantages are computed of them before the first update. Empty at other steps and for other objectives.
    """

    step: int
    max_len: int
    rows: tuple[Row, ...]
    rollout: tuple["Batch", ...] = ()

    @property
    def target_count(self) -> int:
        """Number of target tokens of the optimizer step: the denominator of SFT's loss."""
        return sum(row.target_count for row in self.rows)

    @property
    def documents(self) -> list[Document]:
        """All documents, in the order of the rows."""
        return [document for row in self.rows for document in row.documents]

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


def write_batches(path: Path, batches: Sequence[Batch]) -> None:
    """Freeze batches in a safetensors file: all tokens laid end to end, and where documents, rows and steps end.

    tokens, targets: int64 and bool (tokens,). documents: int64 (documents,), tokens of each. rows: documents of each
    row. steps: rows of each step. Of a roll-out, only the number of its mini-batches is kept, which are the steps that
    follow. column/NAME: float64 (tokens,) or (documents,); every document has the same columns.
    """
    import torch  # who only reads a scenario needs no torch
    from safetensors.torch import save_file

    documents = [document for batch in batches for document in batch.documents]
    tensors = {
        "tokens": torch.tensor([token for d in documents for token in d.tokens]),
        "targets": torch.tensor([target for d in documents for target in d.targets]),
        "documents": torch.tensor([len(d.tokens) for d in documents]),
        "rows": torch.tensor([len(row.documents) for batch in batches for row in batch.rows]),
        "steps": torch.tensor([len(batch.rows) for batch in batches]),
    }
    kinds: dict[str, str] = {}
    for name in documents[0].columns:
        values = [document.columns[name] for document in documents]
        single = isinstance(values[0], float)
        kinds[name] = "document" if single else "token"
        flat = values if single else [number for column in values for number in column]  # type: ignore[union-attr]
        tensors[f"column/{name}"] = torch.tensor(flat, dtype=torch.float64)
    numbers = [{"step": b.step, "max_len": b.max_len, "rollout": len(b.rollout)} for b in batches]
    # One entry: safetensors writes several in any order, and equal batches have to be equal files.
    save_file(tensors, path, metadata={"batches": json.dumps({"steps": numbers, "columns": kinds})})


def read_batches(path: Path) -> list[Batch]:
    """Read what ``write_batches`` froze."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        held = {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118
        metadata = json.loads(file.metadata()["batches"])
    kinds: dict[str, str] = metadata["columns"]
    documents = []
    for number, (start, end) in enumerate(_spans(held["documents"])):
        columns: dict[str, Column] = {
            name: held[f"column/{name}"][number] if kind == "document" else tuple(held[f"column/{name}"][start:end])
            for name, kind in kinds.items()
        }
        documents.append(Document(tuple(held["tokens"][start:end]), tuple(held["targets"][start:end]), columns))
    rows = [tuple(documents[start:end]) for start, end in _spans(held["rows"])]
    batches = [
        Batch(numbers["step"], numbers["max_len"], tuple(Row(i, row) for i, row in enumerate(rows[start:end])))
        for numbers, (start, end) in zip(metadata["steps"], _spans(held["steps"]), strict=True)
    ]
    return with_rollouts(batches, [numbers["rollout"] for numbers in metadata["steps"]])


def with_rollouts(batches: Sequence[Batch], mini_batches: Sequence[int]) -> list[Batch]:
    """The batches, where ``mini_batches[i]`` that begin with batch i are a roll-out; none where it is 0."""
    return [
        replace(batch, rollout=tuple(batches[place : place + count]))
        for place, (batch, count) in enumerate(zip(batches, mini_batches, strict=True))
    ]


def _spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Where each of several stretches begins and ends that are laid end to end."""
    return list(pairwise(accumulate(lengths, initial=0)))
