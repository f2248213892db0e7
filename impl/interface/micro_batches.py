"""Converts rows to micro-batches of tensors, declares outputs and losses of one, and loops over those of a step.

Rows are padded, or documents are packed by position ids; labels are shifted inside each document.

The loop serves libraries that leave it to the caller; pipeline schedules do not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from conformance.spec.batch import OF_INPUTS, PIXEL, Batch, Row
from conformance.spec.offline import Distillation
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
    kept: this rank's part of outputs of frozen models, by name. All copies and parts of the micro-batch share it.
    origin: the micro-batch that ``to`` copied. Its ``positions`` and ``real`` have the same numbers and can be read
        without waiting for the device; the other tensors may have been replaced since.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    real: torch.Tensor
    columns: dict[str, torch.Tensor]
    kept: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
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
            kept=self.kept,
            origin=self,
        )


def collate(rows: Sequence[Row], *, multiple_of: int = 1) -> MicroBatch:
    """Builds a micro-batch as long as its longest row, rounded up to a multiple of ``multiple_of``."""
    longest = max(row.length for row in rows)
    length = -(-longest // multiple_of) * multiple_of
    shape = len(rows), length
    # In numpy: a step has hundreds of documents, and modes that watch torch's operators would see five of each.
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    labels = np.full(shape, NO_TARGET, np.int64)
    real = np.arange(length) < np.array([row.length for row in rows])[:, None]
    columns = {name: np.zeros(shape) for name in rows[0].documents[0].columns}
    for r, row in enumerate(rows):
        start = 0
        for document in row.documents:
            end = start + len(document.tokens)
            tokens[r, start:end] = document.tokens
            targets = np.array(document.targets, np.bool_)[1:]
            labels[r, start : end - 1] = np.where(targets, tokens[r, start + 1 : end], NO_TARGET)
            positions[r, start:end] = np.arange(end - start)
            for name, column in document.columns.items():
                if name.startswith(OF_INPUTS):
                    columns[name][r, start:end] = column
                else:
                    columns[name][r, start : end - 1] = column if isinstance(column, float) else column[1:]
            start = end
        positions[r, start:] = np.arange(length - start)
    dtype = torch.get_default_dtype()
    numbers = {name: torch.from_numpy(column).to(dtype) for name, column in columns.items()}
    if pixels := [numbers.pop(name) for name in [*numbers] if name.startswith(PIXEL)]:
        numbers[PIXEL] = torch.stack(pixels, dim=-1)
    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        positions=torch.from_numpy(positions),
        real=torch.from_numpy(real),
        columns=numbers,
    )


def further_ahead(inputs: MicroBatch, depth: int) -> MicroBatch:
    """Returns the micro-batch with the token and the label of the position ``depth`` further ahead at each position.

    Beyond the end of a document there are token 0 and no target. Modules for multi-token prediction read these tokens.
    """

    def moved_up(numbers: Tensor, empty: int) -> Tensor:
        return pad(numbers[:, depth:], (0, depth), value=empty)

    inside = moved_up(inputs.positions, -1) == inputs.positions + depth
    tokens, labels = moved_up(inputs.tokens, 0), moved_up(inputs.labels, NO_TARGET)
    return replace(inputs, tokens=tokens.where(inside, 0), labels=labels.where(inside, NO_TARGET))


OutputName = Literal["logprobs", "entropy", "values", "targets", "distribution", "mtp_logprobs"]
Wanted = frozenset[OutputName | Distillation]  # an objective stands for the output ``divergence``; see Outputs


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Holds the requested outputs of a micro-batch; an output that was not requested is None.

    Most are (rows, length) in float32 or wider. All ranks that share the micro-batch have the same numbers.

    logprobs: log p of the label of each position, at the requested temperature; 0 where there is no target.
    entropy: -sum p log p of the distribution at each position, in nats; temperature and zeros as for logprobs.
    values: the value head's number at each position; 0 in padding.
    targets: 1 at each label that is trained on, else 0. It is taken from the tokens that went through the model, after
        padding and sharding, so its sum is the number of targets that the loss really covers.
    divergence: how far the distribution at each target is from the one that MicroBatch.kept has under ``distribution``,
        by the wanted objective. The output ``distribution`` is no field here: it is kept there, as this rank's logits.
    mtp_logprobs: (rows, length, modules), for multi-token prediction: log p of the label of ``further_ahead`` by the
        module at each depth from 1 on; 0 where there is no such target.
    routing, probabilities: (rows, length, routers, experts), for a mixture of experts, whatever was requested: the
        weight of each expert's output, 0 where the expert is not chosen, and the router's softmax.
    squares: (rows, length, routers), for a mixture of experts: log(sum exp(logits))^2 of each router.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    targets: Tensor | None = None
    divergence: Tensor | None = None
    mtp_logprobs: Tensor | None = None
    routing: Tensor | None = None
    probabilities: Tensor | None = None
    squares: Tensor | None = None

    def each(self, function: Callable[[Tensor], Tensor]) -> "Outputs":
        """Returns a copy with ``function`` applied to each output that is not None."""
        return Outputs(**{name: None if tensor is None else function(tensor) for name, tensor in vars(self).items()})

    def detach(self) -> "Outputs":
        return self.each(Tensor.detach)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Holds the loss and the recorded numbers of one micro-batch and one model; dictionaries are keyed by observable.

    loss: scalar, this micro-batch's share of the model's loss. The step's loss is the sum over data ranks and
        micro-batches. None for a frozen model.
    values: scalars that are summed over data ranks and micro-batches.
    highest: scalars that are reduced to their maximum over all ranks and micro-batches.
    rows: tensors (rows, length); their numbers at the targets are recorded.
    """

    loss: Tensor | None
    values: dict[str, Tensor] = field(default_factory=dict)
    highest: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)


