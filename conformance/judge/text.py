"""Judges text pipelines: rendered text and mask, by the template's own rendering with labels (conformance.oracle.chat).

A pipeline says which rules it follows (TextInfo), because frameworks differ in what they train on. The rules are
judged, and what is trained on is reported whatever they say. A conversation that a framework refuses is not a
difference.

Published chat templates are fixtures (templates/templates.toml names their sources), so that pipelines can be judged on
them without the models. The tokenizer made for each knows the special tokens of the model, and one token for each byte
of other text.
"""

import json
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from conformance.backends.text import ServedPipeline, TextFailed, TextInfo
from conformance.core.errors import UsageError, did_you_mean, first_few, not_encoded, one_line
from conformance.core.host import FIXTURES, resolve
from conformance.data.forms import Sample, is_trained, read_labelled, read_preferences, read_samples
from conformance.data.samples import PREFERENCE_COLUMNS, ROLLOUT_COLUMNS, STEPWISE_COLUMNS, read_dataset
from conformance.data.tokenizer import SAMPLE_LIMIT_S, computing_at_most, load_tokenizer
from conformance.models.folder_checks import check_model_folder
from conformance.oracle.chat import KINDS, ChatTemplate, Label, Rendered
from conformance.results.verdict import State
from conformance.spec.offline import LABEL
from conformance.spec.scenario import DataConfig

TEMPLATES = FIXTURES / "templates"
CONVERSATIONS = FIXTURES / "data" / "conversations.jsonl"
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class TemplateFolder:
    """Holds a Hugging Face folder with a tokenizer and a chat template.

    names: what frameworks with templates of their own call it, by framework.
    """

    name: str
    folder: Path
    names: Mapping[str, str] = field(default_factory=dict)
    template: ChatTemplate


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Holds a conversation. is_own: whether a user gave it, so that nothing of it may get lost.

    first, is_pair: of conformance.data.forms.Sample.
    """

    name: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] = ()
    first: int = 0
    is_pair: bool = False
    is_own: bool = True


def published(names: Sequence[str], root: Path) -> Iterator[TemplateFolder]:
    """Makes a folder under ``root`` for each of the published templates; ``all`` names all of them."""
    known = tomllib.loads((TEMPLATES / "templates.toml").read_text(encoding="utf-8"))
    if unknown := next((name for name in names if name not in known and name != ALL), None):
        raise UsageError(
            f"unknown chat template {unknown!r}; {did_you_mean(unknown, known)}known: {', '.join(known)}, {ALL}"
        )
    for name in known if ALL in names else dict.fromkeys(names):
        values = known[name]
        source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        folder = root / name
        _write(folder, values, source)
        special = _special(values) | {f"special_{i}": token for i, token in enumerate(values["special"])}
        template = ChatTemplate(source=source, special=special)
        yield TemplateFolder(name=name, folder=folder, names=values["frameworks"], template=template)


def own_template(model: Path, *, trusted: bool) -> TemplateFolder:
    """Returns a user's model folder. Raises UsageError if it has no chat template that is a single text."""
    check_model_folder(model)
    tokenizer = load_tokenizer(model, trusted=trusted)
    if not isinstance(tokenizer.chat_template, str):
        raise UsageError(f"{model} has no chat template; add chat_template.jinja, or judge another model folder")
    special = dict(tokenizer.special_tokens_map) | {
        f"added_{i}": str(t) for i, t in enumerate(tokenizer.get_added_vocab())
    }
    texts = {name: token for name, token in special.items() if isinstance(token, str)}
    template = ChatTemplate(source=tokenizer.chat_template, special=texts)
    return TemplateFolder(name=model.name, folder=model, template=template)


def read_conversations(path: str) -> list[Conversation]:
    """Reads the conversations of a data set, both answers of a preference, or those of the suite for an empty path.

    Raises UsageError for records that are no texts.
    """
    if path:
        return [
            Conversation(name=place, messages=one.messages, tools=one.tools, first=one.first, is_pair=one.is_pair)
            for place, one in _samples(path)
        ]
    lines = CONVERSATIONS.read_text(encoding="utf-8").splitlines()
    return [Conversation(**json.loads(line), is_own=False) for line in lines]


