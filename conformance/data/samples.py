"""Reads the records of users' data sets: JSON lines, JSON arrays, Parquet files, and datasets saved on disk.

Text files may be compressed by gzip or zstd. An unusable data set ends the run before it begins, with a message that
names the first wrong sample.

Masks of TRL, verl, OpenRLHF and chat templates say which tokens are trained on. Any column that is called a mask
counts, and all of them together: ``completion_mask``, ``response_mask``, ``loss_mask``, ``assistant_masks``,
``tool_mask``. A mask may have gaps, such as the answers of tools inside a response.
"""

import contextlib
import gzip
import io
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

from conformance.core.errors import UsageError, one_line, shown
from conformance.core.host import FIXTURES
from conformance.core.io import MIB, check_file, not_utf8, parse_json, read_json
from conformance.spec.observables import Reads

LARGEST = 512 * MIB  # bytes of a file that is read as a whole
LONGEST_TEXT = 2**20  # characters; longer texts are mistakes
LONGEST_LINE = 8 * MIB  # bytes; JSON may need six bytes for one character

ROLLOUT_COLUMNS = frozenset({"prompt_ids", "completion_ids"})
PREFERENCE_COLUMNS = ("chosen", "rejected")
LABELLED_COLUMNS = frozenset({"prompt", "completion", "label"})
STEPWISE_COLUMNS = ("prompt", "completions", "labels")

_READ = "; pandas converts it: pandas.read_csv(FILE{}).to_json('data.jsonl', orient='records', lines=True)"
_CONVERTED = {".csv": _READ.format(""), ".tsv": _READ.format(r", sep='\t'")}

Record = dict[str, Any]
Place = str  # where a record was found, for messages: "FILE, line 3"


def read_dataset(path: Path, *, most: int | None = None, split: str | None = None) -> list[tuple[Place, Record]]:
    """Reads the records of a data set, the first ``most`` of them or all, as (place, record).

    split: of a dataset that was saved with several. Raises UsageError, which names the file, if it cannot be read.
    """
    if split is not None and not ((path / "dataset_dict.json").is_file() or _is_cached(path)):
        raise UsageError(f"{path} has no splits; leave out --split (data.split)")
    kind = path.with_suffix("").suffix if path.suffix in _OPENED else path.suffix
    if path.is_dir():
        records = _numbered(path, _read_saved_dataset(path, split))[:most]
    elif kind in (".jsonl", ".json"):
        records = list(islice(_read_array(path) if _is_array(path) else _read_lines(path), most))
    elif path.suffix == ".parquet":
        records = _numbered(path, _read_parquet(path))[:most]
    else:
        how = _CONVERTED.get(kind, "")
        raise UsageError(
            f"{path}: cannot read {path.suffix or 'a file without a suffix'}; give a .jsonl, .json or .parquet file "
            f"(.jsonl.gz, .json.gz, .jsonl.zst), or the folder that datasets' save_to_disk wrote{how}"
        )
    if not records:
        raise UsageError(f"{path} is empty; it needs at least one sample")
    return records


def reads_of(path: Path, *, split: str | None = None) -> Reads:
    """Returns what a data set holds, by the columns of its first record.

    Raises UsageError, which names the file, if it cannot be read.
    """
    _, first = read_dataset(path, most=1, split=split)[0]
    if first.keys() & ROLLOUT_COLUMNS:
        return "rollouts"
    if first.keys() >= {*PREFERENCE_COLUMNS}:
        return "preferences"
    if first.keys() >= {*STEPWISE_COLUMNS}:
        return "labelled steps"
    return "labelled answers" if first.keys() >= LABELLED_COLUMNS else "samples"


def _numbered(path: Path, records: Iterable[Any]) -> list[tuple[Place, Any]]:
    return [(f"{path}, sample {number}", record) for number, record in enumerate(records, start=1)]


