"""Data sets as people have them: which columns are read, and which tokens of a conversation are trained on."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data.documents import load_documents
from conformance.data.forms import Sample, pair, read_samples
from conformance.spec.batch import Document
from conformance.spec.scenario import DataConfig

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TURNS = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 plus 3?"},
    {"role": "assistant", "content": "5."},
    {"role": "user", "content": "And 4?"},
    {"role": "assistant", "content": "9."},
)


def saved(folder: Path, *records: Any, name: str = "mine.jsonl") -> DataConfig:
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataConfig(path=str(folder / name), max_len=500)


def tokenizer_with(template: str | None) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(FIXTURES / "models" / "llama")
    tokenizer.chat_template = template
    return tokenizer


def trained_texts(document: Document, tokenizer: Any) -> list[str]:
    """The runs of target tokens, decoded."""
    runs: list[list[int]] = [[]]
    for token, target in zip(document.tokens, document.targets, strict=True):
        if target:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


# --- columns ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "columns",
    [
        ("question", "answer"),
        ("prompt", "completion"),
        ("prompt", "response"),
        ("instruction", "output"),
        ("query", "response"),
    ],
)
def test_usual_names_of_columns_are_recognized(columns: tuple[str, str], tmp_path: Path) -> None:
    assert read_samples(saved(tmp_path, dict(zip(columns, ("a", "b"), strict=True)))) == [pair("a", "b")]


CONVERSATION = Sample(messages=TURNS, first=0)
SHAREGPT = [
    {"from": {"user": "human", "assistant": "gpt"}.get(t["role"], t["role"]), "value": t["content"]} for t in TURNS
]


@pytest.mark.parametrize(
    ("record", "sample"),
    [
        ({"messages": TURNS}, CONVERSATION),
        ({"prompt": "2 plus 3?", "messages": TURNS}, CONVERSATION),
        ({"conversations": SHAREGPT}, CONVERSATION),
        ({"messages": [{**turn, "tool_calls": None} for turn in TURNS]}, CONVERSATION),
        ({"prompt": TURNS[:4], "completion": TURNS[4:]}, Sample(messages=TURNS, first=4)),
        ({"prompt": TURNS[:4], "response": "9."}, Sample(messages=TURNS, first=4)),
        ({"prompt": TURNS[:4], "extra_info": {"answer": "9."}}, Sample(messages=TURNS, first=4)),
    ],
    ids=["messages", "ultrachat", "sharegpt", "parquet", "trl", "prompt-and-text", "verl"],
)
def test_conversations_are_read_in_every_form(record: dict[str, Any], sample: Sample, tmp_path: Path) -> None:
    assert read_samples(saved(tmp_path, record)) == [sample]


def test_named_columns_may_lie_inside_others(tmp_path: Path) -> None:
    config = saved(tmp_path, {"prompt": TURNS[:2], "reward_model": {"ground_truth": "5"}, "answer": "no"})
    named = DataConfig(path=config.path, input_key="prompt", output_key="reward_model.ground_truth")
    assert read_samples(named)[0].answer == "5"


def test_what_was_chosen_repeats_the_prompt(tmp_path: Path) -> None:
    config = saved(tmp_path, {"prompt": "2 plus 3?", "chosen": TURNS[1:3], "rejected": TURNS[1:3]})
    with pytest.raises(UsageError, match=r"these are preferences; .* --input-key prompt --output-key chosen"):
        read_samples(config)
    named = DataConfig(path=config.path, input_key="prompt", output_key="chosen")
    assert read_samples(named) == [Sample(messages=TURNS[1:3])]


def test_unused_columns_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = {"instruction": "a", "output": "b", "input": "c", "chosen": "d"}
    read_samples(saved(tmp_path, record, record))
    (message,) = caplog.messages
    assert message.endswith(
        "columns that are not used: input, chosen; chosen look like targets: --output-key names what is trained on"
    )


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": []}, "'messages' must be a text, or a list of messages with 'role' and 'content'"),
        ({"messages": ["hello"]}, "'messages' must be a text, or a list of messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "message 1 of 'messages': the role must be one of system"),
        ({"messages": [{"role": "user"}]}, "message 1 .*: there is neither 'content' nor 'tool_calls'"),
        ({"messages": [{"role": "user", "content": 5}]}, "'content' must be a text, got 5"),
        ({"messages": TURNS[:2]}, "no turn of an assistant, so nothing would be trained on"),
        ({"messages": TURNS, "tools": "{"}, "'tools' is a text that is not JSON"),
        ({"prompt": TURNS[:2], "reward_model": {}}, "these are prompts for rollouts without an answer"),
        ({"text": "a"}, "no columns of questions and answers; found 'text'; name the columns"),
    ],
)
def test_a_record_of_no_known_form_is_explained(record: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"mine.jsonl, line 1.*{words}"):
        read_samples(saved(tmp_path, record))


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template", [CHATML, CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")]
)
@pytest.mark.parametrize(("record", "texts"), [({"messages": TURNS}, ["5.", "9."]), ({}, ["9."])])
def test_assistant_turns_are_targets(template: str, record: dict[str, Any], texts: list[str], tmp_path: Path) -> None:
    """With the marks of the template and without them alike; of TRL's form only the completion is trained on."""
    tokenizer = tokenizer_with(template)
    config = saved(tmp_path, record or {"prompt": TURNS[:4], "completion": TURNS[4:]})
    (document,) = load_documents(config, tokenizer)
    assert trained_texts(document, tokenizer) == [f"{text}<eos>" for text in texts]
    rest = [token for token, target in zip(document.tokens, document.targets, strict=True) if not target]
    assert "<system>Be brief." in tokenizer.decode(rest)


