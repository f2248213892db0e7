"""Batches: right targets, and the unevenness that makes bugs show."""

import json
import shutil
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from transformers import AutoTokenizer

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data.forms import pair, read_samples
from conformance.data.inputs import build_batches, load_documents, pack
from conformance.data.tokenizer import _loaded, load_tokenizer
from conformance.spec.batch import Batch, Document
from conformance.spec.scenario import DataConfig, OptimizerConfig, Scenario

MODEL = FIXTURES / "models" / "llama"
SAMPLES = [{"question": "2 plus 3?", "answer": "It is 5."}, {"question": "Wie groß ist Zoë?", "answer": "Größer."}]
DP = [1, 2, 4, 8]
ACCUMULATION = [1, 3]


@cache
def batches(*, packed: bool = False, seed: int = 0, max_len: int = 96, **data: Any) -> list[Batch]:
    """The batches of five steps. They are immutable, and tokenizing the data set takes longer than a test."""
    scenario = Scenario(
        name="any",
        model="models/llama",
        precision="fp32",
        optimizer=OptimizerConfig(name="sgd", lr=0.1),
        seed=seed,
        data=DataConfig(packed=packed, max_len=max_len, **data),
    )
    return build_batches(scenario, MODEL)


def counts(batch: Batch, *, dp: int, accumulation: int) -> list[list[int]]:
    """Target tokens by rank and micro-batch."""
    return [
        [
            sum(row.target_count for row in rows)
            for rows in batch.micro_batches(dp_rank=rank, dp_size=dp, accumulation=accumulation)
        ]
        for rank in range(dp)
    ]


