"""Defines the frozen input of one optimizer step, which the oracle and every backend share.

``Batch.micro_batches`` decides which data-parallel rank and micro-batch each row belongs to. So a difference between
two backends can never come from the data.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import MappingProxyType

Column = tuple[float, ...] | float
Columns = Mapping[str, Column]
NO_COLUMNS: Columns = MappingProxyType({})
OF_INPUTS = "token."  # prefix of a column whose numbers belong to tokens as inputs, not as targets
GIVEN = "given_reward"  # column of what tokens earn besides the reward of their response
KEPT = "sampling_mask."  # prefix of columns: 1 + a token that the sampler kept where it drew a target; 0 for none
EXPERTS = f"{OF_INPUTS}expert."  # prefix of each expert_column
CHOICES = "choices.safetensors"  # in the folder of an oracle run: the frozen batches with the choices of its routers
# Columns of documents with images. IMAGE: 1 where an image token stands. GRID: patches of an image by time, height and
# width, at its first token. PIXEL, a prefix: the numbers of pixel_values that belong to an image token, in their order.
IMAGE, PIXEL = f"{OF_INPUTS}image", f"{OF_INPUTS}pixel."
GRID = tuple(f"{OF_INPUTS}grid.{axis}" for axis in "thw")


def expert_column(layer: int, slot: int, of: str = "routing") -> str:
    """Names the column with the expert that a router chooses for each token.

    layer: the number of the router, in the order of the layers. slot: which of the chosen experts. of: the key under
    which the forward pass is recorded (conformance.spec.observables); passes of one step may use different weights.
    """
    return f"{EXPERTS}{of}.{layer}.{slot}"


@dataclass(frozen=True)
class Document:
    """Holds one training sample.

    targets: ``targets[i]``: whether the loss counts the prediction of token i from tokens 0..i-1; targets[0] is False.
    columns: what an objective needs in advance (advantages, rewards, old log-probs), by name. A column is one number
        for the whole document, or one number per token. Number i belongs to token i as a target, or as an input if the
        name begins with OF_INPUTS.
    """

    tokens: tuple[int, ...]
    targets: tuple[bool, ...]
    columns: Columns = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.targets) > 0
        assert not self.targets[0], "the first token of a document has nothing to be predicted from"
        for name, column in self.columns.items():
            assert isinstance(column, float) or len(column) == len(self.tokens), f"{name} needs a number per token"


@dataclass(frozen=True)
class Row:
    """Holds one sequence of a micro-batch: a document, or packed documents that must not attend to each other.

    ``index``: the row's position in the whole optimizer step, under which log-probs are reported.
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
    """Holds all rows of one optimizer step, over all ranks and micro-batches. ``max_len``: most tokens of a row.

    ``rollout``: if this step begins a rollout, all its mini-batches, this one first; otherwise empty. Old log-probs,
    values and advantages are computed for all of them before the first update.
    """

    step: int
    max_len: int
    rows: tuple[Row, ...]
    rollout: tuple["Batch", ...] = ()

    @property
    def target_count(self) -> int:
        """Counts the target tokens of the optimizer step: the denominator of the SFT loss."""
        return sum(row.target_count for row in self.rows)

    @property
    def documents(self) -> list[Document]:
        """Returns all documents, in the order of the rows."""
        return [document for row in self.rows for document in row.documents]

    def micro_batches(self, *, dp_rank: int, dp_size: int, accumulation: int) -> list[tuple[Row, ...]]:
        """Returns the rows of one data-parallel rank in ``accumulation`` micro-batches of equal numbers of rows.

        Raises ValueError if the rows cannot be divided evenly.
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
    """Writes batches to a safetensors file: all tokens concatenated, and the lengths of documents, rows and steps.

    tokens: int64 (tokens,). targets: bool (tokens,).
    documents: int64 (documents,), the number of tokens of each document.
    rows: int64 (rows,), the number of documents of each row. steps: int64 (steps,), the number of rows of each step.
    column/NAME: float64 (tokens,) or (documents,). Every document has the same columns.
    metadata: ``step``, ``max_len`` and the number of mini-batches of the rollout that begins at the step. These
        mini-batches are this step and those that follow it.
    """
    import torch  # imported here, because reading a scenario needs no torch
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
    # A single metadata entry: safetensors writes several in any order, and equal batches must give equal files.
    save_file(tensors, path, metadata={"batches": json.dumps({"steps": numbers, "columns": kinds})})


def read_batches(path: Path) -> list[Batch]:
    """Reads the batches that ``write_batches`` wrote."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        stored = {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118
        metadata = json.loads(file.metadata()["batches"])
    kinds: dict[str, str] = metadata["columns"]
    documents = []
    for number, (start, end) in enumerate(_spans(stored["documents"])):
        columns: dict[str, Column] = {
            name: stored[f"column/{name}"][number] if kind == "document" else tuple(stored[f"column/{name}"][start:end])
            for name, kind in kinds.items()
        }
        documents.append(Document(tuple(stored["tokens"][start:end]), tuple(stored["targets"][start:end]), columns))
    rows = [tuple(documents[start:end]) for start, end in _spans(stored["rows"])]
    batches = [
        Batch(numbers["step"], numbers["max_len"], tuple(Row(i, row) for i, row in enumerate(rows[start:end])))
        for numbers, (start, end) in zip(metadata["steps"], _spans(stored["steps"]), strict=True)
    ]
    return with_rollouts(batches, [numbers["rollout"] for numbers in metadata["steps"]])


def with_rollouts(batches: Sequence[Batch], mini_batches: Sequence[int]) -> list[Batch]:
    """Sets ``rollout`` of each batch i to the ``mini_batches[i]`` batches that begin with it; empty where this is 0."""
    return [
        replace(batch, rollout=tuple(batches[i : i + count]))
        for i, (batch, count) in enumerate(zip(batches, mini_batches, strict=True))
    ]


def _spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (start, end) of each of several concatenated spans, from their lengths."""
    return list(pairwise(accumulate(lengths, initial=0)))
