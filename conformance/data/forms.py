"""Recognizes the form in which a user's data set holds questions and answers, and reads its samples.

A record is recognized by its columns: two texts (under many usual names), TRL's ``prompt`` and ``completion``, a
conversation (``messages``, or ShareGPT's ``conversations``), verl's prompts, whose answers are in ``extra_info``, and
tokens with labels or masks.
Columns that are not used are named once, because one of them may hold what should have been trained on.
"""

import functools
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from conformance.core.errors import UsageError, shown
from conformance.core.host import resolve
from conformance.data.images import KEYS, image_columns, pixels_of_token
from conformance.data.samples import (
    PREFERENCE_COLUMNS,
    ROLLOUT_COLUMNS,
    STEPWISE_COLUMNS,
    Place,
    check_text,
    check_unmasked,
    has_column,
    has_targets,
    is_builtin,
    labelled_tokens,
    masks_of,
    names_of,
    number_of,
    read_dataset,
    text_of,
    value_of,
)
from conformance.spec.batch import Columns
from conformance.spec.offline import LABEL, MARGIN
from conformance.spec.scenario import DataConfig

# The column of the input and of the output, in the order in which they are looked for; a dot leads into a mapping.
PAIRS = (
    ("question", "answer"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("query", "response"),
    ("prompt", "extra_info.answer"),  # verl
    ("input", "output"),
)
CONVERSATIONS = ("messages", "conversations")
SYSTEM = ("system", "system_prompt")
# What stands between the columns instruction and input in Alpaca's published prompt; the chat template has the rest.
ALPACA_INPUT = "\n\n### Input:\n"
_ASKED, _ANSWERED = {"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}
EXAMPLES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("two texts", "the second, as the assistant's turn of the chat template", {"question": "2 + 3?", "answer": "5"}),
    (
        "a conversation, with `tools` and `system`",
        "each turn of the assistant whose `weight`, `train` or `loss` is not 0; with `{% generation %}` in the "
        "template, the tokens that it marks",
        {"messages": [_ASKED, _ANSWERED]},
    ),
    ("ShareGPT", "the same", {"conversations": [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5"}]}),
    ("TRL's conversations", "each turn of the completion", {"prompt": [_ASKED], "completion": [_ANSWERED]}),
    ("verl's prompts", "`extra_info.answer`", {"prompt": [_ASKED], "extra_info": {"answer": "5"}}),
    (
        "tokens",
        "those that neither a label of -100 nor a column that is called a mask takes away",
        {"input_ids": [1, 4, 7, 9, 2], "labels": [-100, -100, 7, -100, 2]},
    ),
    (
        "preferences, for DPO and (perhaps with `margin`) reward models; without `prompt`, two conversations that "
        "begin alike",
        "both answers",
        {"prompt": "2 + 3?", "chosen": "5", "rejected": "6"},
    ),
    ("labelled answers, for KTO", "the answer", {"prompt": "2 + 3?", "completion": "6", "label": False}),
    (
        "labelled steps, for process rewards (TRL's stepwise supervision)",
        "the line break behind each step",
        {"prompt": "2 + 3?", "completions": ["2 + 2 = 4", "4 + 1 = 6"], "labels": [True, False]},
    ),
    (
        "rollouts, for GRPO and PPO",
        "the tokens of the response that no column that is called a mask takes away",
        {
            "group": 3,
            "prompt_ids": [1, 4],
            "completion_ids": [7, 9, 2],
            "completion_mask": [1, 0, 1],
            "logprobs": [-1.2, None, -0.1],
            "reward": 0.5,
        },
    ),
)  # the form, what is trained on, and a record
TOKENS = "input_ids"
_TARGET = re.compile(
    "answer|chosen|completion|label|output|rejected|response|solution|target|ground_truth", re.IGNORECASE
)
_SWITCHES = ("weight", "train", "training", "loss")  # of a turn: of OpenAI, axolotl, Tunix and ms-swift
# ShareGPT's names of roles, with those that transformers' chat templates know.
_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
_KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")

logger = logging.getLogger(__name__)
Message = Mapping[str, Any]  # role, content, and what the template reads besides, such as tool_calls


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Holds one conversation; a pair of texts is one of two turns.

    messages: the turns, in order. first: the number of the first turn that may be trained on; assistant turns from
    there on are, unless a turn says that it is not. tools: what the chat template gets as such. is_pair: whether the
    texts can do without a template. tokens, targets: of a sample that has been tokenized before, which has no turns.
    columns: numbers that an objective or a model with images reads, of the whole sample or by token. steps, labels: of
    an answer in steps, the texts and their labels. record: all columns, as they were read. place: where that was.
    """

    messages: tuple[Message, ...] = ()
    first: int = 0
    tools: tuple[Any, ...] = ()
    is_pair: bool = False
    tokens: tuple[int, ...] = ()
    targets: tuple[bool, ...] = ()
    columns: Columns = field(default_factory=dict)
    steps: tuple[str, ...] = ()
    labels: tuple[float, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    place: Place = field(default="", compare=False)

    @property
    def trained(self) -> list[int]:
        """The numbers of the turns that are trained on."""
        return [i for i, turn in enumerate(self.messages) if i >= self.first and is_trained(turn)]

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The turns before the last one that is trained on."""
        return self.messages[: self.trained[-1]]

    @property
    def answer(self) -> str:
        """The text of the last turn that is trained on."""
        return str(self.messages[self.trained[-1]]["content"])


def is_trained(turn: Message) -> bool:
    """Tells whether a turn may be trained on: one of an assistant, if none of its switches is off."""
    return turn["role"] == "assistant" and all(turn.get(name) in (None, 1) for name in _SWITCHES)


def pair(question: str, answer: str) -> Sample:
    """Makes the sample of a question and its answer."""
    turns = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
    return Sample(messages=turns, first=1, is_pair=True)


def read_samples(config: DataConfig, *, reads: Callable[[str], bool] = lambda column: False) -> list[Sample]:
    """Reads the samples of a data set, at most ``config.max_samples``.

    reads: whether something else, such as a reward, reads a column.
    Raises UsageError, which names the file and the line or the number of the sample, for a wrong sample.
    """
    path = resolve(config.path)
    records = read_dataset(path, most=config.max_samples, split=config.split)
    place, first = records[0]
    columns = _columns(first, config, place)
    if not is_builtin(path):
        _name_unused([record for _, record in records], columns, config.path, reads)
    samples = [replace(_sample(record, columns, where), record=record, place=where) for where, record in records]
    shares = [pixels_of_token(sample.columns) for sample in samples]
    for sample, share in zip(samples, shares, strict=True):
        if share != shares[0]:
            raise UsageError(
                f"{sample.place}: has {share} pixel values per image token, {place.rpartition(', ')[2]} has "
                f"{shares[0]}; all samples need images of one size per token, or none"
            )
    return samples


def read_preferences(config: DataConfig) -> list[tuple[Sample, Sample]]:
    """Reads the preferences of a data set, at most ``config.max_samples``: the samples of both answers, chosen first.

    Raises UsageError, which names the file and the line or the number of the sample, for a wrong preference.
    """
    records = read_dataset(resolve(config.path), most=config.max_samples, split=config.split)
    place, first = records[0]
    if missing := [key for key in PREFERENCE_COLUMNS if not has_column(first, key)]:
        raise UsageError(
            f"{place}: no column {missing[0]!r}; found {names_of(first)}; preferences have 'prompt', 'chosen' and "
            f"'rejected'; give such a file to --data (data.path), or use a scenario of objective 'sft'"
        )
    names = dict.fromkeys((config.input_key, *(asked for asked, _ in PAIRS)))
    prompt = [key for key in names if has_column(first, key)][:1]
    if not is_builtin(resolve(config.path)):
        used = (*prompt, *PREFERENCE_COLUMNS, MARGIN)
        _name_unused([record for _, record in records], used, config.path, lambda column: column in used)
    numbers = (MARGIN,) if any(has_column(record, MARGIN) for _, record in records) else ()
    return [_preference(record, prompt, numbers, place) for place, record in records]


def read_labelled(config: DataConfig) -> list[Sample]:
    """Reads labelled answers, at most ``config.max_samples``: samples with the column ``label``, 1 or 0.

    Raises UsageError, which names the file and the line or the number of the sample, for a wrong one.
    """
    path = resolve(config.path)
    records = read_dataset(path, most=config.max_samples, split=config.split)
    place, first = records[0]
    if not has_column(first, LABEL):
        raise UsageError(
            f"{place}: no column {LABEL!r}; found {names_of(first)}; labelled answers have 'prompt', 'completion' and "
            f"{LABEL!r}; give such a file to --data (data.path), or use a scenario of objective 'sft'"
        )
    columns = _columns(first, config, place)
    if columns == (TOKENS,):
        raise UsageError(f"{place}: labelled answers need texts, because prompts are combined with other answers")
    if not is_builtin(path):
        _name_unused([record for _, record in records], columns, config.path, lambda column: column == LABEL)
    return [_labelled(record, columns, place) for place, record in records]


def read_steps(config: DataConfig) -> list[Sample]:
    """Reads answers in labelled steps, at most ``config.max_samples``.

    Raises UsageError, which names the file and the line or the number of the sample, for a wrong one.
    """
    path = resolve(config.path)
    records = read_dataset(path, most=config.max_samples, split=config.split)
    if not is_builtin(path):
        used = (*STEPWISE_COLUMNS,)
        _name_unused([record for _, record in records], used, config.path, lambda column: column in used)
    return [_stepwise(record, place) for place, record in records]


def _stepwise(record: Mapping[str, Any], place: Place) -> Sample:
    if missing := [key for key in STEPWISE_COLUMNS if not has_column(record, key)]:
        raise UsageError(
            f"{place}: no column {missing[0]!r}; found {names_of(record)}; labelled steps have 'prompt', 'completions' "
            f"and 'labels'; give such a file to --data (data.path), or use a scenario of objective 'sft'"
        )
    prompt, steps, labels = (record[key] for key in STEPWISE_COLUMNS)
    if not isinstance(steps, list) or not isinstance(labels, list) or not steps or len(steps) != len(labels):
        raise UsageError(
            f"{place}: 'completions' and 'labels' must be lists of the same length, a text and a label for each step; "
            f"got {shown(steps)} and {shown(labels)}"
        )
    if wrong := [label for label in labels if not isinstance(label, int | float) or not 0 <= label <= 1]:
        raise UsageError(
            f"{place}: each of 'labels' must be 1 (true) for a right step, 0 (false) for a wrong one, or a number "
            f"between, got {shown(wrong[0])}; correct or remove the sample"
        )
    texts = tuple(text_of(step, "completions", place) for step in steps)
    answered = {"prompt": prompt, "completion": "\n".join(texts)}
    sample = _sample(answered, ("prompt", "completion"), place)
    return replace(sample, steps=texts, labels=tuple(map(float, labels)), record=record, place=place)


def _labelled(record: Mapping[str, Any], columns: Sequence[str], place: Place) -> Sample:
    sample, label = _sample(record, columns, place), value_of(record, LABEL, place)
    if label not in (0, 1):
        raise UsageError(
            f"{place}: {LABEL!r} must be 1 (true) for a desired answer or 0 (false), got {shown(label)}; correct or "
            f"remove the sample"
        )
    return replace(sample, columns={LABEL: float(label)}, record=record, place=place)


def mismatched(sample: Sample, other: Sample) -> Sample:
    """Returns ``sample`` with the answer of the ``other`` one."""
    return replace(sample, messages=sample.messages[: sample.trained[0]] + other.messages[other.trained[0] :])


def _preference(
    record: Mapping[str, Any], prompt: Sequence[str], numbers: Sequence[str], place: Place
) -> tuple[Sample, Sample]:
    chosen, rejected = (_sample(record, (*prompt, key), place) for key in PREFERENCE_COLUMNS)
    if chosen.messages == rejected.messages:
        raise UsageError(
            f"{place}: 'chosen' and 'rejected' are the same, so nothing is preferred; leave the sample out"
        )
    pairs = enumerate(zip(chosen.messages, rejected.messages, strict=False))
    first_difference = next((at for at, (one, other) in pairs if one != other), 0)
    columns = {name: number_of(record, name, place) for name in numbers}
    both = [
        replace(one, first=max(one.first, first_difference), columns=columns, record=record, place=place)
        for one in (chosen, rejected)
    ]
    if not all(one.trained for one in both) or first_difference == 0:
        raise UsageError(
            f"{place}: 'chosen' and 'rejected' must be answers of an assistant to one prompt; give both the same turns "
            f"before them, or a column 'prompt'"
        )
    return both[0], both[1]


def _columns(record: Mapping[str, Any], config: DataConfig, place: Place) -> tuple[str, ...]:
    """Returns the columns of the input and the output, or the one of a conversation. Raises UsageError."""
    asked = config.input_key, config.output_key
    if asked != PAIRS[0]:
        if missing := [key for key in asked if not has_column(record, key)]:
            raise UsageError(
                f"{place}: no column {missing[0]!r}; found {names_of(record)}; name the columns with --input-key and "
                f"--output-key (data.input_key, data.output_key)"
            )
        return (asked[0],) if asked[0] == asked[1] else asked
    if has_column(record, TOKENS) and has_targets(record):  # what a framework trained on, perhaps beside its texts
        return (TOKENS,)
    if all(has_column(record, key) for key in asked):  # the user may have named them
        return asked
    for key in (*CONVERSATIONS, TOKENS):
        if has_column(record, key):
            return (key,)
    for keys in PAIRS[1:]:
        if all(has_column(record, key) for key in keys):
            return keys
    if record.keys() >= ROLLOUT_COLUMNS:
        raise UsageError(
            f"{place}: this is a rollout, but the objective reads pairs of texts or conversations; give --data "
            f"(data.path) a file of such samples, or use a scenario whose objective is 'grpo' or 'ppo'"
        )
    if {"chosen", "rejected"} <= record.keys():
        advice = "these are preferences; to train on what was chosen, give --input-key prompt --output-key chosen"
    elif "reward_model" in record:
        advice = "these are prompts for rollouts without an answer to train on; name one with --output-key"
    else:
        advice = "name the columns with --input-key and --output-key (data.input_key, data.output_key)"
    raise UsageError(f"{place}: no columns of questions and answers; found {names_of(record)}; {advice}")


def _name_unused(
    records: Sequence[Mapping[str, Any]], columns: Sequence[str], path: str, reads: Callable[[str], bool]
) -> None:
    used = {column.partition(".")[0] for column in columns}
    used |= {"labels", *KEYS} if columns == (TOKENS,) else {*SYSTEM, "tools"}
    used |= {"input"} if columns[0] == "instruction" else set()
    if unused := unused_columns(records, lambda name: name in used or reads(name)):
        targets = [name for name in unused if _TARGET.search(name)]
        hint = f"; {' and '.join(targets)} could be targets: --output-key names what is trained on" if targets else ""
        warn_once(f"{path}: columns that are not used: {', '.join(unused)}{hint}")


def unused_columns(records: Iterable[Mapping[str, Any]], reads: Callable[[str], bool]) -> list[str]:
    """Returns the names of the columns that hold no masks and that nothing reads."""
    names = dict.fromkeys(name for record in records for name in record if not reads(name))
    return [name for name in names if not masks_of({name: True})]


@functools.cache
def warn_once(message: str) -> None:
    logger.warning("%s", message)


def _sample(record: Mapping[str, Any], columns: Sequence[str], place: Place) -> Sample:
    values = [value_of(record, column, place) for column in columns]
    if columns == (TOKENS,):
        return _tokenized(record, values[0], place)
    check_unmasked(record, place)
    tools = tuple(_tools(record.get("tools"), place))
    if len(values) == 2 and not any(isinstance(value, list) for value in values):
        question, answer = (text_of(value, key, place) for value, key in zip(values, columns, strict=True))
        if columns[0] == "instruction" and "input" not in columns and record.get("input") not in (None, ""):
            question += ALPACA_INPUT + text_of(record["input"], "input", place)
        return _with_system(record, replace(pair(question, answer), tools=tools, is_pair=not tools), place)
    if len(values) == 1 and isinstance(values[0], str):
        raise UsageError(f"{place}: {columns[0]!r} must be a list of messages, got the text {shown(values[0])}")
    is_pair = len(values) == 2
    *before, last = [_turns(value, key, place, may_be_text=is_pair) for value, key in zip(values, columns, strict=True)]
    if is_pair and isinstance(values[1], str):
        last = [{"role": "assistant", "content": text_of(values[1], columns[1], place)}]
    if before and last[0]["role"] != "assistant":  # TRL's implicit prompt: the output repeats the input
        before = []
    messages = [*(before[0] if before else []), *last]
    sample = Sample(messages=tuple(messages), first=len(before[0]) if before else 0, tools=tools)
    if not sample.trained:
        raise UsageError(
            f"{place}: no turn of an assistant that is trained on, so nothing would be; leave the sample out"
        )
    sample = _with_system(record, sample, place)
    if sample.trained[0] == 0:
        raise UsageError(
            f"{place}: the conversation begins with the assistant, whose first token nothing comes before; begin it "
            f"with a turn of the user or the system, or leave the sample out"
        )
    return sample


def _with_system(record: Mapping[str, Any], sample: Sample, place: Place) -> Sample:
    """Puts a column of SYSTEM in front of the conversation. Raises UsageError if there is another system turn."""
    given = {name: record[name] for name in SYSTEM if record.get(name) not in (None, "")}
    texts = {text_of(text, name, place) for name, text in given.items()}
    texts |= {turn["content"] for turn in sample.messages[:1] if turn["role"] == "system"}
    if len(texts) > 1:
        raise UsageError(
            f"{place}: {' and '.join(given)} and the conversation hold different system messages; keep one of them"
        )
    if not texts or sample.messages[0]["role"] == "system":
        return sample
    first = {"role": "system", "content": texts.pop()}
    return replace(sample, messages=(first, *sample.messages), first=sample.first + 1, is_pair=False)


def _tokenized(record: Mapping[str, Any], tokens: Any, place: Place) -> Sample:
    """Returns the sample of a record with tokens. Its first token is never a target: nothing comes before it."""
    if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
        raise UsageError(f"{place}: {TOKENS!r} must be a list of tokens, got {shown(tokens)}")
    targets = (False, *labelled_tokens(record, place, tokens)[1:])
    if not any(targets):
        raise UsageError(f"{place}: no token of {TOKENS!r} is trained on; leave the sample out")
    columns = image_columns(record, place, len(tokens))
    return Sample(tokens=tuple(tokens), targets=targets, columns=columns)


def _turns(value: Any, key: str, place: Place, *, may_be_text: bool) -> list[Message]:
    """Returns the turns of a conversation with the roles of chat templates. Raises UsageError."""
    if isinstance(value, str):
        return [{"role": "user", "content": text_of(value, key, place)}]
    if value == []:
        raise UsageError(f"{place}: {key!r} is an empty list; give it messages, or leave the sample out")
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        text_or = "a text, or " * may_be_text
        raise UsageError(
            f"{place}: {key!r} must be {text_or}a list of messages with 'role' and 'content', got {shown(value)}; "
            f"correct or remove the sample"
        )
    turns: list[Message] = []
    for number, turn in enumerate(value, start=1):
        where = f"{place}, message {number} of {key!r}"
        kept = {name: part for name, part in turn.items() if part is not None}  # Parquet gives all turns all keys
        if "from" in kept and "role" not in kept:
            kept |= {"role": kept.pop("from"), "content": kept.pop("value", None)}
        role = _ROLES.get(str(kept.get("role")), kept.get("role"))
        if role not in _KNOWN_ROLES:
            raise UsageError(f"{where}: the role must be one of {', '.join(_KNOWN_ROLES)}, got {shown(role)}")
        if kept.get("content") is None and not kept.get("tool_calls"):
            raise UsageError(f"{where}: there is neither 'content' nor 'tool_calls'; correct or remove the sample")
        content = check_text(_joined(kept.get("content", "")), "content", where)
        for name in _SWITCHES:
            if role == "assistant" and kept.get(name) not in (None, 0, 1):
                raise UsageError(f"{where}: {name!r} must be 0 or 1 (false or true), got {shown(kept[name])}")
        turn = {**kept, "role": role, "content": content}
        if is_trained(turn) and not content.strip() and not kept.get("tool_calls"):
            raise UsageError(f"{where}: the answer is empty, so nothing would be trained on; leave the sample out")
        turns.append(turn)
    return turns


def _tools(value: Any, place: Place) -> list[Any]:
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except ValueError:
            raise UsageError(f"{place}: 'tools' is a text that is not JSON: {shown(value)}") from None
    if not value:
        return []
    if not isinstance(value, list):
        raise UsageError(f"{place}: 'tools' must be a list, got {shown(value)}")
    return value


def _joined(content: Any) -> Any:
    """Joins a content of several parts, if all of them are texts."""
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "".join(texts) if parts and len(texts) == len(parts) else content
