"""Helps authors of adapters: rows to tensors, log-probs by row, whole tensors and shards of DTensors. All optional."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from conformance.backends.protocol import NamedTensors, Shard
from conformance.spec.batch import Row

NO_TARGET = -100  # the label that torch's cross-entropy and Hugging Face models ignore


@dataclass(frozen=True, kw_only=True)
class Flat:
    """Holds the documents of several rows, laid end to end. The tensors are int64 of shape (1, tokens).

    labels: the token itself if it is a target, else NO_TARGET. Hugging Face models shift the labels themselves. The
        first token of a document is never a target, so no document predicts the next one.
    positions: they restart at 0 in every document. A Hugging Face model on the CPU, called with ``use_cache=False`` and
        without a mask, recognizes by them that documents must not attend to each other.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor

    @property
    def as_inputs(self) -> dict[str, torch.Tensor]:
        """Returns the arguments of a Hugging Face model."""
        return {"input_ids": self.tokens, "labels": self.labels, "position_ids": self.positions}


def flatten(rows: Sequence[Row]) -> Flat:
    """Lays the documents of a micro-batch end to end."""
    documents = [document for row in rows for document in row.documents]
    tokens = torch.tensor([[token for document in documents for token in document.tokens]])
    targets = torch.tensor([[target for document in documents for target in document.targets]])
    positions = torch.tensor([[i for document in documents for i in range(len(document.tokens))]])
    return Flat(tokens=tokens, labels=tokens.where(targets, NO_TARGET), positions=positions)


def target_logprobs(logits: torch.Tensor, flat: Flat) -> torch.Tensor:
    """Computes log p of every target, as a detached tensor of shape (targets,).

    logits: of flattened rows, shape (1, tokens, vocabulary). Position i predicts token i + 1.
    """
    at = (flat.labels[0, 1:] != NO_TARGET).nonzero()[:, 0].to(logits.device)
    every = torch.log_softmax(logits.detach()[0, at].to(torch.get_default_dtype()), dim=-1)  # (targets, vocabulary)
    return every.gather(-1, flat.labels[0, 1:].to(logits.device)[at][:, None])[:, 0]


def by_row(numbers: torch.Tensor, rows: Sequence[Row]) -> dict[int, torch.Tensor]:
    """Splits one number per target, of shape (targets,), into rows: a value of ``StepMetrics.rows``."""
    parts = numbers.split([row.target_count for row in rows])
    return {row.index: part for row, part in zip(rows, parts, strict=True)}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the full tensor of a DTensor (a collective of all its ranks), and any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> NamedTensors:
    """Yields each tensor as a whole, one at a time, for ``Backend.named_tensors``."""
    return ((name, whole(tensor.detach())) for name, tensor in tensors)


def shards(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Shard]:
    """Yields this rank's piece of each tensor, for ``Backend.local_shards``. A plain tensor is a replica.

    Raises ValueError for a DTensor with a pending reduction, because no rank holds its numbers.
    """
    for name, tensor in tensors:
        if not isinstance(tensor, DTensor):
            yield Shard(name, "full", tensor.detach())
            continue
        if any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(f"{name} is a partial sum; redistribute it before it is shown")
        mesh = tensor.device_mesh
        place = zip(range(mesh.ndim), mesh.get_coordinate() or (), tensor.placements, strict=True)
        cut = [f"{axis}:{at}" for axis, at, placement in place if not placement.is_replicate()]
        yield Shard(name, ",".join(cut) or "full", tensor.to_local().detach())