def write(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The first 60 samples of the built-in data, where the number does not matter."""
    samples = read_samples(DataConfig())[:60]
    file = tmp_path_factory.mktemp("data") / "few.jsonl"
    return write(file, [{"question": one.messages[0]["content"], "answer": one.answer} for one in samples])


@pytest.fixture
def tokenizer() -> Any:
    """A fresh one: tests change its template."""
    return AutoTokenizer.from_pretrained(MODEL)


# --- documents --------------------------------------------------------------------------------------------------------


def test_only_the_answer_and_its_end_token_are_targets(tmp_path: Path, tokenizer: Any) -> None:
    documents = load_documents(DataConfig(path=write(tmp_path / "d.jsonl", SAMPLES)), tokenizer)
    assert [tokenizer.decode(d.tokens) for d in documents] == [
        "<bos><|user|>2 plus 3?<|assistant|>It is 5.<eos>",
        "<bos><|user|>Wie groß ist Zoë?<|assistant|>Größer.<eos>",
    ]
    targets = [[t for t, target in zip(d.tokens, d.targets, strict=True) if target] for d in documents]
    assert [tokenizer.decode(t) for t in targets] == ["It is 5.<eos>", "Größer.<eos>"]


def test_white_space_that_a_template_writes_after_the_end_token_is_dropped(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ eos_token }}", "{{ eos_token }}\n")
    document = load_documents(DataConfig(path=write(tmp_path / "d.jsonl", SAMPLES)), tokenizer)[0]
    assert document.tokens[-1] == tokenizer.eos_token_id


def test_without_a_template_the_texts_are_joined(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = None
    document = load_documents(DataConfig(path=write(tmp_path / "d.jsonl", SAMPLES)), tokenizer)[0]
    assert tokenizer.decode(document.tokens) == "2 plus 3?It is 5.<eos>"
    assert tokenizer.decode(document.tokens[: document.targets.index(True)]) == "2 plus 3?"


def test_a_long_document_is_cut_at_the_end(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "d.jsonl", SAMPLES)
    whole = load_documents(DataConfig(path=path), tokenizer)
    cut = load_documents(DataConfig(path=path, max_len=24), tokenizer)
    assert [len(d.tokens) for d in whole] == [17, 28]
    assert [d.tokens for d in cut] == [d.tokens[:24] for d in whole]
    assert sum(cut[1].targets) < sum(whole[1].targets)


def test_a_data_set_or_a_template_that_has_changed_is_tokenized_again(tmp_path: Path) -> None:
    model, data = Path(shutil.copytree(MODEL, tmp_path / "model")), tmp_path / "d.jsonl"
    scenario = Scenario(
        name="any",
        model=str(model),
        precision="fp32",
        optimizer=OptimizerConfig(name="sgd", lr=0.1),
        data=DataConfig(path=write(data, [*SAMPLES, {"question": "Three?", "answer": "3"}]), rows=3),
    )

    def tokens() -> set[tuple[int, ...]]:
        return {document.tokens for batch in build_batches(scenario, model) for document in batch.documents}

    first = tokens()
    write(data, SAMPLES)
    assert tokens() < first
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("{{ eos_token }}", ""))
    assert not tokens() & first


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder"])
def test_all_formats_give_the_same_samples(tmp_path: Path, kind: str) -> None:
    if kind == "jsonl":
        path = write(tmp_path / "d.jsonl", SAMPLES)
    elif kind == "parquet":
        pytest.importorskip("pyarrow")
        path = str(tmp_path / "d.parquet")
        pd.DataFrame(SAMPLES).to_parquet(path)
    else:
        datasets = pytest.importorskip("datasets")
        path = str(tmp_path / "d")
        datasets.Dataset.from_list(SAMPLES).save_to_disk(path)
    assert read_samples(DataConfig(path=path)) == [pair(s["question"], s["answer"]) for s in SAMPLES]


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_a_seed_decides_the_batches(packed: bool, few: str) -> None:
    first = batches(packed=packed, seed=3, path=few)
    batches.cache_clear()
    assert batches(packed=packed, seed=3, path=few) == first
    assert batches(packed=packed, seed=4, path=few) != first


def test_a_step_has_its_rows_and_a_scenario_its_steps(few: str) -> None:
    built = batches(max_len=80, rows=6, path=few)
    assert [batch.step for batch in built] == [0, 1, 2, 3, 4]
    assert all([row.index for row in batch.rows] == list(range(6)) and batch.max_len == 80 for batch in built)


def test_documents_come_round_again_when_they_run_out(tmp_path: Path) -> None:
    built = batches(path=write(tmp_path / "d.jsonl", SAMPLES), rows=3)
    first, second = (row.documents[0].tokens for row in built[2].rows[:2])
    assert first != second
    assert [row.documents[0].tokens for row in built[3].rows] == [second, first, second]


def test_an_unpacked_row_is_one_document() -> None:
    assert {len(row.documents) for batch in batches() for row in batch.rows} == {1}


@pytest.mark.parametrize("max_len", [96, 160])
def test_a_packed_row_holds_two_documents_or_more_but_for_a_long_one(max_len: int) -> None:
    rows = [row for batch in batches(packed=True, max_len=max_len) for row in batch.rows]
    shortest = min(len(document.tokens) for row in rows for document in row.documents)
    for row in rows:
        assert row.length <= max_len
        assert len(row.documents) >= 2 or row.length + shortest > max_len
    assert all(len(row.documents) >= 2 for row in rows) is (max_len == 160), "the scenarios' rows are all of several"


def test_packing_takes_documents_in_order_for_as_long_as_they_fit() -> None:
    a, b, c, d = (Document((0,) * n, (False,) * (n - 1) + (True,)) for n in (4, 3, 5, 2))
    assert list(islice(pack([(a,), (b,), (c,), (d,)], max_len=9), 3)) == [(a, b), (c, d), (a, b)]


def test_a_document_beside_which_none_fits_is_a_row_by_itself() -> None:
    a, b, c, d = (Document((0,) * n, (False,) * (n - 1) + (True,)) for n in (8, 3, 5, 2))
    assert list(islice(pack([(a,), (b,), (c,), (d,)], max_len=9), 3)) == [(a,), (b, c), (d, b)]


def test_packing_prefers_a_later_document_to_a_row_of_one() -> None:
    long, short, other = (Document((0,) * n, (False,) * (n - 1) + (True,)) for n in (6, 3, 5))
    assert next(pack([(long,), (other,), (short,)], max_len=9)) == (long, short)


@pytest.mark.parametrize("packed", [False, True])
def test_row_lengths_are_ragged_and_some_are_odd(packed: bool) -> None:
    for batch in batches(packed=packed):
        lengths = {row.length for row in batch.rows}
        assert len(lengths) >= 8
        assert any(length % 2 for length in lengths)


@pytest.mark.parametrize("ring", [2, 4])
def test_packed_documents_cross_the_edges_between_ring_ranks(ring: int) -> None:
    for batch in batches(packed=True, max_len=160):
        crossing = 0
        for row in batch.rows:
            ends = [sum(len(d.tokens) for d in row.documents[:i]) for i in range(len(row.documents) + 1)]
            edges = [-(-row.length // ring) * i for i in range(1, ring)]
            crossing += any(start < edge < end for start, end in pairwise(ends) for edge in edges)
        assert crossing > len(batch.rows) / 2


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dp", DP)
@pytest.mark.parametrize("accumulation", ACCUMULATION)
def test_ranks_and_micro_batches_have_different_numbers_of_targets(packed: bool, dp: int, accumulation: int) -> None:
    for batch in batches(packed=packed):
        by_rank = counts(batch, dp=dp, accumulation=accumulation)
        assert len({sum(rank) for rank in by_rank}) > dp / 2
        uneven = sum(len(set(rank)) > 1 for rank in by_rank)
        assert accumulation == 1 or uneven > dp / 2


@pytest.mark.parametrize("packed", [False, True])
def test_the_same_rows_carry_no_target_in_every_data_set(packed: bool) -> None:
    masked = [[row.index for row in batch.rows if not row.target_count] for batch in batches(packed=packed)]
    assert masked == [list(range(20, 24)), list(range(16, 24)), [], [], []]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("step", "dp", "accumulation"), [(0, 8, 1), (0, 8, 3), (0, 4, 3), (0, 2, 3), (1, 4, 1), (1, 1, 3)]
)
def test_a_whole_rank_or_micro_batch_is_masked(packed: bool, step: int, dp: int, accumulation: int) -> None:
    by_rank = counts(batches(packed=packed)[step], dp=dp, accumulation=accumulation)
    assert by_rank[-1][-1] == 0
    assert by_rank[0][0] > 0


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_a_step_of_few_rows_still_has_targets(rows: int, few: str) -> None:
    assert all(batch.target_count > 0 for batch in batches(rows=rows, path=few))


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.csv", "question,answer\n", r"cannot read \.csv; give a \.jsonl, \.json or .*read_csv\(FILE\)\.to_json"),
        ("d.tsv", "question\tanswer\n", r"cannot read \.tsv; .*read_csv\(FILE, sep='\\t'\)\.to_json"),
        ("d.jsonl", "", "is empty"),
        (
            "d.jsonl",
            '{"prompt": "a", "answer": "b"}\n',
            r"no columns of questions and answers; found 'prompt', 'answer'",
        ),
        ("d.jsonl", '{"question": "a", "answer": " "}\n', r"line 1: 'answer' must be a non-empty text"),
        ("d.jsonl", '{"question": "a", "answer": 5}\n', r"'answer' must be a non-empty text, got 5"),
        ("d.jsonl", '{"question": "a"', "line 1 is not JSON"),
        ("d.jsonl", "[1]\n", "sample 1: expected an object"),
        ("d.jsonl", "[" * 100_000, r"d\.jsonl, an array of samples, cannot be read: its JSON is nested too deeply"),
        ("d.jsonl", "5\n", "line 1: expected an object"),
    ],
)
def test_a_file_that_does_not_serve_is_explained(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=message):
        read_samples(DataConfig(path=str(tmp_path / name)))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match=r"there is no 'nowhere\.jsonl'"):
        read_samples(DataConfig(path="nowhere.jsonl"))


def test_a_missing_value_in_parquet_is_explained(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pd.DataFrame([*SAMPLES, {"question": "a", "answer": None}]).to_parquet(tmp_path / "d.parquet")
    with pytest.raises(UsageError, match="sample 3: 'answer' must be a non-empty text"):
        read_samples(DataConfig(path=str(tmp_path / "d.parquet")))


def test_a_folder_that_is_no_dataset_is_explained(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(UsageError, match="not one that datasets' save_to_disk wrote"):
        read_samples(DataConfig(path=str(tmp_path)))


def test_a_dataset_with_several_splits_lists_them(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(SAMPLES)}).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(UsageError, match=r"several splits; add --split .*: train"):
        read_samples(DataConfig(path=str(tmp_path / "d")))


def test_a_length_without_room_for_a_target_names_one_that_has(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "d.jsonl", SAMPLES)
    with pytest.raises(UsageError, match=r"in 1 of 2 documents .* use --max-len 19 or more"):
        load_documents(DataConfig(path=path, max_len=18), tokenizer)
    assert load_documents(DataConfig(path=path, max_len=19), tokenizer)[1].targets[-1]


def test_packing_of_single_documents_suggests_longer_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", SAMPLES)
    with pytest.raises(UsageError, match=r"beside 1 of 2 documents of .*; use --max-len 45 or more, or a scen"):
        batches(path=path, packed=True, max_len=44)
    assert batches(path=path, packed=True, max_len=45)


def test_an_answer_that_nothing_comes_before_is_explained(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages | reverse %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(UsageError, match="nothing comes before the first token of the answer"):
        load_documents(DataConfig(path=write(tmp_path / "d.jsonl", SAMPLES)), tokenizer)


def test_a_tokenizer_with_neither_template_nor_end_token_is_explained(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = tokenizer.eos_token = None
    with pytest.raises(UsageError, match="neither a chat template nor an end-of-sequence token"):
        load_documents(DataConfig(path=write(tmp_path / "d.jsonl", SAMPLES)), tokenizer)


@pytest.mark.parametrize("family", [None, "gpt2", "qwen2"])  # transformers invents a tokenizer for the last two
def test_a_folder_without_a_tokenizer_is_named(family: str | None, tmp_path: Path) -> None:
    if family:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "vocab_size": 512}))
    message = (
        "has no tokenizer files, so transformers invents a tokenizer"
        if family
        else "has no tokenizer that transformers can"
    )
    with pytest.raises(UsageError, match=message):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_does_not_list_its_vocabulary_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_vocab(_: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(type(load_tokenizer(MODEL)), "get_vocab", get_vocab)
    _loaded.cache_clear()
    assert load_tokenizer(MODEL).encode("2")
