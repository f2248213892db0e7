"""Encodes samples with the tokenizer and the chat template of a user's model folder.

A chat template is a program. transformers denies it files and modules, but not endless loops. So the CPU time and the
number of characters that a template may use for one sample are limited.

Documents are tokenized when they are first used, because a run needs few of many. A document that is too long is cut,
left out or an error, as ``data.too_long`` says, and a warning counts such documents. The error names a length that
suffices for all of them.
"""

import contextlib
import functools
import hashlib
import logging
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median_high
from typing import Any, NoReturn

from conformance.core.errors import UsageError, lost_calls, lost_message, not_encoded, one_line
from conformance.core.host import resolve
from conformance.core.io import MIB
from conformance.data.forms import Sample
from conformance.data.samples import is_builtin
from conformance.models.folder_checks import CONFIG, Files, files_of, runs_code
from conformance.spec.batch import IMAGE, Column, Document
from conformance.spec.offline import LABEL
from conformance.spec.scenario import DataConfig

Encoded = tuple[tuple[int, ...], tuple[bool, ...]]  # the tokens, and whether each is a target
_ELSEWHERE = "\ue000answer\ue001"  # characters of private use
LONGEST_RENDERED_TEXT = 4 * MIB  # characters that a chat template may render for one sample


def load_tokenizer(model: Path, *, trusted: bool = False) -> Any:
    """Loads the tokenizer of a Hugging Face folder without downloads, and keeps it until a file there changes.

    ``trusted``: whether Python code of the folder may run. Raises UsageError if the tokenizer needs such code and it is
    not trusted, and for a configuration or a tokenizer that transformers cannot load.
    """
    return _loaded(model, files_of(model), trusted=trusted)


@functools.lru_cache(maxsize=8)
def _loaded(model: Path, files: Files, *, trusted: bool) -> Any:
    """Loads the tokenizer; ``files`` are only the key of the cache."""
    from transformers import AutoConfig, AutoTokenizer  # takes a second, which other commands need not wait for

    code = runs_code(model, trusted=trusted, tokenizer=True)
    config = None
    try:
        if (model / CONFIG).is_file():
            of_model = runs_code(model, trusted=trusted)
            config = AutoConfig.from_pretrained(model, trust_remote_code=of_model, local_files_only=True)
    except Exception as error:  # transformers raises errors of many types for unexpected values
        raise UsageError(f"{model / CONFIG} cannot be used by transformers: {one_line(error)}") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, config=config, trust_remote_code=code, local_files_only=True)
    except Exception as error:  # the tokenizers library, for example, raises a bare Exception
        raise UsageError(
            f"{model} has no tokenizer that transformers can load ({one_line(error)}); copy the tokenizer files of the "
            f"model into the folder (tokenizer.json, tokenizer_config.json)"
        ) from None
    with contextlib.suppress(NotImplementedError):  # the folder's own tokenizer need not list its vocabulary
        # Without files, transformers invents tokenizers that know their special tokens only, and drop all other text.
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            raise UsageError(
                f"{model} has no tokenizer files, so transformers invents a tokenizer that only knows special tokens; "
                f"copy those of the model into the folder (tokenizer.json, tokenizer_config.json)"
            )
    return tokenizer


def encode(sample: Sample, tokenizer: Any) -> Encoded:
    """Returns the tokens of a sample, and which of them are targets: the turns of an assistant with their end tokens.

    A chat template that marks ``{% generation %}`` says itself which tokens an assistant generates. Otherwise the turns
    are found by rendering the conversation up to each of them. Raises UsageError if a turn has no token, is not found,
    or has nothing before it. Errors of the template and the tokenizer propagate.
    """
    if sample.tokens:
        return sample.tokens, sample.targets
    if sample.steps:
        return _of_steps(sample, tokenizer)
    if tokenizer.chat_template is None:
        tokens, spans = _without_template(sample, tokenizer)
    else:
        _check_calls(sample, tokenizer)
        _check_kept(sample, tokenizer)
        if not sample.is_pair and re.search(r"\{%-?\s*generation\b", str(tokenizer.chat_template)):
            return _as_marked(sample, tokenizer)
        tokens, spans = _turns_of(sample, tokenizer)
    targets = [False] * len(tokens)
    for turn, (start, end) in zip(sample.trained, spans, strict=True):
        answer = repr(str(sample.messages[turn]["content"])[:40])
        if not start:
            raise UsageError(
                f"nothing comes before the first token of the answer {answer}, so there is nothing to predict it from; "
                f"give every sample an input, or the tokenizer a chat template that keeps the user's turn in front"
            )
        if start >= end:
            raise UsageError(f"the chat template leaves out the answer {answer}; correct the tokenizer's files")
        targets[start:end] = [True] * (end - start)
    return tuple(tokens), tuple(targets)


