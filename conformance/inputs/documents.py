"""Data: from questions and answers in a file to the frozen batches of every optimizer step.

Serves claim 1: batches are made so that the usual bugs cannot cancel out. Documents keep their ragged lengths, and some
rows carry no target token at all, whatever the data set:

* step 0: the last sixth of the rows (of 24 rows: 20..23), so that the last of 8 ranks has nothing to learn, nor has a
  micro-batch of dp 2 or 4 with accumulation 3;
* step 1: the last third (of 24 rows: 16..23), so that a micro-batch of a single rank with accumulation 3 has nothing.
"""

import json
import random
from collections import deque
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from statistics import median_high
from typing import Any

import pandas as pd
from transformers import AutoTokenizer

from conformance.batch import Batch, Document, Row
from conformance.paths import resolve
from conformance.scenario import DataConfig, Scenario
from conformance.validation import UsageError


def build_batches(scenario: Scenario, model: Path) -> list[Batch]:
    """``scenario.steps`` batches, tokenized for the Hugging Face folder ``model``.

    ``scenario.seed`` shuffles the documents once; they come round again when they run out. Unpacked, a row is one
    document. Packed, it holds two documents or more, taken in order for as long as they fit into ``max_len``, or a long
    one by itself.
    Target tokens are taken from the rows that the module's docstring names. Raises UsageError where the data, the
    tokenizer or ``max_len`` do not allow this.
    """
    data = scenario.data
    documents = load_documents(data, load_tokenizer(model))
    random.Random(scenario.seed).shuffle(documents)
    rows = pack(documents, max_len=data.max_len) if data.packed else ((document,) for document in cycle(documents))
    return [_batch(step, rows, data) for step in range(scenario.steps)]


def load_tokenizer(model: Path) -> Any:
    """The tokenizer of a Hugging Face folder, the folder's own code included, without looking at the network."""
    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=True, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{model} has no tokenizer that transformers can load ({error}); copy the tokenizer files of the model "
            f"into the folder (tokenizer.json, tokenizer_config.json)"
        ) from error


def load_documents(config: DataConfig, tokenizer: Any) -> list[Document]:
    """All samples of a data set as documents of at most ``max_len`` tokens; longer ones are cut at the end.

    The input is the user's turn and the output the assistant's turn of the tokenizer's chat template; the tokens that
    the output adds are targets, with the end token that the template writes and without white space behind it. A
    tokenizer without a template: input, output and end-of-sequence token, one after the other.
    """
    encoded = [_encode(*sample, tokenizer) for sample in read_samples(config)]
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


def read_samples(config: DataConfig) -> list[tuple[str, str]]:
    """(input, output) texts of a JSONL or Parquet file or of a Hugging Face dataset saved on disk."""
    path = resolve(config.path)
    if path.is_dir():
        records = _read_dataset(path)
    elif path.suffix == ".jsonl":
        records = _read_jsonl(path)
    elif path.suffix == ".parquet":
        records = _read_parquet(path)
    else:
        raise UsageError(
            f"{path}: cannot read {path.suffix or 'a file without a suffix'}; give a .jsonl or .parquet file, or the "
            f"folder that datasets' save_to_disk wrote"
        )
    if not records:
        raise UsageError(f"{path} is empty; it needs at least one sample")
    return [
        (_text(record, config.input_key, place), _text(record, config.output_key, place))
        for record, place in ((record, f"{path}, sample {i}") for i, record in enumerate(records, start=1))
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


def _encode(question: str, answer: str, tokenizer: Any) -> tuple[tuple[int, ...], int]:
    """Tokens of a sample, and how many of them are the prompt."""
    end: list[int] = []
    if tokenizer.chat_template is not None:
        user = {"role": "user", "content": question}
        assistant = {"role": "assistant", "content": answer}
        prompt = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template([user, assistant], tokenize=False).rstrip()
    else:
        if tokenizer.eos_token_id is None:
            raise UsageError(
                "the tokenizer has neither a chat template nor an end-of-sequence token, so an answer would have no "
                "end; set one of them in tokenizer_config.json"
            )
        prompt, whole, end = question, question + answer, [tokenizer.eos_token_id]
    tokens = [*tokenizer.encode(whole, add_special_tokens=False), *end]
    # Compared as tokens, not as text: a tokenizer may join the end of the prompt and the start of the answer.
    size = 0
    for ours, theirs in zip(tokenizer.encode(prompt, add_special_tokens=False), tokens, strict=False):
        if ours != theirs:
            break
        size += 1
    if not size:
        raise UsageError(
            f"nothing comes before the first token of the answer {answer[:40]!r}, so there is nothing to predict it "
            f"from; give every sample an input, or the tokenizer a chat template that keeps the user's turn in front"
        )
    return tuple(tokens), size


def _text(record: dict[str, Any], key: str, place: str) -> str:
    if key not in record:
        raise UsageError(
            f"{place}: no column {key!r}; found {', '.join(map(repr, record)) or 'none'}; "
            f"set data.input_key and data.output_key"
        )
    text = record[key]
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"{place}: {key!r} must be a text that is not empty, got {text!r}; mend or remove the sample")
    return text


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line) if line.strip() else None
        except json.JSONDecodeError as error:
            raise UsageError(f"{path}, line {number} is not JSON: {error}") from None
        if record is None:
            continue
        if not isinstance(record, dict):
            raise UsageError(
                f'{path}, line {number}: expected an object such as {{"question": ...}}, got {line[:40]!r}'
            )
        records.append(record)
    return records


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    try:
        frame = pd.read_parquet(path)
    except ImportError:
        raise UsageError(f"reading {path} needs pyarrow; run: pip install 'backend-parity[data]'") from None
    return [{str(key): value for key, value in record.items()} for record in frame.to_dict("records")]


def _read_dataset(path: Path) -> list[dict[str, Any]]:
    try:
        from datasets import Dataset, load_from_disk  # an optional package, slow to import
    except ImportError:
        raise UsageError(f"reading the folder {path} needs datasets; run: pip install 'backend-parity[data]'") from None
    try:
        dataset = load_from_disk(str(path))
    except FileNotFoundError:
        raise UsageError(f"{path} is a folder, but not one that datasets' save_to_disk wrote") from None
    if not isinstance(dataset, Dataset):
        raise UsageError(f"{path} holds several splits; give one of them: {', '.join(str(path / s) for s in dataset)}")
    records: list[dict[str, Any]] = dataset.to_list()
    return records
