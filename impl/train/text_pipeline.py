"""Selects, encodes, packs and orders what `parity train` trains on, and shows these stages to `parity text`.

The order of documents follows from the seed and the epoch (impl/checkpoints/training_state.py). The documents of a step
follow from the position alone, not from ranks or checkpoints. A training that was interrupted therefore neither loses
nor repeats any, also when it resumes with another number of ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from conformance.backends.engines import NotSupported
from conformance.backends.text import OrderPlan, TextInfo
from conformance.core.errors import UsageError, one_line
from conformance.data import tokenizer
from conformance.data.forms import Sample, pair, read_samples
from conformance.data.tokenizer import SAMPLE_LIMIT_S, computing_at_most, encode_prompt
from conformance.spec.batch import Batch, Document, Row
from conformance.spec.objectives import Objective
from conformance.spec.observables import documents_together
from conformance.spec.offline import Sft
from conformance.spec.scenario import DataConfig
from impl.checkpoints.training_state import DataPosition
from impl.interface.micro_batches import NO_TARGET, collate
from impl.train.rewards import ARITHMETIC, FunctionReward, Reward


@dataclass(frozen=True)
class Prompt:
    """Holds the ``tokens`` up to the response, and what rewards read.

    answer: what the reward compares a response with, such as a number; None if it gets the columns of the sample.
    """

    tokens: tuple[int, ...]
    answer: Any
    sample: Sample = field(default_factory=Sample)


def load_prompts(
    data: DataConfig, tokenizer: Any, *, vocabulary: int, max_new_tokens: int, reward: Reward | FunctionReward
) -> list[Prompt]:
    """Loads the prompts of a data set: the user's turn of the chat template, and the answer in the reference.

    Raises UsageError for an unusable file or template, a reference that the reward cannot read, and a prompt that
    leaves fewer than ``max_new_tokens`` tokens in ``data.max_len``.
    """
    prompts = []
    samples = _samples(data, reward)
    if isinstance(reward, FunctionReward):
        reward.check_columns({name for sample in samples for name in sample.record}, data.path)
    for number, sample in enumerate(samples, start=1):
        place = f"sample {number} of {data.path}"
        try:
            with computing_at_most(SAMPLE_LIMIT_S):
                tokens = encode_prompt(sample, tokenizer)
        except Exception as error:  # a template may raise anything
            raise UsageError(f"the tokenizer in {tokenizer.name_or_path} fails on {place}: {one_line(error)}") from None
        if max(tokens) >= vocabulary:
            raise UsageError(
                f"the tokenizer in {tokenizer.name_or_path} returns token {max(tokens)}, but the model's vocabulary "
                f"has {vocabulary}; put the tokenizer of this model into the folder"
            )
        answer = reward.reference(sample.answer, place) if isinstance(reward, Reward) else None
        prompts.append(Prompt(tokens, answer, sample))
    longest = max(len(prompt.tokens) for prompt in prompts)
    if longest + max_new_tokens > data.max_len:
        raise UsageError(
            f"data.max_len={data.max_len} has no room for a prompt of {longest} tokens and max_new_tokens="
            f"{max_new_tokens}; use data.max_len={longest + max_new_tokens}, or shorter responses"
        )
    return prompts


def _samples(data: DataConfig, reward: Reward | FunctionReward) -> Sequence[Sample]:
    if data.path != ARITHMETIC:
        return read_samples(data, reads=reward.reads)
    return [replace(pair(q, a), record={"question": q, "answer": a}) for q, a in arithmetic()]


def arithmetic() -> list[tuple[str, str]]:
    """Returns all 55 sums and 55 differences of two digits whose result is a digit, as questions and answers."""
    sums = [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10 - a)]
    differences = [(f"{a}-{b}=", str(a - b)) for a in range(10) for b in range(a + 1)]
    return sums + differences


@dataclass(frozen=True, kw_only=True)
class Work:
    """Holds the updates up to the next point where a training can be interrupted.

    batches: one batch per update.
    numbers: numbers for the log that are known before the updates.
    """

    batches: Sequence[Batch]
    numbers: dict[str, float] = field(default_factory=dict)


class Source(Protocol):
    position: DataPosition  # after the last work

    def next(self, step: int) -> Work:
        """Returns the work that begins with optimizer step ``step`` (from 0); collective."""
        ...


@dataclass
class DocumentSource:
    """Makes rows of documents, one optimizer step at a time. The position counts documents, or pairs of them."""

    documents: Sequence[Document]
    data: DataConfig
    position: DataPosition
    objective: Objective = field(default_factory=Sft)

    def next(self, step: int) -> Work:
        size = documents_together(self.objective.reads)
        rows: list[tuple[Document, ...]] = []
        while len(rows) < self.data.rows:
            documents, self.position = next_row(self.documents, self.position, self.data, size=size)
            rows += [documents] if self.data.packed else [(document,) for document in documents]
        batch = Batch(step, self.data.max_len, tuple(Row(i, documents) for i, documents in enumerate(rows)))
        return Work(batches=self.objective.annotate([batch]))


def next_row(
    documents: Sequence[Document], position: DataPosition, data: DataConfig, *, size: int = 1
) -> tuple[tuple[Document, ...], DataPosition]:
    """Returns ``size`` documents, or if packed the next ones as long as they fit, and the position after them."""
    row: list[Document] = []
    while True:
        (number,), after = position.take(1)
        unit = documents[number * size : (number + 1) * size]
        if row and not fits(row, unit, data):
            return tuple(row), position
        row += unit
        position = after


def fits(row: Sequence[Document], unit: Sequence[Document], data: DataConfig) -> bool:
    """Returns whether documents that stay together fit into a row that has others."""
    return data.packed and sum(len(one.tokens) for one in (*row, *unit)) <= data.max_len


class ReferencePipeline:
    """Encodes, packs and orders documents as `parity train` does. faults: what may be planted in ``seams``."""

    faults: ClassVar[str] = "impl.faults.served:TEXT_FAULTS"
    seams: ClassVar[dict[str, str]] = {
        "encode": "conformance.data.tokenizer:encode",
        "next_row": "impl.train.text_pipeline:next_row",
        "collate": "impl.train.text_pipeline:collate",
        "epoch_order": "impl.checkpoints.training_state:epoch_order",
        "resumed": "impl.train.text_pipeline:resumed",
        "rows_of_rank": "impl.train.text_pipeline:rows_of_rank",
    }

    @classmethod
    def describe(cls) -> TextInfo:
        packages = ("backend-parity", "transformers", "jinja2")
        return TextInfo(
            name="reference",
            packages=packages,
            trains=("scaffold", "content", "end"),
            marks=True,
            packs="in order",
            strips_end=True,
            endless=True,
            forms=True,
        )

    def load(self, folder: Path, template: str) -> None:
        self.tokenizer = tokenizer.load_tokenizer(folder)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        max_len: int,
        first: int = 0,
        is_pair: bool = False,
    ) -> dict[str, Any]:
        sample = Sample(messages=tuple(messages), first=first, tools=tuple(tools), is_pair=is_pair)
        tokens, targets = tokenizer.encode(sample, self.tokenizer)
        return {"tokens": list(tokens[:max_len]), "targets": list(targets[:max_len])}

    def pack(self, documents: Sequence[Mapping[str, Any]], max_len: int) -> list[dict[str, Any]]:
        """Packs the documents in their own order, and collates each row as a micro-batch."""
        whole = [Document(tuple(one["tokens"]), tuple(one["targets"])) for one in documents]
        data = DataConfig(max_len=max_len, packed=True)
        position: DataPosition = InOrder(seed=0, documents=len(whole))
        rows = []
        while position.consumed < len(whole):
            taken, position = next_row(whole, position, data)
            beyond = max(position.consumed - len(whole), 0)  # the last row has no documents of another epoch
            batch = collate([Row(0, taken[: len(taken) - beyond])])
            labels = [NO_TARGET, *batch.labels[0].tolist()]
            targets = [label != NO_TARGET for label in labels[:-1]]
            rows.append(
                {"tokens": batch.tokens[0].tolist(), "targets": targets, "positions": batch.positions[0].tolist()}
            )
        return rows

    def order(self, plan: OrderPlan) -> list[list[list[list[int]]]]:
        if plan.drops_last:
            raise NotSupported("an endless order has no last step of an epoch")
        size = plan.ranks * plan.rows
        documents = [Document((0, number), (False, True)) for number in range(plan.samples)]
        kind = DataPosition if plan.shuffles else InOrder
        position = resumed(kind(seed=plan.seed, documents=plan.samples, consumed=plan.after * size))
        source = DocumentSource(documents, DataConfig(max_len=2, rows=size), position)
        ranks: list[list[list[int]]] = [[] for _ in range(plan.ranks)]
        for step in range(plan.after, -(-plan.epochs * plan.samples // size)):
            (batch,) = source.next(step).batches
            for rank, steps in enumerate(ranks):
                steps.append([row.documents[0].tokens[1] for row in rows_of_rank(batch, rank, plan.ranks)])
        return [ranks]

    def micro_batches(self, lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
        raise NotSupported("micro-batches have a number of rows, not of tokens")


class InOrder(DataPosition):
    """Takes documents in the order of the data set."""

    def take(self, count: int) -> tuple[list[int], DataPosition]:
        numbers = [(self.consumed + i) % self.documents for i in range(count)]
        return numbers, replace(self, consumed=self.consumed + count)


def resumed(position: DataPosition) -> DataPosition:
    """Returns the position that a checkpoint has written, as it is read."""
    return position


def rows_of_rank(batch: Batch, rank: int, ranks: int) -> tuple[Row, ...]:
    """Returns the rows of a data-parallel rank."""
    (rows,) = batch.micro_batches(dp_rank=rank, dp_size=ranks, accumulation=1)
    return rows