def _of_steps(sample: Sample, tokenizer: Any) -> Encoded:
    """Joins the prompt and the steps, which are tokenized apart, as in TRL. The target is the line break behind each
    step."""
    tokens = [*encode_prompt(sample, tokenizer)]
    targets = [False] * len(tokens)
    for step in sample.steps:
        own = [*_tokens(step, tokenizer), *_tokens("\n", tokenizer)]
        tokens, targets = tokens + own, [*targets, *[False] * (len(own) - 1), True]
    return tuple(tokens), tuple(targets)


class _NoTemplate(UsageError):
    """Says that the conversations of a data set need a chat template, whichever of them is asked for."""


def _without_template(sample: Sample, tokenizer: Any) -> tuple[list[int], list[tuple[int, int]]]:
    """Joins the two texts of a sample and the end-of-sequence token."""
    if not sample.is_pair:
        raise _NoTemplate(
            "a conversation needs a chat template, and the tokenizer has none; give chat_template.jinja to the model's "
            "folder, or two columns of texts"
        )
    if tokenizer.eos_token_id is None:
        raise UsageError(
            "the tokenizer has neither a chat template nor an end-of-sequence token, so an answer would have no "
            "end; set one of them in tokenizer_config.json"
        )
    question = str(sample.messages[0]["content"])
    tokens = [*_tokens(question + sample.answer, tokenizer), tokenizer.eos_token_id]
    return tokens, [(_common(_tokens(question, tokenizer), tokens), len(tokens))]


def _check_calls(sample: Sample, tokenizer: Any) -> None:
    """Raises UsageError if the chat template leaves out calls of tools, which would be trained on."""
    calling = [turn for turn in sample.trained if sample.messages[turn].get("tool_calls")]
    if not calling:
        return
    without = tuple({k: v for k, v in turn.items() if k != "tool_calls"} for turn in sample.messages)
    count = len(sample.messages)
    if _render(sample, count, tokenizer) == _render(replace(sample, messages=without), count, tokenizer):
        raise lost_calls(calling[0] + 1)


def _check_kept(sample: Sample, tokenizer: Any) -> None:
    """Raises UsageError if the chat template leaves out a message: the text is the same whatever the message says."""
    count = len(sample.messages)
    whole = _render(sample, count, tokenizer)
    for number, turn in enumerate(sample.messages):
        content = str(turn.get("content") or "").strip()
        if content in whole:
            continue
        turns = (*sample.messages[:number], {**turn, "content": _ELSEWHERE}, *sample.messages[number + 1 :])
        if _render(replace(sample, messages=turns), count, tokenizer) == whole:
            raise lost_message(number + 1, turn)