Totals = Mapping[str, Tensor]  # sums over the optimizer step, such as the denominators of losses: scalars by name
Others = Mapping[str, Outputs]  # outputs of the models before this one for the same micro-batch, by role
Loss = Callable[[int, Outputs], Tensor]  # (index of the micro-batch, its outputs) -> scalar


class RouterTerms(Protocol):
    """Declares the terms that the routers of a mixture of experts add to the loss of an optimizer step."""

    def of_micro_batch(self, inputs: MicroBatch, outputs: Outputs) -> Tensor:
        """Returns the routers' terms for a whole micro-batch, with a gradient."""
        ...

    def share(self, weights: Tensor, probabilities: Tensor, squares: Tensor) -> Tensor:
        """Returns the terms of some routers for N real tokens, with a gradient.

        weights, probabilities: (N, routers, X); the probabilities have a gradient.
        squares: (N, routers), with a gradient.
        """
        ...


class StepwiseTrainable(Protocol):
    """Declares the methods that the loop calls for each micro-batch, in this order."""

    def start_micro_batch(self, index: int, count: int) -> None:
        """Prepares for micro-batch ``index`` of ``count``: clears gradients before the first, sets when to reduce."""
        ...

    def forward(self, inputs: MicroBatch, *, want: Wanted, temperature: float) -> Outputs:
        """Runs the forward pass and returns the outputs that ``want`` names; see Trainable.forward_backward."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulates the gradient of ``loss``, a scalar.

        After the last micro-batch, the gradient is that of the sum of ``loss`` over data ranks and micro-batches.
        """
        ...


def set_mode(module: torch.nn.Module, *, training: bool) -> None:
    """Puts a module and its submodules into training or evaluation mode, unless the module is in that mode already.

    All submodules must be in the same mode as the module: checking the hundreds of them takes milliseconds.
    """
    if module.training != training:
        module.train(training)


def run_micro_batches(
    trainable: StepwiseTrainable, inputs: Sequence[MicroBatch], *, want: Wanted, temperature: float, loss: Loss | None
) -> list[Outputs]:
    """Implements Trainable.forward_backward with the methods of StepwiseTrainable, one micro-batch after another."""
    results = []
    for index, micro_batch in enumerate(inputs):
        if loss is None:
            with torch.no_grad():
                results.append(trainable.forward(micro_batch, want=want, temperature=temperature))
            continue
        trainable.start_micro_batch(index, len(inputs))
        outputs = trainable.forward(micro_batch, want=want, temperature=temperature)
        trainable.backward(loss(index, outputs))
        results.append(outputs.detach())
    return results


def numbered(batch: Batch, rows: Sequence[Row], inputs: MicroBatch) -> MicroBatch:
    """Replaces the tokens of a micro-batch of ``rows`` by their numbers in the step, from 1.

    The result is to be sharded as the tokens are; ``token_numbers`` reads the shard.
    """
    starts = [0]
    for row in batch.rows:
        starts.append(starts[-1] + row.length)
    numbers = torch.zeros_like(inputs.tokens)
    for r, row in enumerate(rows):
        numbers[r, : row.length] = torch.arange(starts[row.index], starts[row.index + 1]) + 1
    return replace(inputs, tokens=numbers)


def token_numbers(part: MicroBatch) -> torch.Tensor:
    """Returns the numbers of tokens from 0, -1 in padding: (rows, length), for a shard from ``numbered``."""
    return part.tokens.where(part.real, 0) - 1
