"""Helps authors of adapters: rows to tensors, log-probs by row, tensors and shards of DTensors, and a pause in a loop
that a framework owns. All optional."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

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
    return label_logprobs(logits, flat.labels)


def label_logprobs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Computes log p of every label but NO_TARGET, as a detached tensor of shape (targets,).

    logits: (rows, length, vocabulary). labels: (rows, length), not shifted. Position i predicts token i + 1.
    """
    at = labels[:, 1:].to(logits.device) != NO_TARGET
    every = torch.log_softmax(logits.detach()[:, :-1][at].to(torch.get_default_dtype()), dim=-1)
    return every.gather(-1, labels[:, 1:].to(logits.device)[at][:, None])[:, 0]


def by_row(numbers: torch.Tensor, rows: Sequence[Row]) -> dict[int, torch.Tensor]:
    """Splits one number per target, of shape (targets,), into rows: a value of ``StepMetrics.rows``.

    Too few or too many numbers, as of a mask that is off by one, leave the last rows of another length: a difference.
    """
    parts = numbers.tensor_split([*accumulate(row.target_count for row in rows)][:-1])
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


try:
    from greenlet import getcurrent, greenlet
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "parity.Paused needs the package greenlet; run: python -m pip install greenlet", name="greenlet"
    ) from missing


class Paused:
    """Runs a loop that owns its steps, whole and in this thread, and pauses it where a hook calls ``pause``.

    ``resume`` runs the loop up to its next pause, so each ``train_step`` of an adapter resumes it once::

        loop = Paused(lambda pause: trainer.fit())  # nothing runs yet; a hook of the trainer calls pause(metrics)
        metrics = loop.resume()
        result = loop.finish()  # after the last step

    Pause after the optimizer's step or in its hook, not in a gradient hook, which runs in another thread on GPUs. The
    loop has its own grad mode and autocast. Close an unfinished loop in ``teardown``, because nothing else frees it.
    """

    def __init__(self, body: Callable[[Callable[[Any], Any]], Any]) -> None:
        self.pauses = 0
        self._greenlet = greenlet(lambda _: body(self.pause))

    @property
    def running(self) -> bool:
        """Tells whether the loop has begun and not ended."""
        return bool(self._greenlet)

    def pause(self, value: Any = None) -> Any:
        """Gives ``value`` to the caller of ``resume``. Returns, inside the loop, the value of the next ``resume``.

        Raises RuntimeError if the loop itself does not call it, in its own thread.
        """
        if getcurrent() is not self._greenlet:
            raise RuntimeError(
                "pause was called outside of the paused loop, or in another thread of it (gradient hooks run in one on "
                "GPUs); call it in a hook of the optimizer, the trainer or the loader"
            )
        self.pauses += 1
        assert self._greenlet.parent is not None
        return _kept_modes(self._greenlet.parent.switch, value)

    def resume(self, value: Any = None) -> Any:
        """Runs the loop up to its next pause, and returns the pause's value. An exception of the loop comes out here.

        Raises RuntimeError if the loop ends, or has ended, before that pause.
        """
        before = self.pauses
        if not self._greenlet.dead:
            self._run(value)
        if self.pauses == before:
            raise RuntimeError(
                f"the loop ended after {self.pauses} pauses, and pause {self.pauses + 1} was asked for; it makes fewer "
                f"optimizer steps than the batches that it was given: check its epochs, its number of steps and what "
                f"its loader drops"
            )
        return self._value

    def finish(self, value: Any = None) -> Any:
        """Runs the loop from its last pause to its end, and returns its result. Raises RuntimeError if it pauses."""
        before = self.pauses
        if not self._greenlet.dead:
            self._run(value)
        if self.pauses != before:
            raise RuntimeError(
                f"the loop paused again, at pause {self.pauses}, where it should have ended; it makes more optimizer "
                f"steps than the batches that it was given: check its epochs, its number of steps and its accumulation"
            )
        return self._value

    def close(self) -> None:
        """Ends an unfinished loop where it is paused: its ``finally`` blocks run. Otherwise does nothing."""
        if self.running:
            self._greenlet.parent = getcurrent()
            _kept_modes(self._greenlet.throw)
            assert self._greenlet.dead, "the loop caught the exception that ends it, and paused again"

    def _run(self, value: Any) -> None:
        self._greenlet.parent = getcurrent()
        self._value = _kept_modes(self._greenlet.switch, value)


def _kept_modes(switch: Callable[..., Any], *value: Any) -> Any:
    """Switches to the other side, and restores grad mode and autocast of this side when it goes on."""
    grad = torch.is_grad_enabled()
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    try:
        given = switch(*value)
    finally:
        torch.set_grad_enabled(grad)
        for kind, enabled, dtype in casts:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
    return given
