"""Data as users have it, GSM8K above all: documents of any length, in files that other programs wrote."""

import json
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from gsm8k import write_problems
from transformers import AutoTokenizer

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data import tokenizer as lazy
from conformance.data.forms import Sample, pair, read_samples
from conformance.data.inputs import build_batches, load_documents
from conformance.data.rollouts import build_rollouts
from conformance.matrix.options import Selection
from conformance.matrix.profile import select_cells
from conformance.spec.batch import Batch
from conformance.spec.scenario import DataConfig, OptimizerConfig, Scenario

MODEL = FIXTURES / "models" / "qwen3"
Build = Callable[..., list[Batch]]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Builds the batches of two steps, of 40 problems in GSM8K's format unless ``texts`` are given."""

    def build(texts: Sequence[tuple[str, str]] = (), *, rows: int = 6, **data: Any) -> list[Batch]:
        file = tmp_path / "train.jsonl"
        if texts:
            file.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in texts))
        else:
            write_problems(file, count=40, seed=0)
        scenario = Scenario(
            name="any",
            model=str(MODEL),
            precision="fp32",
            steps=2,
            optimizer=OptimizerConfig(name="sgd", lr=0.1),
            data=DataConfig(path=str(file), rows=rows, **data),
        )
        return build_batches(scenario, MODEL)

    return build


def lengths(batches: list[Batch]) -> set[int]:
    return {len(document.tokens) for batch in batches for document in batch.documents}


def demanded(error: UsageError) -> int:
    return int(str(error).partition("use --max-len ")[2].split()[0].rstrip(","))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("too_long", ["truncate", "error"])
@pytest.mark.parametrize("ragged", [False, True])
def test_the_first_refusal_names_a_length_that_serves(
    build: Build, packed: bool, too_long: Literal["truncate", "error"], ragged: bool
) -> None:
    """Also where most documents are cut, so that their lengths as cut say little, and the longest prompt comes last."""
    texts = [("how many " * (5 + 3 * n), f"{n} of them" * 9) for n in range(30)] if ragged else ()
    with pytest.raises(UsageError, match=r"use --max-len [0-9]+ or more") as refused:
        build(texts, rows=24, packed=packed, max_len=20, too_long=too_long)
    needed = demanded(refused.value)
    assert build(texts, rows=24, packed=packed, max_len=needed, too_long=too_long)
    with pytest.raises(UsageError):  # rows of both steps take every document
        build(texts, rows=24, packed=packed, max_len=needed - 1, too_long=too_long)


