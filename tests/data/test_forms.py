"""Data sets as people have them: which columns are read, and which tokens of a conversation are trained on."""

import gzip
import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cells import BACKENDS, exhaustive
from conftest import make_cell
from transformers import AutoTokenizer

from conformance.backends.protocol import BackendEntry
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data import tokenizer as tokenizers
from conformance.data.forms import EXAMPLES, Sample, pair, read_labelled, read_preferences, read_samples, read_steps
from conformance.data.inputs import load_documents
from conformance.data.rollouts import read_groups
from conformance.data.samples import reads_of
from conformance.runner.session import Session
from conformance.spec.batch import Document
from conformance.spec.scenario import DataConfig, Scenario, parse_scenario

LLAMA = FIXTURES / "models" / "llama"
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
    tokenizer = AutoTokenizer.from_pretrained(LLAMA)
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
        ({"messages": [{**t, "content": [{"type": "text", "text": t["content"]}]} for t in TURNS]}, CONVERSATION),
        ({"system": "Be brief.", "conversations": SHAREGPT[1:]}, Sample(messages=TURNS, first=1)),
        ({"system_prompt": "Be brief.", "system": None, "messages": TURNS}, CONVERSATION),
        ({"instruction": "a", "input": "c", "output": "b"}, pair("a\n\n### Input:\nc", "b")),
        ({"instruction": "a", "input": "", "response": "b"}, pair("a", "b")),
        ({"prompt": TURNS[:4], "completion": TURNS[4:]}, Sample(messages=TURNS, first=4)),
        ({"prompt": TURNS[:4], "response": "9."}, Sample(messages=TURNS, first=4)),
        ({"prompt": TURNS[:4], "extra_info": {"answer": "9."}}, Sample(messages=TURNS, first=4)),
    ],
    ids=[
        "messages",
        "ultrachat",
        "sharegpt",
        "parquet",
        "parts",
        "system",
        "system_prompt",
        "alpaca",
        "alpaca-empty",
        "trl",
        "prompt-and-text",
        "verl",
    ],
)
def test_conversations_are_read_in_every_form(record: dict[str, Any], sample: Sample, tmp_path: Path) -> None:
    assert read_samples(saved(tmp_path, record)) == [sample]


