"""Inputs: the data of a training: documents of SFT, or the prompts of roll-outs, and those that are held out.

They are read before a model is loaded, and checked before ranks are started, so that data that cannot be used end a
training before it costs anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers

from conformance.batch import Document
from conformance.inputs.documents import check_vocabulary, load_documents
from conformance.inputs.folder import runs_code
from conformance.inputs.samples import read_samples
from conformance.inputs.tokenizer import load_tokenizer
from conformance.role import POLICY
from conformance.scenario import DataConfig
from conformance.validation import UsageError
from impl.train.config import RolloutConfig, TrainConfig
from impl.train.experience import check_rollout
from impl.train.prompts import Prompt, load_prompts


@dataclass(frozen=True, kw_only=True)
class DocumentInputs:
    """``held_out`` is None without an ``eval_dataset``."""

    documents: Sequence[Document]
    held_out: Sequence[Document] | None


@dataclass(frozen=True, kw_only=True)
class PromptInputs:
    """``held_out`` as above. ``tokenizer`` reads responses; ``end``: the tokens that end one."""

    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt] | None
    tokenizer: Any
    end: tuple[int, ...]


def check_inputs(config: TrainConfig) -> None:
    """Raises UsageError for data that a training cannot use; for the process that starts the ranks.

    Prompts are few and short, so they are read as ranks read them. Documents are tokenized by ranks alone.
    """
    if config.rollout is not None:
        _prompts(config, config.rollout)
        return
    for data in (config.scenario.data, held_out_data(config)):
        if data is not None:
            read_samples(data)


def read_inputs(config: TrainConfig) -> DocumentInputs | PromptInputs:
    """All data of a training. Raises UsageError for data, a tokenizer or lengths that cannot be used."""
    if config.rollout is not None:
        return _prompts(config, config.rollout)
    held_out = held_out_data(config)
    return DocumentInputs(
        documents=_documents(config, config.scenario.data),
        held_out=None if held_out is None else _documents(config, held_out),
    )


def held_out_data(config: TrainConfig) -> DataConfig | None:
    """The data that is looked at, and not trained on."""
    return None if config.eval_dataset is None else replace(config.scenario.data, path=str(config.eval_dataset))


def _documents(config: TrainConfig, data: DataConfig) -> list[Document]:
    """All samples of a data set, in its order, tokenized for the policy."""
    model, trusted = config.models[POLICY.name], config.scenario.trust_remote_code
    documents = load_documents(data, load_tokenizer(model, trusted=trusted))
    check_vocabulary(documents, model, _vocabulary_size(model, trusted=trusted))
    return documents


def _prompts(config: TrainConfig, rollout: RolloutConfig) -> PromptInputs:
    model, trusted = config.models[POLICY.name], config.scenario.trust_remote_code
    tokenizer, size = load_tokenizer(model, trusted=trusted), _vocabulary_size(model, trusted=trusted)

    def load(data: DataConfig) -> list[Prompt]:
        return load_prompts(data, tokenizer, vocabulary=size, max_new_tokens=rollout.max_new_tokens)

    prompts, held_out = load(config.scenario.data), held_out_data(config)
    check_rollout(config.scenario, rollout, prompts)
    return PromptInputs(
        prompts=prompts,
        held_out=None if held_out is None else load(held_out),
        tokenizer=tokenizer,
        end=end_tokens(model, tokenizer.eos_token_id),
    )


def end_tokens(policy: Path, end: int | None) -> tuple[int, ...]:
    """What ends a response: the tokenizer's end-of-sequence token, and those of the folder's generation settings.

    Raises UsageError where there is none.
    """
    found = set() if end is None else {end}
    if (policy / transformers.utils.GENERATION_CONFIG_NAME).is_file():
        told = transformers.GenerationConfig.from_pretrained(policy).eos_token_id
        found |= {told} if isinstance(told, int) else set(told or ())
    if not found:
        raise UsageError(f"the tokenizer in {policy} has no end-of-sequence token, so no response would have an end")
    return tuple(sorted(found))


def _vocabulary_size(model: Path, *, trusted: bool) -> int:
    """How many tokens a model knows, by its configuration."""
    config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=runs_code(model, trusted=trusted))
    size: int = config.get_text_config().vocab_size
    return size