def test_a_document_ends_inside_a_later_turn_of_the_user(tmp_path: Path) -> None:
    """A conversation is cut like any document, and its first answers are still trained on."""
    tokenizer = tokenizer_with(CHATML)
    config = saved(tmp_path, {"messages": TURNS})
    (whole,) = load_documents(config, tokenizer)
    last = len(whole.targets) - 1 - whole.targets[::-1].index(False, 3)
    (cut,) = load_documents(DataConfig(path=config.path, max_len=last), tokenizer)
    assert trained_texts(cut, tokenizer) == ["5.<eos>"]


def test_tools_reach_the_template(tmp_path: Path) -> None:
    tokenizer = tokenizer_with("{% for t in tools or [] %}[{{ t['name'] }}]{% endfor %}" + CHATML)
    tools = [{"name": "add", "parameters": {}}]
    one, other = ({"messages": TURNS, "tools": value} for value in (tools, json.dumps(tools)))
    documents = load_documents(saved(tmp_path, one, other), tokenizer)
    assert [tokenizer.decode(document.tokens)[:5] for document in documents] == ["[add]", "[add]"]


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    """As those that drop the reasoning of all answers but the last."""
    rewriting = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] if loop.last else m['content'][:1] }}\n{% endfor %}"
    )
    with pytest.raises(UsageError, match=r"message 3 otherwise once other messages follow.*mark it"):
        load_documents(saved(tmp_path, {"messages": TURNS}), tokenizer_with(rewriting))


def test_a_conversation_needs_a_template(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a conversation needs a chat template, and the tokenizer has none"):
        load_documents(saved(tmp_path, {"messages": TURNS}), tokenizer_with(None))


# --- files ------------------------------------------------------------------------------------------------------------


RECORDS = [{"question": "a", "answer": "b"}, {"question": "c", "answer": "d"}]
LINES = "\n".join(map(json.dumps, RECORDS))
SAMPLES = [pair("a", "b"), pair("c", "d")]


def test_json_arrays_and_lines_are_read_by_content(tmp_path: Path) -> None:
    for name, text in (("a.json", json.dumps(RECORDS)), ("b.jsonl", f"\n {json.dumps(RECORDS)}"), ("c.json", LINES)):
        (tmp_path / name).write_text(text)
        assert read_samples(DataConfig(path=str(tmp_path / name))) == SAMPLES
    (tmp_path / "mine.json").write_text(json.dumps([RECORDS[0], 5]))
    with pytest.raises(UsageError, match=r"mine.json, sample 2: expected an object"):
        read_samples(DataConfig(path=str(tmp_path / "mine.json")))


@pytest.mark.parametrize("name", ["mine.jsonl.gz", "mine.json.gz", "mine.jsonl.zst"])
def test_compressed_files_are_read(name: str, tmp_path: Path) -> None:
    text = json.dumps(RECORDS) if ".json." in name else LINES
    if name.endswith(".zst"):
        packed = pytest.importorskip("pyarrow").Codec("zstd").compress(text.encode(), asbytes=True)
    else:
        packed = gzip.compress(text.encode())
    (tmp_path / name).write_bytes(packed)
    assert read_samples(DataConfig(path=str(tmp_path / name))) == SAMPLES
    (tmp_path / name).write_bytes(packed[:-9])
    with pytest.raises(UsageError, match=rf"{name} cannot be decompressed"):
        read_samples(DataConfig(path=str(tmp_path / name)))
    (tmp_path / name).write_bytes(b"not compressed")
    with pytest.raises(UsageError, match=rf"{name} cannot be decompressed"):
        read_samples(DataConfig(path=str(tmp_path / name)))


def test_a_split_is_chosen(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    path = str(tmp_path / "d")
    splits = {name: datasets.Dataset.from_list([record]) for name, record in zip(("a", "b"), RECORDS, strict=True)}
    datasets.DatasetDict(splits).save_to_disk(path)
    assert read_samples(DataConfig(path=path, split="b")) == SAMPLES[1:]
    with pytest.raises(UsageError, match=r"has no split 'test'; its splits are a, b"):
        read_samples(DataConfig(path=path, split="test"))
    with pytest.raises(UsageError, match=r"has no splits; leave out --split"):
        read_samples(DataConfig(path=saved(tmp_path, RECORDS[0]).path, split="a"))