@pytest.mark.parametrize(("form", "trained", "record"), EXAMPLES, ids=[form for form, _, _ in EXAMPLES])
def test_each_form_of_the_documentation_is_read(
    form: str, trained: str, record: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = saved(tmp_path, record)
    reads = reads_of(Path(config.path))
    kinds = ("rollouts", "preferences", "labelled answers", "labelled steps")
    assert reads == next((kind for kind in kinds if form.startswith(kind)), "samples")
    if reads == "preferences":
        ((chosen, rejected),) = read_preferences(config)
        assert [one.answer for one in (chosen, rejected)] == ["5", "6"]
    elif reads == "labelled answers":
        assert [(one.answer, one.columns) for one in read_labelled(config)] == [("6", {"label": 0.0})]
    elif reads == "labelled steps":
        assert [(one.steps, one.labels) for one in read_steps(config)] == [(("2 + 2 = 4", "4 + 1 = 6"), (1.0, 0.0))]
    elif reads == "samples":
        (document,) = load_documents(config, tokenizer_with(CHATML))
        assert any(document.targets), trained
        assert not caplog.messages
    else:
        ((response,),) = read_groups(rollouts_of(config), vocabulary=99)
        assert response.targets == (False, False, True, False, True)


def rollouts_of(config: DataConfig) -> Scenario:
    values = {"name": "mine", "model": str(LLAMA), "precision": "exact", "optimizer": {"name": "sgd", "lr": 0.1}}
    return parse_scenario({**values, "data": {"path": config.path}, "objective": {"kind": "grpo"}})


def test_named_columns_come_before_a_conversation(tmp_path: Path) -> None:
    config = saved(tmp_path, {"messages": TURNS, "question": "a", "answer": "b"})
    named = DataConfig(path=config.path, input_key="question", output_key="answer")
    assert read_samples(named) == [pair("a", "b")]


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
    record = {"instruction": "a", "output": "b", "input": "c", "topic": "e", "chosen": "d"}
    read_samples(saved(tmp_path, record, record))
    (message,) = caplog.messages
    assert message.endswith(
        "columns that are not used: topic, chosen; chosen could be targets: --output-key names what is trained on"
    )


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": []}, "'messages' is an empty list; give it messages, or leave the sample out"),
        ({"messages": ["hello"]}, "'messages' must be a list of messages with 'role' and 'content', got"),
        ({"messages": "hello"}, "'messages' must be a list of messages, got the text"),
        ({"prompt": 5, "completion": TURNS[1:]}, "'prompt' must be a text, or a list of messages with 'role'"),
        ({"instruction": "a", "input": ["c"], "output": "b"}, "'input' must be a non-empty text"),
        ({"system": "a", "system_prompt": "b", "messages": TURNS[1:]}, "different system messages; keep one"),
        ({"system": "Be long.", "messages": TURNS}, "system and the conversation hold different system messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "message 1 of 'messages': the role must be one of system"),
        ({"messages": [{"role": "user"}]}, "message 1 .*: there is neither 'content' nor 'tool_calls'"),
        ({"messages": [{"role": "user", "content": 5}]}, "'content' must be a text, or a list of parts .*, got 5"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'content' must be a text"),
        ({"messages": TURNS[:2]}, "no turn of an assistant that is trained on"),
        ({"messages": [TURNS[0], {**TURNS[2], "weight": 0}]}, "no turn of an assistant that is trained on"),
        ({"messages": [{**TURNS[2], "weight": 0.5}]}, "message 1 .*: 'weight' must be 0 or 1"),
        ({"messages": TURNS[2:]}, "the conversation begins with the assistant"),
        ({"messages": [TURNS[1], {"role": "assistant", "content": " "}]}, "message 2 .*: the answer is empty"),
        ({"messages": "[]"}, "'messages' must be a list of messages, got the text"),
        ({"messages": TURNS, "loss_mask": [0, 1]}, "'loss_mask' masks tokens, but the texts are tokenized here"),
        ({"question": "a", "answer": "b", "completion_mask": [0]}, "'completion_mask' masks tokens"),
        ({"input_ids": [1, 2]}, "'input_ids' without 'labels' or a mask do not say what is trained on"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "entry 1 of 'labels' is 2, but must be 1 .* are not shifted"),
        ({"input_ids": [1, 2], "labels": [1]}, "'labels' must be a list of 2 tokens or -100"),
        ({"input_ids": [1, 2], "labels": [1, -100]}, "no token of 'input_ids' is trained on"),
        ({"input_ids": [1, True], "labels": [1, 2]}, "'input_ids' must be a list of tokens"),
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


THINKING = (  # as Qwen3's: the last answer alone gets an empty block of reasoning
    "{% for m in messages %}<{{ m['role'] }}>{{ '<think>' if loop.last and m['role'] == 'assistant' else '' }}"
    "{{ m['content'] }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_reasoning_of_the_last_answer_alone_is_no_hindrance(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(THINKING)
    (document,) = load_documents(saved(tmp_path, {"messages": TURNS}), tokenizer)
    assert trained_texts(document, tokenizer) == ["5.<eos>", "<think>9.<eos>"]


@pytest.mark.parametrize("template", [CHATML, THINKING])
@pytest.mark.parametrize("switch", [{"weight": 0}, {"train": False}, {"loss": False}])
def test_turns_that_are_switched_off_are_no_targets(template: str, switch: dict[str, Any], tmp_path: Path) -> None:
    tokenizer, off = tokenizer_with(template), [*TURNS[:2], {**TURNS[2], **switch}, *TURNS[3:]]
    (document,) = load_documents(saved(tmp_path, {"messages": off}), tokenizer)
    assert [text.removeprefix("<think>") for text in trained_texts(document, tokenizer)] == ["9.<eos>"]


@pytest.mark.parametrize(
    "columns",
    [{"labels": [-100, 5, -100, 7]}, {"assistant_masks": [0, 1, 0, 1]}, {"loss_mask": [1, 1, 0, 1]}],
    ids=lambda columns: next(iter(columns)),
)
@pytest.mark.parametrize("texts", [False, True], ids=["tokens", "beside texts"])
def test_tokenized_samples_keep_the_gaps_of_their_masks(
    columns: dict[str, list[int]], texts: bool, tmp_path: Path
) -> None:
    tokenized = {"input_ids": [4, 5, 6, 7], "attention_mask": [1, 1, 1, 1], **columns}
    config = saved(tmp_path, tokenized | ({"messages": TURNS, "question": "a", "answer": "b"} if texts else {}))
    (document,) = load_documents(config, tokenizer_with(None))
    assert (document.tokens, document.targets) == ((4, 5, 6, 7), (False, True, False, True))


def test_calls_of_tools_that_a_template_leaves_out_are_refused(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    config = saved(tmp_path, {"messages": [TURNS[1], call, {"role": "tool", "content": "5"}, TURNS[2]]})
    with pytest.raises(UsageError, match=r"the chat template leaves out 'tool_calls'"):
        load_documents(config, tokenizer_with(THINKING))
    writing = THINKING.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m['tool_calls'] or '' }}")
    (document,) = load_documents(config, tokenizer_with(writing))
    assert "add" in trained_texts(document, tokenizer_with(writing))[0]


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    """As those that drop the reasoning of all answers but the last."""
    rewriting = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] if loop.last else m['content'][:1] }}\n{% endfor %}"
    )
    with pytest.raises(UsageError, match=r"message 3 or those before it otherwise once other.*mark it"):
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


