"""Documents: turns the questions and answers of a file into the frozen batches of every optimizer step.

Serves claim 1: batches are made so that the usual bugs cannot cancel out. Documents keep their different lengths, and
for every data set the following rows have no target token:

* step 0: the last sixth of the rows (of 24 rows: 20..23). So the last of 8 ranks has no target token, and neither has
  one micro-batch of dp 2 or 4 with accumulation 3;
* step 1: the last third of the rows (of 24 rows: 16..23). So one micro-batch of a single rank with accumulation 3 has
  no target token.
"""

import dataclasses
import fnmatch
import functools
import hashlib
import random
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median_high
from typing import Any

from conformance.batch import Batch, Document, Row
from conformance.inputs.folder import NOT_COPIED
from conformance.inputs.samples import read_samples
from conformance.inputs.tokenizer import computing_at_most, encode, load_tokenizer
from conformance.oracle.architecture import read_architecture
from conformance.paths import resolve
from conformance.scenario import DataConfig, Scenario
from conformance.validation import UsageError, one_line

SAMPLE_LIMIT_S = 5.0  # CPU time for one sample; a chat template can loop for ever


def build_batches(scenario: Scenario, model: Path) -> list[Batch]:
    """Build ``scenario.steps`` batches, tokenized with the tokenizer of the Hugging Face folder ``model``.

    ``scenario.seed`` shuffles the documents once; when they run out, they are used again from the start. Without
    packing, a row is one document. With packing, a row holds as many documents as fit into ``max_len``, in order:
    usually two or more, or a single long one. The rows that the module's docstring names lose their target tokens.

    Raises UsageError if the data, the tokenizer or ``max_len`` do not allow this.
    """
    data = scenario.data
    documents = _documents_of(data, model, trusted=scenario.trust_remote_code)
    size = read_architecture(model, disable_dropout=scenario.objective.disable_dropout).vocab_size
    check_vocabulary(documents, model, size)
    random.Random(scenario.seed).shuffle(documents)
    rows = pack(documents, max_len=data.max_len) if data.packed else ((document,) for document in cycle(documents))
    return [_batch(step, rows, data) for step in range(scenario.steps)]


def _documents_of(config: DataConfig, model: Path, *, trusted: bool) -> list[Document]:
    """The documents of a data set for a model folder. What does not ask for other tokens than a scenario before is not
    tokenized again, unless a file has changed."""
    same = dataclasses.replace(config, packed=False, rows=1)  # as far as single documents go
    return list(_tokenized(same, model, trusted, _digest(resolve(config.path)), _digest(model)))


@functools.lru_cache(maxsize=8)
def _tokenized(config: DataConfig, model: Path, trusted: bool, *digests: str) -> tuple[Document, ...]:
    return tuple(load_documents(config, load_tokenizer(model, trusted=trusted)))


def _digest(path: Path) -> str:
    """A digest of a data set's file or folder, or of the files in a model's folder beside its weights."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and not any(fnmatch.fnmatch(file.name, pattern) for pattern in NOT_COPIED):
            digest.update(str(file).encode())
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def check_vocabulary(documents: Sequence[Document], model: Path, size: int) -> None:
    """Raises UsageError for tokens beyond the ``size`` of the vocabulary of the Hugging Face folder ``model``."""
    largest = max(max(document.tokens) for document in documents)
    if largest >= size:
        raise UsageError(
            f"the tokenizer in {model} gives token {largest}, and the vocabulary of its config.json has {size}; give "
            f"the folder the tokenizer of this model"
        )


def load_documents(config: DataConfig, tokenizer: Any) -> list[Document]:
    """Load all samples of a data set as documents of at most ``max_len`` tokens; longer documents are cut at the end.

    The input is the user's turn of the tokenizer's chat template, and the output is the assistant's turn. The tokens
    that the output adds are targets, including the template's end token but not the white space after it. If the
    tokenizer has no chat template, a document is the input, the output and the end-of-sequence token.
    Raises UsageError if the tokenizer cannot encode a sample, or if a prompt leaves no room for a target token.
    """
    encoded = []
    for number, (question, answer) in enumerate(read_samples(config), start=1):
        try:
            with computing_at_most(SAMPLE_LIMIT_S):
                encoded.append(encode(question, answer, tokenizer))
        except Exception as error:  # a user's template may raise anything
            raise UsageError(
                f"the tokenizer in {tokenizer.name_or_path} cannot encode sample {number} of {config.path}: "
                f"{one_line(error)}"
            ) from None
    longest = max(prompt for _, prompt in encoded)
    if longest >= config.max_len:
        count = sum(prompt >= config.max_len for _, prompt in encoded)
        raise UsageError(
            f"data.max_len={config.max_len} leaves no room for a target token in {count} of {len(encoded)} documents "
            f"of {config.path}; use data.max_len={longest + 1} or more, or leave out the longest inputs"
        )
    return [
        Document(tokens[: config.max_len], tuple(i >= prompt for i in range(len(tokens)))[: config.max_len])
        for tokens, prompt in encoded
    ]


def pack(documents: list[Document], *, max_len: int) -> Iterator[tuple[Document, ...]]:
    """Yield rows of documents without end: documents are taken in order while they fit, and reused from the start.

    If the second document does not fit beside the first, the next document that fits is taken instead, so that a row
    of a single document is rare. Raises UsageError if for half of the documents no second document fits in a row.
    """
    lengths = [len(document.tokens) for document in documents]
    alone = sum(length + min(lengths) > max_len for length in lengths)
    if 2 * alone >= len(lengths):
        raise UsageError(
            f"data.max_len={max_len} packs no second document beside {alone} of {len(lengths)} documents; use "
            f"data.max_len={median_high(lengths) + min(lengths)} or more, or data.packed=false"
        )
    queue = deque(documents)

    def move_to_end(index: int) -> Document:
        document = queue[index]
        del queue[index]
        queue.append(document)
        return document

    while True:
        row = [move_to_end(0)]
        room = max_len - len(row[0].tokens)
        index = next((i for i, document in enumerate(queue) if len(document.tokens) <= room), None)
        while index is not None:
            row.append(move_to_end(index))
            room -= len(row[-1].tokens)
            index = 0 if len(queue[0].tokens) <= room else None
        yield tuple(row)


def _batch(step: int, rows: Iterator[tuple[Document, ...]], data: DataConfig) -> Batch:
    masked_from = data.rows
    if step == 0:
        masked_from = -(-data.rows * 5 // 6)
    elif step == 1:
        masked_from = -(-data.rows * 2 // 3)
    chosen = [next(rows) for _ in range(data.rows)]
    for i in range(masked_from, data.rows):
        chosen[i] = tuple(Document(d.tokens, (False,) * len(d.tokens)) for d in chosen[i])
    return Batch(step, data.max_len, tuple(Row(i, documents) for i, documents in enumerate(chosen)))