@pytest.mark.parametrize("packed", [False, True])
def test_documents_that_are_too_long_are_left_out_or_cut_and_counted(
    build: Build, packed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [("short?", "yes"), ("less short?", "yes yes"), ("long?", "no " * 60)] * 2
    whole = lengths(build(texts, max_len=200))
    short = whole - {max(whole)}
    assert max(short) < 40 < max(whole)
    assert caplog.records == []
    assert lengths(build(texts, max_len=40, too_long="drop", packed=packed)) == short
    assert lengths(build(texts, max_len=40, packed=False)) == {*short, 40}
    said = [record.getMessage() for record in caplog.records]
    assert "2 of the 6 documents that were tokenized have more than 40 tokens and were left out" in said[0]
    assert said[1].endswith("were cut at the end")


@pytest.mark.parametrize("packed", [False, True])
def test_data_of_which_nothing_is_left_is_refused(build: Build, packed: bool) -> None:
    with pytest.raises(
        UsageError, match=r"all 40 documents of .* more than --max-len 4 tokens .* keeps 0 of 40"
    ) as why:
        build(max_len=4, too_long="drop", packed=packed)
    assert build(max_len=demanded(why.value), too_long="drop", packed=packed)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("max_len", [6, 16, 30, 60])
@pytest.mark.parametrize("too_long", ["error", "drop", "truncate"])
@pytest.mark.parametrize("kind", ["alike", "ragged", "long prompts"])
def test_every_advice_on_long_documents_serves(
    build: Build, packed: bool, max_len: int, too_long: str, kind: str
) -> None:
    """Followed one by one: none leads to another refusal."""
    texts = {
        "alike": [(f"{n} and {n}?", f"yes {n}") for n in range(10, 40)],
        "ragged": [("how " * (n % 9), f"{n} of them " * (1 + n % 7)) for n in range(30)],
        "long prompts": [(f"{n} " * 70, f"yes {n}") for n in range(30)],
    }[kind]
    given: dict[str, Any] = {"max_len": max_len, "too_long": too_long, "packed": packed, "rows": 24}
    try:
        build(texts, **given)
    except UsageError as refused:
        lengths, others = (re.findall(rf"--{name} (\w+)", str(refused)) for name in ("max-len", "too-long"))
        for length in lengths[1:]:
            build(texts, **given | {"max_len": int(length)})
        for other in others:
            build(texts, **given | {"too_long": other})


def spread() -> list[tuple[str, str]]:
    """Short problems, longer ones, and one with a prompt that is longer than all of them together."""
    return [(f"{n}?", "yes " * (2 + n % 7)) for n in range(20)] + [("how many " * 700, "ten")]


def test_advice_on_long_documents_names_kept_share(build: Build) -> None:
    with pytest.raises(UsageError, match=r"packs no second document .* keeps [0-9]+ of 21; use --max-len") as refused:
        build(spread(), packed=True, max_len=26, too_long="drop")
    needed = demanded(refused.value)
    kept, everything = re.findall(r"--max-len ([0-9]+), which keeps", str(refused.value))
    assert needed == int(kept) < 100
    assert int(everything) > 1000
    assert build(spread(), packed=True, max_len=needed, too_long="drop")
    for too_long in ("drop", "truncate"):
        unpacked = "or a scenario with data.packed=false, such as sft-padded, without --packing-samples"
        with pytest.raises(
            UsageError, match=rf"a row of {needed - 1} tokens .* packs no second document .*, {unpacked}"
        ):
            build(spread(), packed=True, max_len=needed - 1, too_long=too_long)


def test_documents_that_are_left_out_do_not_decide_how_the_others_are_packed(build: Build) -> None:
    texts = [("how many " * 90, "ten")] * 600 + spread()
    assert max(lengths(build(texts, rows=3, packed=True, max_len=60, too_long="drop"))) <= 60
    with pytest.raises(UsageError, match="packs no second document"):
        build(texts, rows=3, packed=True, max_len=26, too_long="drop")


@pytest.mark.parametrize("packed", [False, True])
def test_a_single_document_is_no_data_to_judge_by(build: Build, packed: bool) -> None:
    with pytest.raises(UsageError, match=r"all rows are the same document of .*; raise --max-samples"):
        build(max_samples=1, max_len=2000, packed=packed)
    texts = [("short?", "yes"), ("longer?", "no " * 60), ("long?", "no " * 90)]
    with pytest.raises(UsageError, match=r"all rows are the same document .* keeps 1 of 3; use --max-len") as refused:
        build(texts, max_len=60, packed=packed, too_long="drop")
    assert build(texts, max_len=demanded(refused.value), packed=packed, too_long="drop")


def test_documents_of_one_length_are_told(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    build([(f"{n}?", "no " * 60) for n in range(30)], max_len=40)
    assert [record.getMessage() for record in caplog.records if "the same length" in record.getMessage()]
    caplog.clear()
    build(max_len=2000)
    assert caplog.records == []


def test_what_built_in_data_does_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    load_documents(DataConfig(path="data/long_problems.jsonl", max_len=1000), AutoTokenizer.from_pretrained(MODEL))
    assert caplog.records == []


@pytest.mark.parametrize("packed", [False, True])
def test_only_documents_that_are_needed_are_tokenized(
    build: Build, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [(f"what is {n} and {n}? {packed}", str(2 * n)) for n in range(5000)]  # no text is encoded twice
    tokenized, encode = [], lazy.encode

    def counted(sample: Sample, tokenizer: Any) -> lazy.Encoded:
        tokenized.append(sample)
        return encode(sample, tokenizer)

    monkeypatch.setattr(lazy, "encode", counted)
    used = sum(len(row.documents) for batch in build(texts, packed=packed) for row in batch.rows)
    assert used <= len(tokenized) < used + 30


def test_progress_is_told_of_data_that_takes_long(
    build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lazy, "REPORT_EVERY_S", 0.0)
    build(max_len=2000)
    assert "documents so far" in caplog.records[0].getMessage()


def test_only_the_first_samples_are_read_if_so_many_are_asked_for(tmp_path: Path) -> None:
    file = write_problems(tmp_path / "train.jsonl", count=9, seed=0)
    with file.open("a") as rest:
        rest.write("this is no JSON, and is not reached\n")
    assert len(read_samples(DataConfig(path=str(file), max_samples=9))) == 9
    with pytest.raises(UsageError, match="line 10 is not JSON"):
        read_samples(DataConfig(path=str(file)))


@pytest.mark.parametrize("is_array", [False, True])
def test_a_column_that_a_sample_has_twice_is_refused(is_array: bool, tmp_path: Path) -> None:
    first, second = '{"question": "2 + 3?", "answer": "5"}', '{"question": "2?", "answer": "2", "answer": "3"}'
    file = tmp_path / "train.jsonl"
    file.write_text(f"[{first},\n{second}]" if is_array else f"{first}\n{second}\n")
    with pytest.raises(UsageError, match=r"train\.jsonl, .*line 2: an object has the key 'answer' twice; remove one"):
        read_samples(DataConfig(path=str(file)))


def test_roll_outs_are_neither_cut_nor_sampled() -> None:
    selection = Selection(profile="full", backend=("fsdp2",), cells=("grpo/pangu/*/dp2/exact",), max_samples=5)
    (cell,) = select_cells(selection)
    with pytest.raises(UsageError, match="--too-long and --max-samples are for pairs of texts"):
        build_rollouts(cell.scenario, FIXTURES / "models" / "pangu")


def test_the_options_reach_the_scenario() -> None:
    selection = Selection(cells=("sft-packed/pangu/fsdp2/dp2/exact",), too_long="drop", max_samples=7, max_len=512)
    (cell,) = select_cells(selection)
    data = cell.scenario.data
    assert (data.too_long, data.max_samples, data.max_len) == ("drop", 7, 512)
    assert "--too-long drop --max-samples 7" in " ".join(selection.arguments())


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085", "\u000c", "\u001c"])
def test_a_line_of_json_ends_at_a_line_feed_and_nowhere_else(tmp_path: Path, character: str) -> None:
    file = tmp_path / "d.jsonl"
    text = f"one{character}two"
    inside = json.dumps(text, ensure_ascii=ord(character) < 32)  # JSON wants other control characters escaped
    file.write_bytes(f'{{"question": {inside}, "answer": "b"}}\r\n{{"question": "c", "answer": "d"}}'.encode())
    assert read_samples(DataConfig(path=str(file))) == [pair(text, "b"), pair("c", "d")]


def test_a_byte_order_mark_at_the_beginning_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"question": "\xef\xbb\xbfa", "answer": "b"}\n')
    assert read_samples(DataConfig(path=str(file))) == [pair("\ufeffa", "b")]


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("latin-1", r"d\.jsonl, line 2: not UTF-8 .*byte 0xe9\); save the file as UTF-8"),
        ("utf-16", r"d\.jsonl, line 1: not UTF-8 .*byte 0xff\); save the file as UTF-8"),
    ],
)
def test_another_encoding_is_told_with_file_and_line(tmp_path: Path, encoding: str, message: str) -> None:
    file = tmp_path / "d.jsonl"
    file.write_bytes('{"question": "a", "answer": "b"}\n{"question": "é", "answer": "d"}\n'.encode(encoding))
    with pytest.raises(UsageError, match=message):
        read_samples(DataConfig(path=str(file)))


def test_transformers_says_nothing_of_texts_beyond_the_models_positions(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.model_max_length = 10
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        assert len(lazy.encode(pair("how many " * 20, "ten"), tokenizer)[0]) > 10
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.records == []