@pytest.mark.parametrize(
    ("backend", "state"),
    [
        ("plain_backend:Plain", "conforms"),
        ("plain_variants:FillsGaps", "differs"),
        *(exhaustive(backend.target, "conforms") for backend in BACKENDS.values()),
    ],
)
def test_a_cell_whose_masks_have_gaps_is_judged(session: Session, backend: str, state: str, tmp_path: Path) -> None:
    draw = random.Random(0)
    samples = []
    for _ in range(24):
        spans = [draw.randrange(3, 8) for _ in range(4)]
        masks = [bool(number % 2) for number, length in enumerate(spans) for _ in range(length)]
        samples.append({"input_ids": [draw.randrange(8, 400) for _ in masks], "assistant_masks": list(map(int, masks))})
    asked = make_cell("sft-sgd", "llama", "dp2", "exact", rows=4, steps=2, accumulation=1)
    entry = BackendEntry(name=backend.partition(":")[2].lower(), target=backend)
    data = replace(asked.scenario.data, path=saved(tmp_path, *samples).path, max_len=64)
    scenario, phase = replace(asked.scenario, data=data), replace(asked.phases[0], backend=entry)
    cell = replace(asked, scenario=scenario, phases=(phase,))
    documents = load_documents(scenario.data, FIXTURES / scenario.model)
    gaps = [sum(a and not b for a, b in pairwise(document.targets)) for document in documents]
    assert min(gaps) > 0
    verdict = session.run(cell).verdict
    assert verdict.state == state, verdict.reason


def test_equal_tokenizers_encode_a_document_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other models, from equal files; one with another template encodes it again."""
    encoded: list[Sample] = []
    encode = tokenizers.encode

    def counted(sample: Sample, tokenizer: Any) -> tokenizers.Encoded:
        encoded.append(sample)
        return encode(sample, tokenizer)

    monkeypatch.setattr(tokenizers, "encode", counted)
    config = saved(tmp_path, {"messages": [*TURNS, {"role": "user", "content": str(tmp_path)}, TURNS[-1]]})
    for model, count in (("llama", 1), ("qwen3", 1)):
        tokenizer = AutoTokenizer.from_pretrained(FIXTURES / "models" / model)
        load_documents(config, tokenizer)
        assert len(encoded) == count
    tokenizer.chat_template = CHATML
    load_documents(config, tokenizer)
    assert len(encoded) == 2
