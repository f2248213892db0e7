"""Lazy: the documents of a data set, each tokenized when it is first asked for, because a run needs few of many.

A document that is too long is cut, left out or refused, as the user says (``data.too_long``), and the user is told how
many there were. A refusal names a length that suffices, so that there is no second one (claim 9).
"""

import logging
import time
from collections.abc import Callable, Sequence
from itertools import islice
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
        self._samples, self.config, self._tokenizer = samples, config, tokenizer
        self._likely = likely
        self._encoded: dict[int, Encoded] = {}
        self._tell_at = time.monotonic() + TELL_EVERY_S

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Document | None:
        """The document, cut if it is too long; None if it is left out.

        Raises UsageError for a document that is too long and can be neither, and for one that cannot be encoded.
        """
        (tokens, prompt), limit = self._encode(index), self.config.max_len
        if len(tokens) > limit and self.config.too_long == "drop":
            return None
        if prompt >= limit:
            self._refuse("leaves no room for a target token in", lambda one: one[1] >= limit, instead="drop")
        if len(tokens) > limit and self.config.too_long == "error":
            self._refuse("is too short for", lambda one: len(one[0]) > limit, instead="truncate")
        return Document(tokens[:limit], tuple(i >= prompt for i in range(len(tokens)))[:limit])

    def check_packing(self) -> None:
        """Raises UsageError if beside half of the documents that are likely to be asked for no second one fits."""
        limit, lengths = self.config.max_len, self._likely_lengths()
        alone = _alone(lengths, limit)
        if 2 * alone < len(lengths) or not lengths:
            return
        what = f"--max_len {limit} (data.max_len) packs no second document beside {alone} of {len(lengths)} documents"
        if self.config.too_long == "drop":
            raise UsageError(f"{what}; {self.advice()}, or leave out --packing_samples (data.packed=false)")
        raise UsageError(
            f"{what}; use --max_len {self._sufficient()} or more, or leave out --packing_samples (data.packed=false)"
        )

    def _likely_lengths(self) -> list[int]:
        """The lengths of the first documents that are not left out, as many as are likely to be asked for."""
        held = (document for index in range(len(self)) if (document := self[index]))
        return [len(document.tokens) for document in islice(held, self._likely)]

    def none_left(self) -> UsageError:
        """For data of which every document is left out."""
        return UsageError(
            f"all {len(self)} documents of {self.config.path} have more than --max_len {self.config.max_len} tokens "
            f"(data.max_len); {self.advice()}, or --too_long truncate"
        )

    def advice(self) -> str:
        """Of documents that are left out where they are too long: the smallest length that serves, the one that keeps
        all, and what is kept at each. Now every document is tokenized."""
        every = [self._encode(index)[0] for index in range(len(self))]
        kept = {limit: sum(len(tokens) <= limit for tokens in every) for limit in {len(tokens) for tokens in every}}
        longest, needed = max(kept), self._smallest_that_serves(every)
        now, then = (sum(len(tokens) <= limit for tokens in every) for limit in (self.config.max_len, needed))
        told = f"it keeps {now} of {len(every)}; use --max_len {needed}, which keeps {then}"
        return told if then == len(every) else f"{told}, or --max_len {longest}, which keeps all"

    def _smallest_that_serves(self, every: Sequence[tuple[int, ...]]) -> int:
        """The smallest ``max_len`` above the present one that keeps two documents that are not the same, and at which
        they can be packed if they are to be."""
        likely = [len(tokens) for tokens in every]
        shortest = min(likely)
        limits = {*likely, *(length + shortest for length in likely)} if self.config.packed else {*likely}
        for limit in sorted(limit for limit in limits if limit > self.config.max_len):
            kept = [tokens for tokens in every if len(tokens) <= limit]
            lengths = [len(tokens) for tokens in kept[: self._likely]]
            is_packed = not self.config.packed or 2 * _alone(lengths, limit) < len(lengths)
            if len(set(kept)) > 1 and is_packed:
                return limit
        return max(limits)  # all documents are the same, or long enough already: nothing serves better

    def tell(self) -> None:
        """Tell how many of the documents so far were too long. What the built-in data does is meant, and not told."""
        long = sum(len(tokens) > self.config.max_len for tokens, _ in self._encoded.values())
        if long and not resolve(self.config.path).is_relative_to(FIXTURES):
            logger.warning(
                "%s: %d of the %d documents that were tokenized have more than %d tokens and %s",
                *(self.config.path, long, len(self._encoded), self.config.max_len, _HAPPENS[self.config.too_long]),
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
                    f"{self.config.path}: {one_line(error)}"
                ) from None
            if (now := time.monotonic()) > self._tell_at:
                logger.warning("tokenizing %s: %d documents so far", self.config.path, len(self._encoded))
                self._tell_at = now + TELL_EVERY_S
        return self._encoded[index]

    def _refuse(self, what: str, is_wrong: Callable[[Encoded], bool], *, instead: str) -> NoReturn:
        """Raises UsageError. Now every document is tokenized, so that the length that is named suffices for all."""
        needed = self._sufficient()
        count = sum(map(is_wrong, self._encoded.values()))
        raise UsageError(
            f"--max_len {self.config.max_len} (data.max_len) {what} {count} of {len(self)} documents of "
            f"{self.config.path}; use --max_len {needed} or more, or --too_long {instead}"
        )

    def _sufficient(self) -> int:
        """The smallest ``max_len`` that raises no UsageError here, for the data set as a whole."""
        every = [self._encode(index) for index in range(len(self))]
        if self.config.too_long == "error":
            needed = max(len(tokens) for tokens, _ in every)
        else:
            needed = max(prompt for _, prompt in every) + 1
        if self.config.packed:
            lengths = [len(tokens) for tokens, _ in every[: self._likely]]
            needed = max(needed, median_high(lengths) + min(lengths))
        return needed


def _alone(lengths: Sequence[int], limit: int) -> int:
    """Of how many documents a row of ``limit`` tokens has no room for the shortest one beside them."""
    return sum(length + min(lengths) > limit for length in lengths)