def is_builtin(path: Path) -> bool:
    """Returns whether a data set belongs to the suite; what is unusual in it is meant."""
    return path.is_relative_to(FIXTURES)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Opens a text file, or a compressed one, for reading. Raises UsageError for damaged compression."""
    check_file(path)
    try:
        with _OPENED.get(path.suffix, Path.open)(path, "rb") as file:
            yield file
    except (EOFError, OSError, zlib.error) as error:
        if path.suffix not in _OPENED:
            raise
        raise UsageError(f"{path} cannot be decompressed: {one_line(error)}; copy it again") from None


def _open_zstd(path: Path, mode: str) -> Any:
    try:
        import pyarrow  # an optional package
    except ImportError:
        raise UsageError(f"reading {path} needs pyarrow; run: pip install 'backend-parity[data]'") from None
    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


_OPENED: dict[str, Callable[[Path, str], Any]] = {".gz": gzip.open, ".zst": _open_zstd}


def _read_lines(path: Path) -> Iterator[tuple[Place, Record]]:
    """Yields records of lines that end at \\n alone: JSON allows U+2028 inside texts. A byte order mark is left out."""
    with _opened(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
            place = f"{path}, line {number}"
            if len(line) > LONGEST_LINE:
                raise UsageError(
                    f"{place} has more than {LONGEST_LINE // MIB} MiB; give every sample a line of its own"
                )
            if (text := _decoded(line, place, is_first=number == 1)).strip():
                yield place, _object(parse_json(text, place), place)


def _is_array(path: Path) -> bool:
    with _opened(path) as file:
        return file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _read_array(path: Path) -> Iterator[tuple[Place, Record]]:
    with _opened(path) as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise UsageError(f"{path} has more than {LARGEST // MIB} MiB; write one sample a line, as .jsonl")
    text = _decoded(content, str(path), is_first=True)
    for place, record in _numbered(path, parse_json(text, f"{path}, an array of samples,")):
        yield place, _object(record, place)


def _decoded(content: bytes, place: Place, *, is_first: bool) -> str:
    try:
        return content.decode("utf-8-sig" if is_first else "utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{place}: {not_utf8(error)}") from None


def _object(record: Any, place: Place) -> Record:
    if not isinstance(record, dict):
        raise UsageError(f'{place}: expected an object such as {{"question": ...}}, got {shown(record)}')
    return record


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    check_file(path)
    try:
        from pyarrow import parquet  # an optional package
    except ImportError:
        raise UsageError(f"reading {path} needs pyarrow; run: pip install 'backend-parity[data]'") from None
    try:
        records: list[dict[str, Any]] = parquet.ParquetFile(path).read().to_pylist()
    except Exception as error:  # pyarrow raises errors of many types for a broken file
        raise UsageError(f"{path} is not a readable Parquet file: {one_line(error)}") from None
    return records


def _is_cached(folder: Path) -> bool:
    """Tells whether ``datasets`` keeps a data set of the hub in this folder of its cache."""
    return (folder / "dataset_info.json").is_file() and not (folder / "state.json").exists()


def _cached(folder: Path) -> Any:
    """Returns all splits of such a folder, whose files are called NAME-SPLIT[-K-of-N].arrow."""
    from datasets import Dataset, DatasetDict, concatenate_datasets

    found = {}
    for split in read_json(folder / "dataset_info.json").get("splits") or ():
        files = [file for end in ("", "-*-of-*") for file in sorted(folder.glob(f"*-{split}{end}.arrow"))]
        parts = [Dataset.from_file(str(file)) for file in files if not file.name.startswith("cache-")]
        found[split] = concatenate_datasets(parts)
    return DatasetDict(found)


def _read_saved_dataset(path: Path, split: str | None) -> list[dict[str, Any]]:
    try:
        from datasets import Dataset, load_from_disk  # an optional package, slow to import
    except ImportError:
        raise UsageError(f"reading the folder {path} needs datasets; run: pip install 'backend-parity[data]'") from None
    for file in path.rglob("*"):
        if not file.is_dir():
            check_file(file)
    try:
        dataset = _cached(path) if _is_cached(path) else load_from_disk(str(path))
        if split is not None and not isinstance(dataset, Dataset):
            if split not in dataset:
                raise UsageError(f"{path} has no split {split!r}; its splits are {', '.join(dataset)}")
            dataset = dataset[split]
        records = dataset.to_list() if isinstance(dataset, Dataset) else []
    except UsageError:
        raise
    except FileNotFoundError:
        raise UsageError(f"{path} is a folder, but not one that datasets' save_to_disk wrote") from None
    except Exception as error:  # datasets and pyarrow raise errors of many types for broken files
        raise UsageError(f"{path} is not a readable dataset: {one_line(error)}") from None
    if not isinstance(dataset, Dataset):
        raise UsageError(f"{path} holds several splits; add --split (data.split): {', '.join(dataset)}")
    return list(records)


_MASK = re.compile(r"(?<!^sampling_)masks?$", re.IGNORECASE)  # the sampler's is one of the vocabulary
_PADDING = ("attention_mask", "prompt_mask")  # not of what is trained on, but of what is there
IGNORED = -100  # in ``labels``, for tokens that are not trained on, as in torch's cross entropy


def masks_of(record: Mapping[str, Any]) -> list[str]:
    """Returns the names of the columns that hold masks. None stands for no mask."""
    return [name for name, value in record.items() if _MASK.search(name) and value is not None]


def trained_tokens(record: Mapping[str, Any], place: Place, *, prompt: int, response: int) -> tuple[bool, ...]:
    """Returns whether each of the ``response`` tokens is trained on; all are, without a mask.

    A mask has a number for each token of the response, or of the ``prompt`` and the response. Raises UsageError for any
    other mask, and for padding inside the record.
    """
    trained = [True] * response
    for name in masks_of(record):
        mask = record[name]
        if not isinstance(mask, list) or any(value not in (0, 1) for value in mask):
            raise UsageError(f"{place}: {name!r} must be a list of 0 and 1, got {shown(mask)}")
        if name in _PADDING:
            if not all(mask):
                raise UsageError(f"{place}: {name!r} marks padding; leave the padded tokens out of the record")
            continue
        if len(mask) not in (response, prompt + response):
            raise UsageError(
                f"{place}: {name!r} has {len(mask)} numbers, but the response has {response} tokens and the prompt "
                f"{prompt}; give one number for each token of the response, or of both"
            )
        last = mask[len(mask) - response :]
        trained = [before and bool(value) for before, value in zip(trained, last, strict=True)]
    return tuple(trained)


def check_unmasked(record: Mapping[str, Any], place: Place) -> None:
    """Raises UsageError for a mask that takes tokens of a text away: it belongs to the tokens of another program."""
    for name in masks_of(record):
        mask = record[name]
        if not isinstance(mask, list) or not all(value in (1, True) for value in mask):
            raise UsageError(
                f"{place}: {name!r} masks tokens, but the texts are tokenized here; give 'input_ids' beside it, or "
                f"remove the column to train on the answers as a whole"
            )


def has_targets(record: Mapping[str, Any]) -> bool:
    """Tells whether labels or a mask say which tokens of a tokenized sample are trained on."""
    return record.get("labels") is not None or any(name not in _PADDING for name in masks_of(record))


def labelled_tokens(record: Mapping[str, Any], place: Place, tokens: Sequence[int]) -> tuple[bool, ...]:
    """Returns whether each of the ``tokens`` of a tokenized sample is trained on, by its labels and masks.

    Raises UsageError for a sample without both, and for labels that are not its tokens.
    """
    labels = record.get("labels")
    if not has_targets(record):
        raise UsageError(
            f"{place}: 'input_ids' without 'labels' or a mask do not say what is trained on; add 'labels', with "
            f"{IGNORED} for the other tokens"
        )
    trained = trained_tokens(record, place, prompt=0, response=len(tokens))
    if labels is None:
        return trained
    if not isinstance(labels, list) or len(labels) != len(tokens):
        raise UsageError(f"{place}: 'labels' must be a list of {len(tokens)} tokens or {IGNORED}, got {shown(labels)}")
    for number, (label, token) in enumerate(zip(labels, tokens, strict=True), start=1):
        if label not in (token, IGNORED):
            raise UsageError(
                f"{place}: entry {number} of 'labels' is {shown(label)}, but must be {token} as in 'input_ids', or "
                f"{IGNORED}; labels are not shifted"
            )
    return tuple(one and label != IGNORED for one, label in zip(trained, labels, strict=True))


def text_of(value: Any, key: str, place: Place) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{place}: {key!r} must be a non-empty text, got {shown(value)}; correct or remove the sample")
    return check_text(value, key, place)


def check_text(text: Any, key: str, place: Place) -> str:
    if not isinstance(text, str):
        raise UsageError(f"{place}: {key!r} must be a text, or a list of parts of the type 'text', got {shown(text)}")
    if len(text) > LONGEST_TEXT:
        raise UsageError(f"{place}: {key!r} has {len(text)} characters, but at most {LONGEST_TEXT} are allowed; cut it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise UsageError(
            f"{place}: {key!r} holds {half}, half of a surrogate pair; correct or remove the sample"
        ) from None
    return text


def number_of(record: Mapping[str, Any], key: str, place: Place) -> float:
    if not has_column(record, key):
        raise UsageError(f"{place}: no column {key!r}, which other samples have; give all samples one, or none")
    number = value_of(record, key, place)
    if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) <= sys.float_info.max:
        raise UsageError(f"{place}: {key!r} must be a finite number, got {shown(number)}; correct or remove the sample")
    return float(number)


def has_column(record: Mapping[str, Any], key: str) -> bool:
    """Tells whether a record has a column; ``a.b`` is the entry ``b`` of the column ``a``."""
    name, _, rest = key.partition(".")
    return name in record and (not rest or (isinstance(record[name], dict) and has_column(record[name], rest)))


def value_of(record: Mapping[str, Any], key: str, place: Place) -> Any:
    if not has_column(record, key):
        raise UsageError(f"{place}: no column {key!r}, which the first sample has; found {names_of(record)}")
    name, _, rest = key.partition(".")
    value = record[name]
    return value_of(value, rest, place) if rest else value


def names_of(record: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, record)) or "none"
