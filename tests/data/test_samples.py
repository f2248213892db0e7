"""Data sets, tokenizers and chat templates that cannot be used are one line with the place, and never wait or loop."""

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data.forms import pair, read_samples
from conformance.data.inputs import build_batches, load_documents
from conformance.data.samples import LONGEST_LINE, LONGEST_TEXT
from conformance.data.tokenizer import computing_at_most, load_tokenizer
from conformance.spec.scenario import DataConfig, parse_scenario

LLAMA = FIXTURES / "models" / "llama"
GOOD = b'{"question": "2 plus 3?", "answer": "5."}\n'


def one_line(error: pytest.ExceptionInfo[UsageError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": "caf\xe9"}', r"line 3: not UTF-8 \(.*byte 0xe9\)"),
        (b'{"question": "a", "answer": "\\ud800"}', r"line 3: 'answer' holds U\+D800, half of a surrogate pair"),
        (b"[" * 100_000, r"line 3 cannot be read: its JSON is nested too deeply"),
        (b'{"question": ' + b"9" * 5000 + b"}", r"line 3 is not JSON: Exceeds the limit"),
        (b'{"question": "' + b"x" * (LONGEST_TEXT + 1) + b'", "answer": "b"}', r"line 3: 'question' has 1048577 char"),
        (b'"' + b"x" * LONGEST_LINE, r"line 3 has more than 8 MiB; give every sample a line of its own"),
        (b'{"question": "a", "answer": {}}', r"line 3: 'answer' must be a non-empty text"),
        (b"null", r"line 3: expected an object"),
    ],
    ids=lambda value: str(value[:24]),
)
def test_a_line_that_cannot_be_used_is_named_by_its_number(line: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD)
    with pytest.raises(UsageError, match=rf"mine.jsonl, {message}") as error:
        read_samples(DataConfig(path=str(file)))
    one_line(error)


def test_separators_of_lines_in_a_text_separate_no_samples(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"question": "a\u2028b\x85", "answer": "c\u2029"}, ensure_ascii=False) + "\n")
    assert read_samples(DataConfig(path=str(file))) == [pair("a\u2028b\x85", "c\u2029")]


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.parquet"])
def test_a_pipe_is_no_data_set(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(UsageError, match=rf"{name} is a pipe"):
        read_samples(DataConfig(path=str(tmp_path / name)))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\0" * 100 + b"PAR1", b"no parquet at all"])
def test_a_broken_parquet_file_is_named(content: bytes, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "mine.parquet").write_bytes(content)
    with pytest.raises(UsageError, match=r"mine.parquet is not a readable Parquet file: ") as error:
        read_samples(DataConfig(path=str(tmp_path / "mine.parquet")))
    one_line(error)


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b"[" * 100_000])
def test_a_broken_dataset_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "mine"
    datasets.Dataset.from_list([json.loads(GOOD)]).save_to_disk(str(folder))
    (folder / name).write_bytes(content)
    with contextlib.suppress(UsageError):  # some of it datasets can do without
        assert read_samples(DataConfig(path=str(folder))) == [pair("2 plus 3?", "5.")]
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(UsageError, match=rf"{name} is a pipe"):
        read_samples(DataConfig(path=str(folder)))


# --- tokenizers and templates ----------------------------------------------------------------------------------------


def with_template(template: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(LLAMA)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "Expected an expression"),
        ("{{ messages[5]['content'] }}", "no element 5"),
        ("{{ raise_exception('only users speak') }}", "only users speak"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
        ("{{ 'a' * 10 ** 7 }}", "the chat template renders 10000000 characters"),
        ("{{ messages[0]['content'] }}", "the chat template leaves out message 2, of the role 'assistant', '5.'"),
        ("", "the chat template leaves out message 1, of the role 'user'"),
        ("{{ messages[-1]['content'] }}{{ messages[0]['content'] }}", "nothing comes before the first token of the"),
    ],
)
def test_a_template_that_does_not_serve_is_told_with_the_sample(template: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_bytes(GOOD)
    with pytest.raises(
        UsageError, match=rf"the tokenizer in .*llama cannot encode .*mine.jsonl, line 1: .*{message}"
    ) as error:
        load_documents(DataConfig(path=str(tmp_path / "mine.jsonl")), with_template(template))
    one_line(error)


def test_a_template_that_does_not_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.jsonl").write_bytes(GOOD)
    monkeypatch.setattr("conformance.data.tokenizer.SAMPLE_LIMIT_S", 0.2)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    began = time.process_time()
    with pytest.raises(UsageError, match=r"mine.jsonl, line 1: it takes more than 0.2 s"):
        load_documents(DataConfig(path=str(tmp_path / "mine.jsonl")), with_template(loop))
    assert time.process_time() - began < 5


def test_the_limit_of_time_is_one_of_computing_and_leaves_nothing_behind() -> None:
    before = signal.getsignal(signal.SIGVTALRM)
    with computing_at_most(0.05):
        time.sleep(0.1)
    assert signal.getsignal(signal.SIGVTALRM) is before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "has no tokenizer that transformers can load"),
        ("tokenizer.json", "[" * 100_000, "has no tokenizer that transformers can load"),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "X"}}', "has no tokenizer that transformers can load"),
        ("tokenizer_config.json", "[]", r"tokenizer_config.json must hold a JSON object"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json cannot be read: its JSON is"),
        ("tokenizer_config.json", '{"eos_token": 5}', "has no tokenizer that transformers can load"),
        ("config.json", '{"model_type": "llama", "hidden_size": "x"}', "config.json cannot be used by transformers"),
    ],
)
def test_a_broken_tokenizer_is_named(name: str, content: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(LLAMA, folder)
    (folder / name).write_text(content)
    with pytest.raises(UsageError, match=rf"{folder}.*{message}") as error:
        load_tokenizer(folder)
    one_line(error)


def test_tokens_of_another_vocabulary_are_named_by_line(tmp_path: Path) -> None:
    """Of data that were tokenized before, which no tokenizer of the model's folder is to blame for."""
    size = json.loads((LLAMA / "config.json").read_text())["vocab_size"]
    file = tmp_path / "tokens.jsonl"
    rows = [{"input_ids": (ids := [1, 2 + n % 9, 4, size + 5 if n == 6 else 3]), "labels": ids} for n in range(24)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = rf"^{file}, line 7: token {size + 5} is beyond the vocabulary of {size} of {LLAMA}; tokenize the data"
    values = {"name": "any", "model": str(LLAMA), "precision": "fp32", "optimizer": {"name": "sgd", "lr": 0.1}}
    with pytest.raises(UsageError, match=message):
        build_batches(parse_scenario(values | {"data": {"path": str(file)}}), LLAMA)
    with pytest.raises(UsageError, match=message):
        load_documents(DataConfig(path=str(file)), load_tokenizer(LLAMA), vocabulary=size)


def test_a_tokenizer_of_another_model_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(LLAMA, folder)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 100, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    values = {"name": "any", "model": str(folder), "precision": "fp32", "optimizer": {"name": "sgd", "lr": 0.1}}
    with pytest.raises(UsageError, match=r"the tokenizer in .*mine gives token \d+, and the vocabulary .* has 100"):
        build_batches(parse_scenario(values), folder)
