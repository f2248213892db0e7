"""Finds published chat templates, makes a tokenizer of bytes for each, and reads conversations.

The templates are fixtures (templates/templates.toml names their sources), so that text pipelines can be judged on them
without the models. The tokenizer knows the special tokens of the model, and one token for each byte of other text.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.core.errors import UsageError, did_you_mean
from conformance.core.host import FIXTURES, resolve
from conformance.data.forms import Sample, read_labelled, read_preferences, read_samples
from conformance.data.samples import PREFERENCE_COLUMNS, ROLLOUT_COLUMNS, STEPWISE_COLUMNS, read_dataset
from conformance.data.tokenizer import load_tokenizer
from conformance.models.folder_checks import check_model_folder
from conformance.oracle.chat import ChatTemplate
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
