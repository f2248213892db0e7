"""Source: what is trained on next, and where in the data that is. Here of documents; of roll-outs in experience.py.

The order of documents follows from the seed and the epoch (impl/data_position.py), and which of them a step takes only
from the position: it knows neither ranks nor checkpoints. So a training that was interrupted loses none and repeats
none, also when it goes on with another number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from transformers import AutoConfig

from conformance.batch import Batch, Document, Row
from conformance.inputs.documents import check_vocabulary, load_documents
from conformance.inputs.folder import runs_code
from conformance.inputs.tokenizer import load_tokenizer
from conformance.scenario import DataConfig, Scenario
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
    room = data.max_len
    while True:
        (number,), after = position.take(1)
        document = documents[number]
        if row and (not data.packed or len(document.tokens) > room):
            return tuple(row), position
        row.append(document)
        room -= len(document.tokens)
        position = after


def document_source(scenario: Scenario, model: Path) -> DocumentSource:
    """The documents of a scenario, tokenized for the Hugging Face folder ``model``.

    Raises UsageError for data, a tokenizer or a ``max_len`` that cannot be used.
    """
    documents = read_documents(scenario, scenario.data, model)
    position = DataPosition(seed=scenario.seed, documents=len(documents))
    return DocumentSource(documents, scenario.data, position)


def read_documents(scenario: Scenario, data: DataConfig, model: Path) -> list[Document]:
    """All samples of a data set, in its order. See ``document_source``."""
    documents = load_documents(data, load_tokenizer(model, trusted=scenario.trust_remote_code))
    check_vocabulary(documents, model, vocabulary_size(model, trusted=scenario.trust_remote_code))
    return documents


def vocabulary_size(model: Path, *, trusted: bool) -> int:
    """How many tokens a model knows, by its configuration."""
    config = AutoConfig.from_pretrained(model, trust_remote_code=runs_code(model, trusted=trusted))
    size: int = config.get_text_config().vocab_size
    return size