def _samples(path: str) -> list[tuple[str, Sample]]:
    config, records = DataConfig(path=path), read_dataset(resolve(path))
    place, columns = records[0][0], records[0][1].keys()
    tokens = "input_ids" in columns and not read_samples(config)[0].messages
    if tokens or columns >= ROLLOUT_COLUMNS or columns >= {*STEPWISE_COLUMNS}:
        raise UsageError(
            f"{place}: {'tokens' if tokens else 'rollouts or labelled steps'} are not judged by `parity text`, which "
            f"renders texts and conversations; give --data a file of these, or judge this one by `parity run`"
        )
    places = [place for place, _ in records]
    if columns >= {*PREFERENCE_COLUMNS}:
        both = zip(places, read_preferences(config), strict=True)
        return [
            (f"{place}, {name}", one)
            for place, pair in both
            for name, one in zip(PREFERENCE_COLUMNS, pair, strict=True)
        ]
    samples = read_labelled(config) if columns >= {"completion", LABEL} else read_samples(config)
    return list(zip(places, samples, strict=True))


def _special(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns the named special tokens of a tokenizer; a model without a token for the beginning has no name for it."""
    return {f"{kind}_token": values[kind] for kind in ("bos", "eos", "pad") if values[kind]}


def _write(folder: Path, values: Mapping[str, Any], source: str) -> None:
    """Writes a tokenizer of bytes with the special tokens of a model, and its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # slow

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    named = _special(values)
    tokens = dict.fromkeys((*named.values(), *values["special"]))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": 2**20}), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(llama), encoding="utf-8")


NO_LIMIT = 2**20  # tokens
SHORTEST_MATCH = 6  # tokens; shorter parts of texts that differ agree by chance
EDGE = 2  # tokens at both ends of a common part, which may belong to what differs
Encoded = tuple[list[int], list[bool]]


@dataclass(frozen=True, kw_only=True)
class TextCheck:
    """Holds the result of one check of a stage. short: what a table shows."""

    stage: str
    state: State
    text: str
    short: str


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Holds what the reference makes of a conversation. labels, marked: of each token."""

    conversation: Conversation
    tokens: list[int]
    labels: list[Label]
    marked: list[bool] | None

    def targets(self, info: TextInfo) -> list[bool]:
        """Returns which tokens the rules of a pipeline train on."""
        answers = [i for i in self.answers if not info.forms or i not in self.not_trained]
        turns = answers if info.turns == "all" else answers[-1:]
        if self.marked is not None:
            return [one and label.message in turns for one, label in zip(self.marked, self.labels, strict=True)]
        return [label.message in turns and label.kind in info.trains for label in self.labels]

    @property
    def answers(self) -> list[int]:
        """The numbers of the assistant's turns."""
        return [i for i, message in enumerate(self.conversation.messages) if message["role"] == "assistant"]

    @property
    def not_trained(self) -> list[int]:
        """The numbers of those that the data set does not train on: earlier ones of a prompt, or switched off."""
        turns = self.conversation.messages
        return [i for i in self.answers if i < self.conversation.first or not is_trained(turns[i])]


def expected_of(
    folder: TemplateFolder, conversations: Sequence[Conversation], info: TextInfo
) -> tuple[list[Expected], dict[str, str]]:
    """Renders and tokenizes conversations by the reference. Also returns those that the template refuses, with why.

    Raises UsageError for a user's conversation that the template refuses or of which it renders something away.
    """
    tokenizer = load_tokenizer(folder.folder)
    found, refused = [], {}
    for one in conversations:
        try:
            with computing_at_most(SAMPLE_LIMIT_S):
                rendered = folder.template.render(one.messages, one.tools)
        except Exception as error:  # a template may raise anything
            if one.is_own:
                raise not_encoded(folder.folder, one.name, error) from None
            refused[one.name] = one_line(error)
            continue
        if not info.marks or (info.forms and one.is_pair):
            rendered = replace(rendered, marked=None)
        if info.strips_end and not rendered.marked:
            rendered = replace(rendered, text=rendered.text.rstrip())
        found.append(_tokenized(one, rendered, tokenizer))
    return found, refused


def _tokenized(one: Conversation, rendered: Rendered, tokenizer: Any) -> Expected:
    encoded = tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = [start for start, _ in encoded["offset_mapping"]]
    return Expected(
        conversation=one,
        tokens=list(encoded["input_ids"]),
        labels=[rendered.labels[start] for start in starts],
        marked=None if rendered.marked is None else [rendered.marked[start] for start in starts],
    )


def judge_conversations(
    pipeline: ServedPipeline, folder: TemplateFolder, conversations: Sequence[Conversation]
) -> Iterator[TextCheck]:
    """Judges what a pipeline renders, trains on and cuts, with the chat template of a folder."""
    expected, refused = expected_of(folder, conversations, pipeline.info)
    if not expected:
        raise UsageError(
            f"the chat template {folder.name} renders none of the conversations: {next(iter(refused.values()))}"
        )
    failed: dict[str, str] = {}
    pairs: list[tuple[Expected, Encoded]] = []
    try:
        pipeline.load(folder.folder, _own_name(pipeline.info, folder))
    except TextFailed as error:
        yield TextCheck(stage="rendered text", state="unsupported", text=f"{error}", short="refused")
        return
    for one in expected:
        try:
            encoded = _encoded(pipeline, one.conversation, NO_LIMIT)
        except (TextFailed, UsageError) as error:
            failed[one.conversation.name] = one_line(error)
            continue
        if encoded is None:
            failed[one.conversation.name] = "left out without a word"
        else:
            pairs.append((one, encoded))
    tokenizer = load_tokenizer(folder.folder)
    yield _judge_text(pairs, failed, tokenizer)
    if pairs:
        yield _judge_mask(pairs, pipeline.info, tokenizer)
        yield _judge_truncation(pipeline, max(pairs, key=lambda pair: _cut_targets(pair[1])), tokenizer)


def _encoded(pipeline: ServedPipeline, one: Conversation, limit: int) -> Encoded | None:
    return pipeline.encode(one.messages, one.tools, limit, first=one.first, is_pair=one.is_pair)


def _own_name(info: TextInfo, folder: TemplateFolder) -> str:
    """Returns the framework's own name of a template; pipelines of one framework begin with its name."""
    names = (name for framework, name in folder.names.items() if info.name.startswith(framework))
    return next(names, "") if info.own_templates else ""


def _judge_text(pairs: Sequence[tuple[Expected, Encoded]], failed: dict[str, str], tokenizer: Any) -> TextCheck:
    wrong = [(one, tokens) for one, (tokens, _) in pairs if tokens != one.tokens]
    count = len(pairs) + len(failed)
    reasons = list(dict.fromkeys(failed.values()))
    refusals = "".join(
        f"; refuses {first_few([name for name in failed if failed[name] == why], most=2)}: {why}" for why in reasons
    )
    same = f"{len(pairs) - len(wrong)} of {count} conversations have the template's tokens"
    if wrong:
        one, tokens = wrong[0]
        text = (
            f"{same}; first difference: {one.conversation.name}, {_difference(one.tokens, tokens, tokenizer)}{refusals}"
        )
        return TextCheck(stage="rendered text", state="differs", text=text, short=f"{len(wrong)} of {count} differ")
    state: State = "unsupported" if not pairs else "partly_observed" if failed else "conforms"
    short = "same" if not failed else f"same, {len(failed)} refused" if pairs else "refused"
    return TextCheck(stage="rendered text", state=state, text=f"{same}{refusals}", short=short)


def _difference(expected: Sequence[int], observed: Sequence[int], tokenizer: Any) -> str:
    """Says where two lists of tokens begin to differ, with the text around it."""
    place = next((i for i, (a, b) in enumerate(zip(expected, observed, strict=False)) if a != b), None)
    place = min(len(expected), len(observed)) if place is None else place
    texts = [repr(tokenizer.decode(list(one[place : place + 24]))) for one in (expected, observed)]
    return f"token {place}: the template has {texts[0]}, the pipeline {texts[1]}"


def _judge_mask(pairs: Sequence[tuple[Expected, Encoded]], info: TextInfo, tokenizer: Any) -> TextCheck:
    """Judges the mask on the tokens that the pipeline and the template have in common."""
    wrong, trained, all_of = "", Counter[str](), Counter[str]()
    for one, (tokens, targets) in pairs:
        wanted, last = one.targets(info), max(one.answers, default=-1)
        for at, place in _common(one.tokens, tokens):
            label = one.labels[at]
            part = label.kind if label.role == "assistant" else f"{label.role} message"
            if label.role == "assistant" and label.message != last:
                part = f"earlier {part}"
            all_of[part] += 1
            trained[part] += targets[place]
            if targets[place] != wanted[at] and not wrong:
                does = "trains on" if targets[place] else "does not train on"
                shown = repr(tokenizer.decode(tokens[place : place + 12]))
                wrong = (
                    f"{does} token {place} of {one.conversation.name}, {shown}: {part} of message {label.message + 1}"
                )
    parts = _parts(trained, all_of)
    rules = ["what the template marks"] if any(one.marked is not None for one, _ in pairs) else []
    rules += (
        [f"{', '.join(info.trains)} of {info.turns} answers"] if any(one.marked is None for one, _ in pairs) else []
    )
    off = sum(len(one.not_trained) for one, _ in pairs) if info.forms else 0
    rule = " and ".join(rules) + (f", but for {off} that the data switch off or have in a prompt" if off else "")
    text = f"trains on {parts}" + (f"; but the rule is {rule}: {wrong}" if wrong else f", as its rule: {rule}")
    return TextCheck(stage="mask", state="differs" if wrong else "conforms", text=text, short=parts)


def _common(expected: Sequence[int], observed: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the places of tokens that both lists have, in order; of lists that differ, those of long common parts."""
    least, edge = (1, 0) if list(expected) == list(observed) else (SHORTEST_MATCH, EDGE)
    for block in SequenceMatcher(None, expected, observed, autojunk=False).get_matching_blocks():
        if block.size >= least:
            yield from ((block.a + i, block.b + i) for i in range(edge, block.size - edge))


def _parts(trained: Counter[str], all_of: Counter[str]) -> str:
    """Lists the parts that are trained on: of all answers, of the last one alone, or in part."""
    found = []
    for kind in KINDS:
        last, earlier = trained[kind], trained[f"earlier {kind}"]
        if not last and not earlier:
            continue
        whole = last == all_of[kind] and earlier == all_of[f"earlier {kind}"]
        only_last = last == all_of[kind] and not earlier and all_of[f"earlier {kind}"]
        found.append(kind if whole else f"{kind} of the last answer" if only_last else f"part of {kind}")
    found += [part for part in trained if trained[part] and part.endswith(" message")]
    return ", ".join(found) or "nothing"


def _limit(tokens: Sequence[int]) -> int:
    return 2 * len(tokens) // 3


def _cut_targets(encoded: Encoded) -> int:
    """Counts targets on that side of the cut that has fewer of them."""
    tokens, targets = encoded
    return min(sum(targets[: _limit(tokens)]), sum(targets[_limit(tokens) :]))


def _judge_truncation(pipeline: ServedPipeline, pair: tuple[Expected, Encoded], tokenizer: Any) -> TextCheck:
    """Judges what is left of a conversation in two thirds of its tokens."""
    one, (tokens, targets) = pair
    limit, rule = _limit(tokens), pipeline.info.truncates
    try:
        cut = _encoded(pipeline, one.conversation, limit)
    except (TextFailed, UsageError) as error:
        state: State = "conforms" if rule == "error" else "differs"
        return TextCheck(stage="truncation", state=state, text=f"refuses {limit + 1} tokens: {error}", short="refused")
    what = f"{len(tokens)} tokens cut to {limit}"
    wanted = {"end": (tokens[:limit], targets[:limit]), "start": (tokens[-limit:], targets[-limit:])}
    eos = tokenizer.eos_token_id
    wanted["end, with an end token, or left out"] = ([*tokens[: limit - 1], eos], [*targets[: limit - 1], True])
    if cut is None:
        allowed: State = "conforms" if rule.endswith("left out") or not any(targets[:limit]) else "differs"
        return TextCheck(stage="truncation", state=allowed, text=f"{what}: left out", short="left out")
    if rule == "turns":
        left = iter(tokens)
        right = len(cut[0]) <= limit and all(token in left for token in cut[0])  # in this order
        text = f"{what}: {len(cut[0])} are left, each turn cut at its end"
        return TextCheck(stage="truncation", state="conforms" if right else "differs", text=text, short=rule)
    if rule != "error" and cut == wanted[rule]:
        return TextCheck(stage="truncation", state="conforms", text=f"{what}: {rule}", short=rule)
    kept_rule = next((name for name, kept in wanted.items() if cut == kept), "")
    text = f"{what}: the rule is {rule}, but {kept_rule or f'{len(cut[0])} tokens'} was kept"
    return TextCheck(stage="truncation", state="differs", text=text, short=kept_rule or "other")
