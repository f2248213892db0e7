"""Tokenizer: encodes samples with the tokenizer and the chat template of a user's model folder.

A chat template is a program. transformers denies it files and modules, but does not keep it from running for ever. So
the CPU time and the number of characters that a template may use for one sample are limited.
"""

import contextlib
import functools
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance.inputs.folder import CONFIG, Files, files_of, runs_code
from conformance.reading import MIB
from conformance.validation import UsageError, one_line

LONGEST_RENDERED_TEXT = 4 * MIB  # characters that a chat template may render for one sample


def load_tokenizer(model: Path, *, trusted: bool = False) -> Any:
    """Load the tokenizer of a Hugging Face folder; nothing is downloaded. It is kept until a file there changes.

    ``trusted``: Python code of the folder may be run. Raises UsageError if the tokenizer needs such code and it is not
    trusted, and for a configuration or a tokenizer that transformers cannot load.
    """
    return _loaded(model, files_of(model), trusted=trusted)


@functools.lru_cache(maxsize=8)
def _loaded(model: Path, files: Files, *, trusted: bool) -> Any:
    """See ``load_tokenizer``. ``files`` are there for the cache."""
    from transformers import AutoConfig, AutoTokenizer  # takes a second, which no other command is to wait for

    options = {"trust_remote_code": runs_code(model, trusted=trusted), "local_files_only": True}
    config = None
    try:
        if (model / CONFIG).is_file():
            config = AutoConfig.from_pretrained(model, **options)
    except Exception as error:  # transformers raises errors of many types for unexpected values
        raise UsageError(f"{model / CONFIG} cannot be used by transformers: {one_line(error)}") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, config=config, **options)
    except Exception as error:  # the tokenizers library, for example, raises a bare Exception
        raise UsageError(
            f"{model} has no tokenizer that transformers can load ({one_line(error)}); copy the tokenizer files of the "
            f"model into the folder (tokenizer.json, tokenizer_config.json)"
        ) from None
    with contextlib.suppress(NotImplementedError):  # a tokenizer of the folder's own need not list its vocabulary
        # Without files, transformers makes up tokenizers that know their special tokens and drop all of a text.
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            raise UsageError(
                f"{model} has no tokenizer files, so transformers makes up one that knows special tokens alone; copy "
                f"those of the model into the folder (tokenizer.json, tokenizer_config.json)"
            )
    return tokenizer


def encode(question: str, answer: str, tokenizer: Any) -> tuple[tuple[int, ...], int]:
    """The tokens of a sample, and how many of these tokens are the prompt.

    Raises UsageError if the prompt or the answer has no token. Errors of the template and the tokenizer are passed on.
    """
    end: list[int] = []
    prompt = _prompt(question, tokenizer)
    if tokenizer.chat_template is not None:
        user = {"role": "user", "content": question}
        assistant = {"role": "assistant", "content": answer}
        whole = tokenizer.apply_chat_template([user, assistant], tokenize=False).rstrip()
        if (longer := max(len(prompt), len(whole))) > LONGEST_RENDERED_TEXT:
            raise UsageError(
                f"the chat template renders {longer} characters; {LONGEST_RENDERED_TEXT} at most are allowed"
            )
    else:
        if tokenizer.eos_token_id is None:
            raise UsageError(
                "the tokenizer has neither a chat template nor an end-of-sequence token, so an answer would have no "
                "end; set one of them in tokenizer_config.json"
            )
        whole, end = question + answer, [tokenizer.eos_token_id]
    tokens = [*_tokens(whole, tokenizer), *end]
    # Compared as tokens, not as text: a tokenizer may join the end of the prompt and the start of the answer.
    size = 0
    for ours, theirs in zip(_tokens(prompt, tokenizer), tokens, strict=False):
        if ours != theirs:
            break
        size += 1
    if not size:
        raise UsageError(
            f"nothing comes before the first token of the answer {answer[:40]!r}, so there is nothing to predict it "
            f"from; give every sample an input, or the tokenizer a chat template that keeps the user's turn in front"
        )
    if size == len(tokens):
        raise UsageError(f"the chat template leaves out the answer {answer[:40]!r}; mend it in the tokenizer's files")
    return tuple(tokens), size


def encode_prompt(question: str, tokenizer: Any) -> tuple[int, ...]:
    """Tokens of a prompt that waits for its answer: what ``encode`` puts in front of one.

    Raises UsageError where there are none, and whatever template and tokenizer raise.
    """
    prompt = _prompt(question, tokenizer)
    if not (tokens := _tokens(prompt, tokenizer)):
        raise UsageError(f"the tokenizer gives no token for the question {question[:40]!r}, so nothing can follow it")
    return tuple(tokens)


def _tokens(text: str, tokenizer: Any) -> list[int]:
    """``verbose`` would warn of texts longer than the model's positions, which ``max_len`` has to deal with anyway."""
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return tokens


def _prompt(question: str, tokenizer: Any) -> str:
    if tokenizer.chat_template is None:
        return question
    user = {"role": "user", "content": question}
    prompt: str = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
    return prompt


@contextlib.contextmanager
def computing_at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError when the process has used this much CPU time inside the block.

    The error is raised between two Python instructions, so not inside a long call of C code. Waiting for a busy machine
    does not count. Outside the main thread, which alone receives signals, there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
