"""Builds the frozen batches of every optimizer step from conversations, and packs documents into rows.

Batches are made so that the usual bugs cannot cancel out. Documents keep their different lengths, and for every data
set but pairs of answers, of which no framework has empty ones, the following rows have no target token:

* step 0: the last sixth of the rows (of 24 rows: 20..23). So the last of 8 ranks has no target token, nor has one
  micro-batch of dp 2 or 4 with accumulation 3;
* step 1: the last third of the rows (of 24 rows: 16..23). So one micro-batch of a single rank with accumulation 3 has
  no target token.
"""

import logging
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conformance.core.errors import UsageError
from conformance.data.forms import Sample, mismatched, read_labelled, read_preferences, read_samples, read_steps
from conformance.data.images import check_images
from conformance.data.tokenizer import Documents, load_tokenizer
from conformance.oracle.role_model import decoder_of
from conformance.spec.batch import IMAGE, Batch, Document, Row
from conformance.spec.observables import IN_PAIRS, Reads, documents_together
from conformance.spec.scenario import DataConfig, Scenario

LOOK_AHEAD = 1000  # documents; each document that is tried is tokenized

logger = logging.getLogger(__name__)


def build_batches(scenario: Scenario, model: Path) -> list[Batch]:
    """Builds ``scenario.steps`` batches with the tokenizer of the Hugging Face folder ``model``.

    ``scenario.seed`` shuffles the samples once; when they run out, they are used again from the start. Only the samples
    that are needed are tokenized. Without packing, a row is one document. With packing, a row holds as many documents
    as fit into ``max_len``, in order: usually two or more, or a single long one. The answers of a preference are two
    documents in a row, or in two consecutive rows; so are a labelled answer and the next sample's answer to another
    prompt, both after the prompt of the first. The rows that the module's docstring names lose their target tokens.

    Raises UsageError if the data, the tokenizer or ``max_len`` do not allow this.
    """
    data = scenario.data
    samples = samples_in_turn(data, scenario.objective.reads, seed=scenario.seed)
    tokenizer = load_tokenizer(model, trusted=scenario.trust_remote_code)
    documents = Documents(samples, data, tokenizer, likely=scenario.steps * data.rows)
    units = Units(documents, documents_together(scenario.objective.reads))
    if data.packed and units.size == 1:
        documents.check_packing()
    rows = pack(units, max_len=data.max_len) if data.packed else one_by_one(units)
    try:
        batches = [_batch(step, rows, scenario) for step in range(scenario.steps)]
    except StopIteration:
        raise documents.none_left() from None
    documents.warn_of_length()
    _check_variety(batches, documents, model)
    decoder = decoder_of(scenario, model)
    for _, sample in sorted(samples, key=lambda each: each[0]):
        if IMAGE in sample.columns:
            check_images(sample.tokens, sample.columns, decoder.image_config, sample.place)
    used = [document for batch in batches for document in batch.documents]
    _check_vocabulary(used, samples, model, decoder.vocab_size)
    return batches


def samples_in_turn(data: DataConfig, reads: Reads, *, seed: int | None = None) -> list[tuple[int, Sample]]:
    """Reads a data set: (number in the data set, sample), with the two of a pair in turn. ``seed``: shuffles it."""
    read: list[tuple[Sample, ...]]
    if reads == "preferences":
        read = [*read_preferences(data)]
    else:
        readers = {"labelled answers": read_labelled, "labelled steps": read_steps}
        read = [(sample,) for sample in readers.get(reads, read_samples)(data)]
    numbered = list(enumerate(read, start=1))
    if seed is not None:
        random.Random(seed).shuffle(numbered)
    samples = [(number, sample) for number, together in numbered for sample in together]
    if reads != "labelled answers":
        return samples
    others = _of_other_prompts([sample for _, sample in samples], data)
    pairs = zip(samples, others, strict=True)
    return [(number, one) for (number, own), other in pairs for one in (own, mismatched(own, other))]


def _of_other_prompts(samples: Sequence[Sample], data: DataConfig) -> list[Sample]:
    """Returns for each sample the next one with another prompt; the first one follows the last.

    Raises UsageError if all have the same prompt.
    """
    prompts = [(sample.messages[: sample.trained[0]], sample.tools) for sample in samples]
    following = [*range(1, len(samples)), 0]
    if all(prompt == prompts[0] for prompt in prompts):
        raise UsageError(
            f"all samples of {data.path} have the same prompt, and KTO compares an answer with the answer to another "
            f"prompt; give samples of two prompts or more"
        )
    for _ in range(2):  # the last samples find theirs at the start, so the second pass completes them
        for at in reversed(range(len(samples))):
            after = (at + 1) % len(samples)
            following[at] = after if prompts[at] != prompts[after] else following[after]
    return [samples[at] for at in following]


@dataclass(frozen=True, kw_only=True)
class Variety:
    """Counts the different documents, and the different lengths of documents in tokens, in batches."""

    documents: int
    lengths: int


def variety_of(batches: Sequence[Batch]) -> Variety:
    different = {document.tokens for batch in batches for document in batch.documents}
    return Variety(documents=len(different), lengths=len({len(tokens) for tokens in different}))


def _check_variety(batches: Sequence[Batch], documents: Documents, model: Path) -> None:
    """Raises UsageError for batches of a single document: ranks may exchange or double their shares unnoticed.

    Warns if all documents have one length, because a mean of means is then nearly the mean.
    """
    variety, config = variety_of(batches), documents.config
    if variety.documents == 1:
        left_out = config.too_long == "drop" and documents.advice()
        advice = left_out or "raise --max-samples (data.max_samples), or give data with more samples"
        raise UsageError(
            f"all rows are the same document of {config.path} with the tokenizer of {model}, so nothing would differ "
            f"if ranks exchanged their shares or left them out; {advice}"
        )
    if variety.lengths == 1:
        logger.warning(
            "%s: all %d documents that are trained on have the same length, so a mean of means is hardly "
            "distinguishable from the mean over tokens; raise --max-len, or give texts of several lengths",
            *(config.path, variety.documents),
        )