def _as_marked(sample: Sample, tokenizer: Any) -> Encoded:
    """Takes the targets from the marks of the template. Turns that are not trained on are no targets."""
    made = tokenizer.apply_chat_template(
        list(sample.messages), tools=list(sample.tools) or None, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, targets = list(made["input_ids"]), [bool(mark) for mark in made["assistant_masks"]]
    targets[0] = False
    if any(turn["role"] == "assistant" and i not in sample.trained for i, turn in enumerate(sample.messages)):
        spans = _turns_of(sample, tokenizer)[1]
        targets = [one and any(start <= i < end for start, end in spans) for i, one in enumerate(targets)]
    if not any(targets):
        raise UsageError("the chat template marks no token of this conversation by {% generation %}; correct it")
    return tuple(tokens), tuple(targets)


def _turns_of(sample: Sample, tokenizer: Any) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the tokens of a conversation, and for each turn that is trained on its first token and its end."""
    whole = _render(sample, len(sample.messages), tokenizer).rstrip()
    tokens = _tokens(whole, tokenizer)
    return tokens, [_span(sample, turn, tokens, whole, tokenizer) for turn in sample.trained]


def _span(sample: Sample, turn: int, tokens: list[int], whole: str, tokenizer: Any) -> tuple[int, int]:
    """Returns the first token of a turn and the one after its last, in the ``tokens`` of the ``whole`` text.

    Compared as tokens, not as text: a tokenizer may join the end of the prompt and the start of the answer.
    """
    prompt, waiting = (_render(sample, turn, tokenizer, waits=waits) for waits in (False, True))
    if not sample.is_pair and not whole.startswith((prompt.rstrip(), waiting.rstrip())):
        raise _rewritten(turn)
    start = _common(_tokens(waiting, tokenizer), tokens)
    if turn == len(sample.messages) - 1:
        return start, len(tokens)
    until = _render(sample, turn + 1, tokenizer).rstrip()
    if not whole.startswith(until):
        until = _until(sample, turn, whole, tokenizer)
    return start, _common(_tokens(until, tokenizer), tokens)


def _until(sample: Sample, turn: int, whole: str, tokenizer: Any) -> str:
    """Returns the part of the ``whole`` text that ends with a turn which is written otherwise where it is the last.

    Some templates write an empty block of reasoning into the last answer only, or end every conversation with a token.
    The end of the turn is looked for behind an answer that occurs nowhere else: it is what follows this answer both
    where it is the last and where it is not.
    """
    turns = list(sample.messages)
    turns[turn] = {**turns[turn], "content": _ELSEWHERE}
    changed = replace(sample, messages=tuple(turns))
    after = _render(changed, len(turns), tokenizer).rstrip().partition(_ELSEWHERE)[2]
    last = _render(changed, turn + 1, tokenizer).rstrip().partition(_ELSEWHERE)[2]
    tokens = _tokens(after, tokenizer)
    end = tokenizer.decode(tokens[: _common(_tokens(last, tokenizer), tokens)]).rstrip()
    if not (end and whole.endswith(after) and after.startswith(end)):
        raise _rewritten(turn)
    return whole[: len(whole) - len(after) + len(end)]


def _rewritten(turn: int) -> UsageError:
    return UsageError(
        f"the chat template writes message {turn + 1} or those before it otherwise once other messages follow, so what "
        f"was generated cannot be told; mark it in the template by {{% generation %}}, or end the conversation there"
    )


def _common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Counts the tokens that two lists have in common at their start."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(tokens), len(others)))


def encode_prompt(sample: Sample, tokenizer: Any) -> tuple[int, ...]:
    """Returns the tokens of a prompt that waits for its answer: those that ``encode`` puts before the answer.

    Raises UsageError if there are none. Errors of the template and the tokenizer propagate.
    """
    if sample.tokens:
        raise UsageError("the sample is tokenized already, but a rollout begins with a prompt as text; give texts")
    turns = sample.prompt
    if tokenizer.chat_template is None:
        _without_template(sample, tokenizer)
        text = str(turns[0]["content"])
    else:
        text = _render(sample, len(turns), tokenizer, waits=True)
    if not (tokens := _tokens(text, tokenizer)):
        question = repr(str(turns[-1]["content"])[:40])
        raise UsageError(f"the tokenizer gives no token for the question {question}, so nothing can follow it")
    return tuple(tokens)


def _tokens(text: str, tokenizer: Any) -> list[int]:
    """Encodes text; ``verbose`` would warn of texts beyond the model's positions, which ``max_len`` handles anyway."""
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return tokens


def _render(sample: Sample, turns: int, tokenizer: Any, *, waits: bool = False) -> str:
    """Renders the first ``turns`` of a conversation by the chat template. waits: for an answer of the assistant."""
    text: str = tokenizer.apply_chat_template(
        list(sample.messages[:turns]), tools=list(sample.tools) or None, tokenize=False, add_generation_prompt=waits
    )
    if len(text) > LONGEST_RENDERED_TEXT:
        raise UsageError(
            f"the chat template renders {len(text)} characters, but at most {LONGEST_RENDERED_TEXT} are allowed"
        )
    return text


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


SAMPLE_LIMIT_S = 5.0  # CPU time for one sample; a chat template can loop for ever
REPORT_EVERY_S = 10.0
_HAPPENS = {"truncate": "were cut at the end", "drop": "were left out"}

logger = logging.getLogger(__name__)


MOST_SHARED = 10_000  # documents that stay in memory for models with the same tokenizer
_Shared = dict[tuple[bool, int, str], Encoded]


def _encodings_of(tokenizer: Any) -> _Shared:
    """Returns the documents that equal tokenizers of this process have encoded: of one class, from equal files that
    nobody changed after they were loaded. Large ones are not compared, because few runs have several."""
    folder = Path(str(getattr(tokenizer, "name_or_path", "")))
    file, backend = folder / "tokenizer.json", getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not file.is_file() or file.stat().st_size > MIB:
        return {}
    files = [file for file, _ in files_of(folder) if file.name != CONFIG and file.suffix in (".json", ".jinja")]
    digests = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
    state = type(tokenizer), tokenizer.chat_template, tokenizer.special_tokens_map, backend.to_str()
    return _encodings(f"{state} {digests}")


@functools.lru_cache(maxsize=4)
def _encodings(tokenizer: str) -> _Shared:
    return {}


class Documents:
    """Tokenizes ``samples``, which are (number in the data set, sample), into documents in this order.

    The tokens that an assistant's turn adds are targets, including the template's end token but not the white space
    after it. If the tokenizer has no chat template, a document is the input, the output and the end-of-sequence token.

    likely: the least number of documents, from the first one, that will be used.
    """

    def __init__(
        self, samples: Sequence[tuple[int, Sample]], config: DataConfig, tokenizer: Any, *, likely: int
    ) -> None:
        self._samples, self.config, self._tokenizer = samples, config, tokenizer
        self._likely = likely
        self._encoded: dict[int, Encoded] = {}
        self._shared = _encodings_of(tokenizer)
        self._report_at = time.monotonic() + REPORT_EVERY_S

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Document | None:
        """Returns the document, cut if it is too long; None if it is left out.

        Raises UsageError for a document that is too long and may not be cut or left out, or that cannot be encoded.
        """
        (tokens, targets), limit = self._encode(index), self.config.max_len
        sample = self._samples[index][1]
        columns: dict[str, Column] = {**sample.columns}
        if sample.labels:
            labels = iter(sample.labels)
            columns[LABEL] = tuple(next(labels) if target else 0.0 for target in targets)[:limit]
        if len(tokens) > limit and self.config.too_long == "drop":
            return None
        if not any(targets[:limit]):
            self._raise_too_long("leaves no room for a target token in", lambda one: not any(one[1][:limit]))
        if len(tokens) > limit and (self.config.too_long == "error" or IMAGE in columns):  # an image cannot be cut
            self._raise_too_long("is too short for", lambda one: len(one[0]) > limit)
        return Document(tokens[:limit], targets[:limit], columns)

    def check_packing(self) -> None:
        """Raises UsageError if half of the documents that are likely to be used leave no room in a row for a second."""
        limit, lengths = self.config.max_len, self._likely_lengths()
        alone = _count_alone(lengths, limit)
        if 2 * alone < len(lengths) or not lengths:
            return
        what = f"a row of {limit} tokens (data.max_len) packs no second document beside {alone} of {len(lengths)}"
        longer = self.advice() if self.config.too_long == "drop" else f"use --max-len {self._sufficient()} or more"
        unpacked = "a scenario with data.packed=false, such as sft-padded, without --packing-samples"
        raise UsageError(f"{what} documents of {self.config.path}; {longer}, or {unpacked}")

    def _likely_lengths(self) -> list[int]:
        """Returns the lengths of the first documents that are not left out, as many as are likely to be used."""
        kept = (document for index in range(len(self)) if (document := self[index]))
        return [len(document.tokens) for document in islice(kept, self._likely)]

    def none_left(self) -> UsageError:
        """Returns the error for data whose documents are all left out."""
        return UsageError(
            f"all {len(self)} documents of {self.config.path} have more than --max-len {self.config.max_len} tokens "
            f"(data.max_len); {self.advice()}{self._instead()}"
        )

    def advice(self) -> str:
        """Names the smallest max_len that suffices and the one that keeps all documents, and what each keeps.

        This tokenizes every document.
        """
        every = [self._encode(index)[0] for index in range(len(self))]
        kept = {limit: sum(len(tokens) <= limit for tokens in every) for limit in {len(tokens) for tokens in every}}
        longest, needed = max(kept), self._smallest_that_serves(every)
        now, then = (sum(len(tokens) <= limit for tokens in every) for limit in (self.config.max_len, needed))
        text = f"it keeps {now} of {len(every)}; use --max-len {needed}, which keeps {then}"
        return text if then == len(every) else f"{text}, or --max-len {longest}, which keeps all"

    def _smallest_that_serves(self, every: Sequence[tuple[int, ...]]) -> int:
        """Returns the smallest ``max_len`` above the present one that keeps two different documents.

        With packing, the documents must also fit into rows of two.
        """
        likely = [len(tokens) for tokens in every]
        shortest = min(likely)
        limits = {*likely, *(length + shortest for length in likely)} if self.config.packed else {*likely}
        for limit in sorted(limit for limit in limits if limit > self.config.max_len):
            if self._serves(limit, "drop"):
                return limit
        return max(limits)  # all documents are the same, or long enough already: nothing serves better

    def _serves(self, limit: int, too_long: str) -> bool:
        """Tells whether two different documents are left when those of more than ``limit`` tokens are cut ("truncate")
        or left out ("drop"). With packing, the documents must also fit into rows of two. This tokenizes every document.
        """
        every = [(*self._encode(index), IMAGE in self._samples[index][1].columns) for index in range(len(self))]
        if too_long == "drop":  # the documents of a pair have one number, and are left out together
            numbers = [number for number, _ in self._samples]
            long = {number for number, one in zip(numbers, every, strict=True) if len(one[0]) > limit}
            every = [one for number, one in zip(numbers, every, strict=True) if number not in long]
        elif any(not any(targets[:limit]) or (with_image and len(targets) > limit) for _, targets, with_image in every):
            return False
        kept = [tokens[:limit] for tokens, *_ in every]
        lengths = [len(tokens) for tokens in kept[: self._likely]]
        return len(set(kept)) > 1 and (not self.config.packed or 2 * _count_alone(lengths, limit) < len(lengths))

    def _instead(self) -> str:
        """Names the other values of ``too_long`` that serve with the present ``max_len``, as the end of an advice."""
        others = [how for how in ("truncate", "drop") if how != self.config.too_long]
        return "".join(f", or --too-long {how}" for how in others if self._serves(self.config.max_len, how))

    def warn_of_length(self) -> None:
        """Warns how many of the documents so far were too long. Built-in data are exempt: there it is intended."""
        long = sum(len(tokens) > self.config.max_len for tokens, _ in self._encoded.values())
        if long and not is_builtin(resolve(self.config.path)):
            logger.warning(
                "%s: %d of the %d documents that were tokenized have more than %d tokens and %s",
                *(self.config.path, long, len(self._encoded), self.config.max_len, _HAPPENS[self.config.too_long]),
            )

    def _encode(self, index: int) -> Encoded:
        if index not in self._encoded:
            number, sample = self._samples[index]
            key = (sample.is_pair, sample.first, repr((sample.messages, sample.tools, sample.steps)))
            try:
                with computing_at_most(SAMPLE_LIMIT_S):
                    encoded = self._shared.get(key) if sample.messages else None
                    self._encoded[index] = encoded or encode(sample, self._tokenizer)
            except _NoTemplate as error:
                raise UsageError(f"{self.config.path} and {self._tokenizer.name_or_path}: {error}") from None
            except Exception as error:  # a user's template may raise anything
                place = sample.place or f"sample {number} of {self.config.path}"
                raise not_encoded(self._tokenizer.name_or_path, place, error) from None
            if len(self._shared) < MOST_SHARED and sample.messages:
                self._shared[key] = self._encoded[index]
            if (now := time.monotonic()) > self._report_at:
                logger.warning("tokenizing %s: %d documents so far", self.config.path, len(self._encoded))
                self._report_at = now + REPORT_EVERY_S
        return self._encoded[index]

    def _raise_too_long(self, what: str, is_wrong: Callable[[Encoded], bool]) -> NoReturn:
        """Raises UsageError. Every document is tokenized before, so that the named length suffices for all."""
        needed = self._sufficient()
        count = sum(map(is_wrong, self._encoded.values()))
        raise UsageError(
            f"--max-len {self.config.max_len} (data.max_len) {what} {count} of {len(self)} documents of "
            f"{self.config.path}; use --max-len {needed} or more{self._instead()}"
        )

    def _sufficient(self) -> int:
        """Returns the smallest ``max_len`` that raises no UsageError here, for the data set as a whole."""
        every = [self._encode(index) for index in range(len(self))]
        if self.config.too_long == "error":
            needed = max(len(tokens) for tokens, _ in every)
        else:
            needed = max(targets.index(True) for _, targets in every) + 1
        if self.config.packed:
            lengths = [len(tokens) for tokens, _ in every[: self._likely]]
            needed = max(needed, median_high(lengths) + min(lengths))
        return needed


def _count_alone(lengths: Sequence[int], limit: int) -> int:
    """Counts the documents that leave no room for the shortest one in a row of ``limit`` tokens."""
    return sum(length + min(lengths) > limit for length in lengths)
