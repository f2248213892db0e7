"""Lazy: the documents of a data set, each tokenized when it is first asked for, because a run needs few of many.

A document that is too long is cut, left out or refused, as the user says (``data.too_long``), and the user is told how
many there were. A refusal names a length that suffices, so that there is no second one (claim 9).
"""

import logging
import time
from collections.abc import Callable, Sequence
from statistics import median_high
from typing import Any, NoReturn

from conformance.batch import Document
from conformance.inputs.tokenizer import computing_at_most, encode
from conformance.paths import FIXTURES, resolve
from conformance.scenario import DataConfig
from conformance.validation import UsageError, one_line

SAMPLE_LIMIT_S = 5.0  # CPU time for one sample; a chat template can loop for ever
TELL_EVERY_S = 10.0
_HAPPENS = {"truncate": "were cut at the end", "drop": "were left out"}

logger = logging.getLogger(__name__)
Encoded = tuple[tuple[int, ...], int]  # the tokens, and how many of these are the prompt


class Documents:
    """The documents of ``samples``, which are (number in the data set, input, output), in this order.

    The input is the user's turn of the tokenizer's chat template, and the output is the assistant's turn. The tokens
    that the output adds are targets, including the template's end token but not the white space after it. If the
    tokenizer has no chat template, a document is the input, the output and the end-of-sequence token.

    likely: the number of documents, from the first one, that will be asked for at least.
    """

    def __init__(
        self, samples: Sequence[tuple[int, str, str]], config: DataConfig, tokenizer: Any, *, likely: int
    ) -> None:
        self._samples, self._config, self._tokenizer = samples, config, tokenizer
        self._likely = range(min(likely, len(samples)))
        self._encoded: dict[int, Encoded] = {}
        self._tell_at = time.monotonic() + TELL_EVERY_S

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Document | None:
        """The document, cut if it is too long; None if it is left out.

        Raises UsageError for a document that is too long and can be neither, and for one that cannot be encoded.
        """
        (tokens, prompt), limit = self._encode(index), self._config.max_len
        if len(tokens) > limit and self._config.too_long == "drop":
            return None
        if prompt >= limit:
            self._refuse("leaves no room for a target token in", lambda one: one[1] >= limit, instead="drop")
        if len(tokens) > limit and self._config.too_long == "error":
            self._refuse("is too short for", lambda one: len(one[0]) > limit, instead="truncate")
        return Document(tokens[:limit], tuple(i >= prompt for i in range(len(tokens)))[:limit])

    def check_packing(self) -> None:
        """Raises UsageError if beside half of the documents that are likely to be asked for no second one fits."""
        limit = self._config.max_len
        held = [document for index in self._likely if (document := self[index])]
        lengths = [len(document.tokens) for document in held]
        alone = sum(length + min(lengths) > limit for length in lengths)
        if held and 2 * alone >= len(lengths):
            raise UsageError(
                f"data.max_len={limit} packs no second document beside {alone} of {len(lengths)} documents; use "
                f"data.max_len={self._sufficient()} or more, or data.packed=false; the option is --max_len"
            )

    def tell(self) -> None:
        """Tell how many of the documents so far were too long. What the built-in data does is meant, and not told."""
        long = sum(len(tokens) > self._config.max_len for tokens, _ in self._encoded.values())
        if long and not resolve(self._config.path).is_relative_to(FIXTURES):
            logger.warning(
                "%s: %d of the %d documents that were tokenized have more than %d tokens and %s",
                *(self._config.path, long, len(self._encoded), self._config.max_len, _HAPPENS[self._config.too_long]),
            )

    def _encode(self, index: int) -> Encoded:
        if index not in self._encoded:
            number, question, answer = self._samples[index]
            try:
                with computing_at_most(SAMPLE_LIMIT_S):
                    self._encoded[index] = encode(question, answer, self._tokenizer)
            except Exception as error:  # a user's template may raise anything
                raise UsageError(
                    f"the tokenizer in {self._tokenizer.name_or_path} cannot encode sample {number} of "
                    f"{self._config.path}: {one_line(error)}"
                ) from None
            if (now := time.monotonic()) > self._tell_at:
                logger.warning("tokenizing %s: %d documents so far", self._config.path, len(self._encoded))
                self._tell_at = now + TELL_EVERY_S
        return self._encoded[index]

    def _refuse(self, what: str, is_wrong: Callable[[Encoded], bool], *, instead: str) -> NoReturn:
        """Raises UsageError. Now every document is tokenized, so that the length that is named suffices for all."""
        needed = self._sufficient()
        count = sum(map(is_wrong, self._encoded.values()))
        raise UsageError(
            f"data.max_len={self._config.max_len} {what} {count} of {len(self)} documents of {self._config.path}; use "
            f"data.max_len={needed} or more (--max_len {needed}), or --too_long {instead}"
        )

    def _sufficient(self) -> int:
        """The smallest ``max_len`` that raises no UsageError here, for the data set as a whole."""
        every = [self._encode(index) for index in range(len(self))]
        if self._config.too_long == "error":
            needed = max(len(tokens) for tokens, _ in every)
        else:
            needed = max(prompt for _, prompt in every) + 1
        if self._config.packed:
            lengths = [len(every[index][0]) for index in self._likely]
            needed = max(needed, median_high(lengths) + min(lengths))
        return needed
