"""Shows the text stages of `parity train`: encoding, packing, collation and the order of documents."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from conformance.backends.engines import NotSupported
from conformance.backends.text import OrderPlan, TextInfo
from conformance.data import tokenizer
from conformance.data.forms import Sample
from conformance.spec.batch import Batch, Document, Row
from conformance.spec.scenario import DataConfig
from impl.checkpoints.training_state import DataPosition
from impl.interface.micro_batches import NO_TARGET, collate
from impl.train.data import DocumentSource, next_row


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