def _check_vocabulary(
    documents: Sequence[Document], samples: Sequence[tuple[int, Sample]], model: Path, size: int
) -> None:
    """Raises UsageError for tokens beyond the ``size`` of the vocabulary of the Hugging Face folder ``model``.

    samples: (number in the data set, sample), from which the documents are. Those that were tokenized before are named.
    """
    largest = max(max(document.tokens) for document in documents)
    if largest < size:
        return
    for _, sample in sorted(samples, key=lambda each: each[0]):
        if beyond := [token for token in sample.tokens if token >= size]:
            raise UsageError(
                f"{sample.place}: token {beyond[0]} is beyond the vocabulary of {size} of {model}; tokenize the data "
                f"with the tokenizer of this model, or give the model that they were tokenized for"
            )
    raise UsageError(
        f"the tokenizer in {model} gives token {largest}, and the vocabulary of its config.json has {size}; give "
        f"the folder the tokenizer of this model"
    )


def load_documents(
    config: DataConfig, tokenizer: Any, reads: Reads = "samples", *, vocabulary: int | None = None
) -> list[Document]:
    """Returns all documents of a data set, in its order, those of a pair in turn; see conformance.data.tokenizer.

    Raises UsageError if the tokenizer cannot encode a sample, if ``config.max_len`` is too short, if all documents are
    left out, and for tokens beyond the ``vocabulary``, if it is given.
    """
    samples = samples_in_turn(config, reads)
    documents = Documents(samples, config, tokenizer, likely=len(samples))
    units = Units(documents, documents_together(reads))
    kept = [document for index in range(len(units)) for document in units[index] or ()]
    documents.warn_of_length()
    if not kept:
        raise documents.none_left()
    if vocabulary is not None:
        _check_vocabulary(kept, samples, Path(tokenizer.name_or_path), vocabulary)
    return kept


Unit = tuple[Document, ...]  # documents that stay together: one, or the chosen and the rejected answer of a preference


class Units(Sequence[Unit | None]):
    """Takes ``size`` consecutive documents together. None stands for a unit of which a document is left out."""

    def __init__(self, documents: Documents, size: int) -> None:
        self.documents, self.size = documents, size

    def __len__(self) -> int:
        return len(self.documents) // self.size

    def __getitem__(self, index: Any) -> Any:  # a Sequence may be sliced; this one is not
        """Returns the unit, or None. Raises UsageError for one that does not fit into a packed row."""
        config = self.documents.config
        found = tuple(d for i in range(self.size) if (d := self.documents[self.size * index + i]) is not None)
        if len(found) < self.size:
            return None
        if self.size > 1 and config.packed and (length := length_of(found)) > config.max_len:
            if config.too_long == "drop":
                return None
            raise UsageError(
                f"two answers to a prompt of {config.path} have {length} tokens together, and packing puts them into "
                f"one row of --max-len {config.max_len} (data.max_len); raise it, use --too-long drop, or leave out "
                f"--packing-samples (data.packed=false)"
            )
        return found


def length_of(unit: Sequence[Document]) -> int:
    """Returns the number of tokens of some documents."""
    return sum(len(document.tokens) for document in unit)


def one_by_one(units: Sequence[Unit | None]) -> Iterator[tuple[Document, ...]]:
    """Yields rows of one document, in order, and again from the start; ends if every unit is left out."""
    is_left = True
    while is_left:
        is_left = False
        for index in range(len(units)):
            for document in units[index] or ():
                is_left = True
                yield (document,)


def pack(units: Sequence[Unit | None], *, max_len: int) -> Iterator[tuple[Document, ...]]:
    """Yields rows of units, taken in order while they fit, and reused from the start.

    None stands for a unit that is left out; if all are None, no row is yielded. If the second unit does not fit into
    the row of the first, the next one that fits is taken instead, of at most LOOK_AHEAD, so that a row of a single unit
    is rare.
    """
    queue = deque(range(len(units)))

    def take(room: int, *, ahead: int) -> Unit | None:
        """Moves the first unit that fits to the end of the queue, and returns it."""
        place = 0
        while place < min(ahead, len(queue)):
            unit = units[queue[place]]
            if unit is not None and length_of(unit) > room:
                place += 1
                continue
            index = queue[place]
            del queue[place]
            if unit is not None:
                queue.append(index)
                return unit
        return None

    while first := take(max_len, ahead=1):
        row, room = [first], max_len - length_of(first)
        while another := take(room, ahead=LOOK_AHEAD if len(row) == 1 else 1):
            row.append(another)
            room -= length_of(another)
        yield tuple(document for unit in row for document in unit)


def _batch(step: int, rows: Iterator[tuple[Document, ...]], scenario: Scenario) -> Batch:
    data = scenario.data
    masked_from = data.rows
    if scenario.objective.reads not in IN_PAIRS and step < 2:
        masked_from = -(-data.rows * 5 // 6) if step == 0 else -(-data.rows * 2 // 3)
    chosen = [next(rows) for _ in range(data.rows)]
    for i in range(masked_from, data.rows):
        chosen[i] = tuple(replace(d, targets=(False,) * len(d.tokens)) for d in chosen[i])
    return Batch(step, data.max_len, tuple(Row(i, documents) for i, documents in enumerate(chosen)))
