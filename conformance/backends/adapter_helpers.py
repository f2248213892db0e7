"""Adapting: what most adapters need, whatever their framework: tensors out of DTensors, rows into tensors, log-probs by
row. For authors of adapters; nothing here has to be used.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from conformance.backends.protocol import NamedTensors, Shard
from conformance.spec.batch import Row

NO_TARGET = -100  # the label that torch's cross-entropy and Hugging Face models ignore


@dataclass(frozen=True, kw_only=True)
class Flat:
    """The documents of several rows, laid end to end. The tensors are int64 of shape (1, tokens).

    labels: the token itself where it is a target, else NO_TARGET. They are not shifted: Hugging Face models do that.
        The first token of a document is no target, so no document predicts the next one's.
    positions: they restart at 0 in every document, which is how a Hugging Face model on the CPU, called with
        ``use_cache=False`` and without a mask, knows that documents must not attend to each other.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor

    @property
    def as_inputs(self) -> dict[str, torch.Tensor]:
        """The arguments of a Hugging Face model."""
        return {"input_ids": self.tokens, "labels": self.labels, "position_ids": self.positions}


def flatten(rows: Sequence[Row]) -> Flat:
    """Lay the documents of a micro-batch end to end."""
    documents = [document for row in rows for document in row.documents]
    tokens = torch.tensor([[token for document in documents for token in document.tokens]])
    targets = torch.tensor([[target for document in documents for target in document.targets]])
    positions = torch.tensor([[i for document in documents for i in range(len(document.tokens))]])
    return Flat(tokens=tokens, labels=tokens.where(targets, NO_TARGET), positions=positions)


def target_logprobs(logits: torch.Tensor, flat: Flat) -> torch.Tensor:
    """log p of every target, as a detached tensor of shape (targets,), from the logits of flattened rows, of shape
    (1, tokens, vocabulary). Position i predicts token i + 1."""
    at = (flat.labels[0, 1:] != NO_TARGET).nonzero()[:, 0].to(logits.device)
    every = torch.log_softmax(logits.detach()[0, at].to(torch.get_default_dtype()), dim=-1)  # (targets, vocabulary)
    return every.gather(-1, flat.labels[0, 1:].to(logits.device)[at][:, None])[:, 0]


def by_row(numbers: torch.Tensor, rows: Sequence[Row]) -> dict[int, torch.Tensor]:
    """Cut one number per target, of shape (targets,), into rows: a value of ``StepMetrics.rows``."""
    parts = numbers.split([row.target_count for row in rows])
    return {row.index: part for row, part in zip(rows, parts, strict=True)}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a DTensor, which all its ranks have to ask for together; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> NamedTensors:
    """For ``Backend.named_tensors``: each tensor as a whole, one at a time."""
    return ((name, whole(tensor.detach())) for name, tensor in tensors)


def shards(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Shard]:
    """For ``Backend.local_shards``: this rank's piece of each tensor. A tensor that is no DTensor is a replica.

    Raises ValueError for a DTensor with a pending reduction, because nobody holds its numbers.
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
