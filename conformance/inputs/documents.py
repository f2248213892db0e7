"""Data: from questions and answers in a file to the frozen batches of every optimizer step.

Serves claim 1: batches are made so that the usual bugs cannot cancel out. Documents keep their ragged lengths, and some
rows carry no target token at all, whatever the data set:

* step 0: the last sixth of the rows (of 24 rows: 20..23), so that the last of 8 ranks has nothing to learn, nor has a
  micro-batch of dp 2 or 4 with accumulation 3;
* step 1: the last third (of 24 rows: 16..23), so that a micro-batch of a single rank with accumulation 3 has nothing.
"""

import random
from collections import deque
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from statistics import median_high
from typing import Any

from conformance.batch import Batch, Document, Row
from conformance.inputs.samples import read_samples
from conformance.inputs.tokenizer import computing_at_most, encode, load_tokenizer
from conformance.oracle.architecture import read_architecture
from conformance.scenario import DataConfig, Scenario
from conformance.validation import UsageError, one_line

SAMPLE_LIMIT_S = 5.0  # of computing; a template can loop for ever


def build_batches(scenario: Scenario, model: Path) -> list[Batch]:
    """``scenario.steps`` batches, tokenized for the Hugging Face folder ``model``.

    ``scenario.seed`` shuffles the documents once; they come round again when they run out. Unpacked, a row is one
    document. Packed, it holds two documents or more, taken in order for as long as they fit into ``max_len``, or a long
    one by itself.
    Target tokens are taken from the rows that the module's docstring names. Raises UsageError where the data, the
    tokenizer or ``max_len`` do not allow this.
    """
    data = scenario.data
    documents = load_documents(data, load_tokenizer(model, trusted=scenario.trust_remote_code))
    largest = max(max(document.tokens) for document in documents)
    size = read_architecture(model, disable_dropout=scenario.objective.disable_dropout).vocab_size
    if largest >= size:
        raise UsageError(
            f"the tokenizer in {model} gives token {largest}, and the vocabulary of its config.json has {size}; give "
            f"the folder the tokenizer of this model"
        )
    random.Random(scenario.seed).shuffle(documents)
    rows = pack(documents, max_len=data.max_len) if data.packed else ((document,) for document in cycle(documents))
    return [_batch(step, rows, data) for step in range(scenario.steps)]


def load_documents(config: DataConfig, tokenizer: Any) -> list[Document]:
    """All samples of a data set as documents of at most ``max_len`` tokens; longer ones are cut at the end.

    The input is the user's turn and the output the assistant's turn of the tokenizer's chat template; the tokens that
    the output adds are targets, with the end token that the template writes and without white space behind it. A
    tokenizer without a template: input, output and end-of-sequence token, one after the other.
    """
    encoded = []
    for number, (question, answer) in enumerate(read_samples(config), start=1):
        try:
            with computing_at_most(SAMPLE_LIMIT_S):
                encoded.append(encode(question, answer, tokenizer))
        except Exception as error:  # whatever somebody's template does
            raise UsageError(
                f"the tokenizer in {tokenizer.name_or_path} does not serve for sample {number} of {config.path}: "
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
    """Rows without end: documents in order for as long as they fit, going round.

    Where the second document does not fit beside the first, the next one that does is preferred to a row of one.
    Raises UsageError where no other fits beside half of the documents, which would be no packing.
    """
    lengths = [len(document.tokens) for document in documents]
    alone = sum(length + min(lengths) > max_len for length in lengths)
    if 2 * alone >= len(lengths):
        raise UsageError(
            f"data.max_len={max_len} packs no second document beside {alone} of {len(lengths)} documents; use "
            f"data.max_len={median_high(lengths) + min(lengths)} or more, or data.packed=false"
        )
    queue = deque(documents)

    def take(place: int) -> Document:
        document = queue[place]
        del queue[place]
        queue.append(document)
        return document

    while True:
        row = [take(0)]
        room = max_len - len(row[0].tokens)
        place = next((i for i, document in enumerate(queue) if len(document.tokens) <= room), None)
        while place is not None:
            row.append(take(place))
            room -= len(row[-1].tokens)
            place = 0 if len(queue[0].tokens) <= room else None
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
