"""Reads pairs of question and answer from users' files.

An unusable data set ends the run before it begins, with a message that names the first wrong sample.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from conformance.core.errors import UsageError, one_line, shown
from conformance.core.host import resolve
from conformance.core.io import MIB, check_file, not_utf8, parse_json
from conformance.spec.scenario import DataConfig

LONGEST_TEXT = MIB  # characters; longer texts are mistakes
LONGEST_LINE = 8 * MIB  # bytes; JSON may need six bytes for one character

Place = str  # where a record was found, for messages: "FILE, line 3"


def read_samples(config: DataConfig) -> list[tuple[str, str]]:
    """Reads (input, output) texts from a JSONL file, a Parquet file, or a Hugging Face dataset on disk.

    At most ``config.max_samples`` are read. Raises UsageError, which names the file and the line or the number of the
    sample, for a wrong sample.
    """
    return [
        (_text(record, config.input_key, place), _text(record, config.output_key, place))
        for place, record in read_dataset(resolve(config.path), most=config.max_samples)
    ]


def read_dataset(path: Path, *, most: int | None = None) -> list[tuple[Place, dict[str, Any]]]:
    """Reads the records of a data set, the first ``most`` of them or all, as (place, record).

    Raises UsageError, which names the file, if it cannot be read.
    """
    if path.is_dir():
        records = _numbered(path, _read_saved_dataset(path))[:most]
    elif path.suffix == ".jsonl":
        records = list(islice(_read_jsonl(path), most))
    elif path.suffix == ".parquet":
        records = _numbered(path, _read_parquet(path))[:most]
    else:
        raise UsageError(
            f"{path}: cannot read {path.suffix or 'a file without a suffix'}; give a .jsonl or .parquet file, or the "
            f"folder that datasets' save_to_disk wrote"
        )
    if not records:
        raise UsageError(f"{path} is empty; it needs at least one sample")
    return records


def _text(record: dict[str, Any], key: str, place: Place) -> str:
    if key not in record:
        if record.keys() >= {"prompt_ids", "completion_ids"}:
            raise UsageError(
                f"{place}: this is a rollout, but the objective reads pairs of texts; give --data (data.path) a file "
                f"of such pairs, or use a scenario whose objective is 'grpo' or 'ppo'"
            )
        raise UsageError(
            f"{place}: no column {key!r}; found {', '.join(map(repr, record)) or 'none'}; "
            f"name the columns with --input-key and --output-key (data.input_key, data.output_key)"
        )
    text = record[key]
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"{place}: {key!r} must be a non-empty text, got {shown(text)}; correct or remove the sample")
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


def _numbered(path: Path, records: Iterable[dict[str, Any]]) -> list[tuple[Place, dict[str, Any]]]:
    return [(f"{path}, sample {number}", record) for number, record in enumerate(records, start=1)]


def _read_jsonl(path: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yields records of lines that end at \\n alone: JSON allows U+2028 inside texts. A byte order mark is left out."""
    check_file(path)
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
            place = f"{path}, line {number}"
            if len(line) > LONGEST_LINE:
                raise UsageError(
                    f"{place} has more than {LONGEST_LINE // MIB} MiB; give every sample a line of its own"
                )
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UsageError(f"{place}: {not_utf8(error)}") from None
            if not text.strip():
                continue
            record = parse_json(text, place)
            if not isinstance(record, dict):
                raise UsageError(f'{place}: expected an object such as {{"question": ...}}, got {shown(record)}')
            yield place, record


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


def _read_saved_dataset(path: Path) -> list[dict[str, Any]]:
    try:
        from datasets import Dataset, load_from_disk  # an optional package, slow to import
    except ImportError:
        raise UsageError(f"reading the folder {path} needs datasets; run: pip install 'backend-parity[data]'") from None
    for file in path.rglob("*"):
        if not file.is_dir():
            check_file(file)
    try:
        dataset = load_from_disk(str(path))
        records = dataset.to_list() if isinstance(dataset, Dataset) else []
    except FileNotFoundError:
        raise UsageError(f"{path} is a folder, but not one that datasets' save_to_disk wrote") from None
    except Exception as error:  # datasets and pyarrow raise errors of many types for broken files
        raise UsageError(f"{path} is not a readable dataset: {one_line(error)}") from None
    if not isinstance(dataset, Dataset):
        raise UsageError(f"{path} holds several splits; give one of them: {', '.join(str(path / s) for s in dataset)}")
    return list(records)
