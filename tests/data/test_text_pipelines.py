"""Text pipelines: the reference one on published templates, planted faults at their stages, and bad conversations."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.backends.faults import Fault
from conformance.backends.text import OrderPlan, ServedPipeline, TextInfo
from conformance.core.errors import UsageError
from conformance.data.forms import EXAMPLES, read_labelled, read_preferences, read_samples
from conformance.data.tokenizer import encode, load_tokenizer
from conformance.judge.sample_order import judge_order
from conformance.judge.text import (
    Conversation,
    TemplateFolder,
    TextCheck,
    expected_of,
    judge_conversations,
    own_template,
    published,
    read_conversations,
)
from conformance.oracle.chat import RULES, ChatTemplate
from conformance.spec.scenario import DataConfig
from impl.faults.served import TEXT_FAULTS
from impl.train.text_pipeline import ReferencePipeline

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INFO = TextInfo(name="any", packages=())
ASKED, ANSWERED = {"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TemplateFolder]:
    return {one.name: one for one in published(["all"], tmp_path_factory.mktemp("templates"))}


def checks(pipeline: ServedPipeline, folder: TemplateFolder) -> Iterator[TextCheck]:
    yield from judge_conversations(pipeline, folder, read_conversations(""))
    yield from judge_order(pipeline)


@pytest.mark.parametrize(
    "name", ["deepseek-v3", "gemma3", "llama3.1", "mistral", "phi3", "phi3-marked", "qwen2.5", "qwen3"]
)
def test_reference_pipeline_conforms(name: str, folders: dict[str, TemplateFolder]) -> None:
    found = list(checks(ServedPipeline(ReferencePipeline()), folders[name]))
    assert {one.state for one in found} <= {"conforms", "unsupported"}, found
    assert [one.stage for one in found if one.state == "unsupported"] == ["micro-batches"]


@pytest.mark.parametrize("fault", TEXT_FAULTS, ids=lambda fault: fault.name)
def test_fault_is_found_at_its_stage(fault: Fault, folders: dict[str, TemplateFolder]) -> None:
    with ServedPipeline(ReferencePipeline(), faults=[fault.name]) as pipeline:
        found = [one.stage for one in checks(pipeline, folders[fault.cells.model]) if one.state == "differs"]
    assert found[:1] == [fault.stage]


def test_templates_render_as_transformers_does(folders: dict[str, TemplateFolder]) -> None:
    for folder in folders.values():
        tokenizer, count = load_tokenizer(folder.folder), 0
        for one in expected_of(folder, read_conversations(""), INFO)[0]:
            whole = tokenizer.apply_chat_template(
                list(one.conversation.messages), tools=one.conversation.tools or None, return_dict=False
            )
            assert whole == one.tokens, (folder.name, one.conversation.name)
            count += 1
        assert count >= 6


def test_white_space_of_blocks_is_that_of_transformers(folders: dict[str, TemplateFolder]) -> None:
    skipped = "    {% if m.role == 'tool' %}{% continue %}{% endif %}\n"
    source = f"{{% for m in messages %}}\n{skipped}  {{{{ m | tojson }}}}\n{{% endfor %}}"
    messages = [{"role": "user", "content": "<é>"}, {"role": "assistant", "content": "5"}]
    theirs = load_tokenizer(folders["qwen2.5"].folder).apply_chat_template(
        messages, chat_template=source, tokenize=False
    )
    assert ChatTemplate(source=source, special={}).text(messages) == theirs


def test_marks_of_the_template_are_those_of_transformers(folders: dict[str, TemplateFolder]) -> None:
    folder, info = folders["phi3-marked"], TextInfo(name="any", packages=(), marks=True)
    tokenizer = load_tokenizer(folder.folder)
    for one in expected_of(folder, read_conversations(""), info)[0]:
        made = tokenizer.apply_chat_template(
            list(one.conversation.messages), return_dict=True, return_assistant_tokens_mask=True
        )
        assert one.marked == [bool(mark) for mark in made["assistant_masks"]]


def test_labels_tell_header_scaffold_content_and_end() -> None:
    template = ChatTemplate(
        source=CHATML.replace(
            "{{ m.content }}", "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}"
        ),
        special={"end": "<|im_end|>"},
    )
    rendered = template.render([ASKED, ANSWERED, ASKED])
    parts: dict[str, str] = {}
    for character, label in zip(rendered.text, rendered.labels, strict=True):
        if label.message == 1:
            parts[label.kind] = parts.get(label.kind, "") + character
    wanted = {"header": "<|im_start|>assistant\n", "scaffold": "<think></think>", "content": "5"}
    assert parts == wanted | {"end": "<|im_end|>", "space": "\n"}


def test_packing_rules_by_hand() -> None:
    lengths = [4, 6, 3, 5, 2]
    assert RULES["in order"](lengths, 10) == [[0, 1], [2, 3, 4]]
    assert RULES["best fit"](lengths, 10) == [[1, 0], [3, 2, 4]]
    assert RULES["knapsack"](lengths, 10) == [[1, 0], [3, 2, 4]]
    assert RULES["knapsack"]([7, 2, 3, 3], 8) == [[0], [3, 2, 1]]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (
            CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"),
            [ASKED, ANSWERED, {"role": "tool", "content": "7"}, ANSWERED],
            "line 2: .*leaves out message 3, of the role 'tool', '7'; correct",
        ),
        (
            CHATML,
            [ASKED, {**ANSWERED, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}],
            "line 2: .*leaves out 'tool_calls' of message 2; give",
        ),
        ("{{ raise_exception('no roles') }}" + CHATML, [ASKED, ANSWERED], "line 2: no roles"),
    ],
)
def test_user_conversation_that_is_lost_is_an_error(
    template: str, messages: list[Any], message: str, tmp_path: Path, folders: dict[str, TemplateFolder]
) -> None:
    data = tmp_path / "own.jsonl"
    lines = [{"messages": [ASKED, ANSWERED]}, {"messages": messages}]
    data.write_text("\n".join(map(json.dumps, lines)))
    if "raise_exception" in template:
        data.write_text("\n" + json.dumps(lines[1]))
    folder = folders["qwen2.5"]
    own = TemplateFolder(name="own", folder=folder.folder, template=ChatTemplate(source=template, special={}))
    with pytest.raises(UsageError, match=f"own.jsonl, {message}"):
        expected_of(own, read_conversations(str(data)), INFO)


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"role": "robot", "content": "5"}, "message 2 of 'messages': the role must be one of"),
        ({"role": "assistant", "content": "  "}, "message 2 of 'messages': the answer is empty"),
    ],
)
def test_bad_turn_names_file_line_and_key(turn: dict[str, str], message: str, tmp_path: Path) -> None:
    data = tmp_path / "own.jsonl"
    data.write_text(json.dumps({"messages": [ASKED, turn]}))
    with pytest.raises(UsageError, match=f"own.jsonl, line 1, {message}"):
        read_conversations(str(data))


def test_unknown_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown chat template 'qwen9'"):
        list(published(["qwen9"], tmp_path))


def test_folder_of_a_user_is_judged() -> None:
    folder = own_template(Path("fixtures/models/llama").resolve(), trusted=False)
    conversations = [Conversation(name="one", messages=[ASKED, ANSWERED])]
    found = list(judge_conversations(ServedPipeline(ReferencePipeline()), folder, conversations))
    assert [one.state for one in found] == ["conforms"] * 3, found


class Wrong(ReferencePipeline):
    """Answers with a mask of another length than its tokens."""

    def encode(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {"tokens": [1, 2, 3], "targets": [True]}


def test_mask_of_another_length_is_no_answer(folders: dict[str, TemplateFolder]) -> None:
    (found,) = judge_conversations(ServedPipeline(Wrong()), folders["qwen2.5"], read_conversations(""))
    assert found.state == "unsupported"
    assert "returned 1 targets for the 3 tokens" in found.text


def test_resume_continues_without_a_sample_twice() -> None:
    plan = OrderPlan(samples=23, ranks=2, rows=3, after=3)
    (whole,), (left,) = (ReferencePipeline().order(one) for one in (OrderPlan(samples=23, ranks=2, rows=3), plan))
    assert [rank[3:] for rank in whole] == left


EARLIER = [ASKED, ANSWERED, {"role": "user", "content": "4 + 5?"}]
FORMS = [
    *(record for _, _, record in EXAMPLES),
    *(
        {"messages": [ASKED, {**ANSWERED, name: off}, ASKED, ANSWERED]}
        for name, off in (("weight", 0), ("train", False))
    ),
    {"prompt": EARLIER, "completion": [{"role": "assistant", "content": "9"}]},
    {"prompt": EARLIER, "extra_info": {"answer": "9"}},
    {"prompt": EARLIER, "chosen": "9", "rejected": "8"},
    {"system": "Add.", "question": "2 + 3?", "answer": "5"},
]


@pytest.mark.parametrize("record", FORMS, ids=lambda record: "+".join(record))
@pytest.mark.parametrize("template", ["qwen2.5", "phi3", "phi3-marked"])
def test_data_form_has_the_mask_of_a_run(
    template: str, record: dict[str, Any], tmp_path: Path, folders: dict[str, TemplateFolder]
) -> None:
    """For each form of docs/guides/real-data.md: what the pipeline and the judge train on is what `parity run` does."""
    folder, data = folders[template], tmp_path / "own.jsonl"
    data.write_text(json.dumps(record))
    config = DataConfig(path=str(data), max_len=512)
    if record.keys() & {"completions", "input_ids", "group"}:
        with pytest.raises(UsageError, match=r"own.jsonl, line 1: .*judge this one by `parity run`"):
            read_conversations(str(data))
        return
    if "chosen" in record:
        samples = [one for pair in read_preferences(config) for one in pair]
    else:
        samples = read_labelled(config) if "label" in record else read_samples(config)
    of_run = [encode(one, load_tokenizer(folder.folder)) for one in samples]
    pipeline, conversations = ServedPipeline(ReferencePipeline()), read_conversations(str(data))
    expected, refused = expected_of(folder, conversations, pipeline.info)
    assert not refused
    assert [(tuple(one.tokens), tuple(one.targets(pipeline.info))) for one in expected] == of_run
    assert {one.state for one in judge_conversations(pipeline, folder, conversations)} == {"conforms"}


def test_pipeline_without_forms_trains_on_all_answers(folders: dict[str, TemplateFolder]) -> None:
    turns: list[dict[str, Any]] = [ASKED, {**ANSWERED, "weight": 0}, ASKED, ANSWERED]
    (one,) = expected_of(folders["qwen2.5"], [Conversation(name="one", messages=turns)], INFO)[0]
    assert {one.labels[at].message for at, is_target in enumerate(one.targets(INFO)) if is_target} == {1, 3}
