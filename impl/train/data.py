"""Rewards that can be verified: the number that a response ends with, against the reference's.

The answer of a reference is what follows ``####``, as GSM8K writes it, or else its last number; that of a response is
its last number. A sign belongs to a number unless a digit stands in front of it ("7-2" ends with 2, "-2" and "= -2"
with -2), commas may part thousands, 3.0 is 3, and .5 is 0.5.

Prompts: questions with an answer that can be verified, of a user's file or the embedded arithmetic.

Source: what is trained on next, and where in the data that is. Here of documents; of roll-outs in experience.py.

The order of documents follows from the seed and the epoch (impl/checkpoints/training_state.py), and which of them a
step takes only from the position: it knows neither ranks nor checkpoints. So a training that was interrupted loses
none and repeats none, also when it goes on with another number of ranks.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Protocol

from conformance.core.errors import UsageError, one_line, shown
from conformance.data.samples import read_samples
from conformance.data.tokenizer import SAMPLE_LIMIT_S, computing_at_most, encode_prompt
from conformance.spec.batch import Batch, Document, Row
from conformance.spec.scenario import DataConfig
from impl.checkpoints.training_state import DataPosition
from impl.train.config import ARITHMETIC

Reward = Callable[[str, Decimal], float]  # (response, answer) -> reward

MARK = "####"
NUMBER_REWARD, NEARNESS_REWARD, FAR = 0.2, 0.3, 10
_WHOLE, _PART = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)", r"\.[0-9]+"
_NUMBER = re.compile(rf"(?:(?<![0-9])[-+\u2212])?(?:{_WHOLE}(?:{_PART})?|(?<![0-9.]){_PART})")


def last_number(text: str) -> Decimal | None:
    """The number that stands last in a text; None where there is none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def reference_answer(reference: str, place: str) -> Decimal:
    """The number that a right response ends with. Raises UsageError that names ``place`` for a reference without."""
    answer = last_number(reference.rpartition(MARK)[2])
    if answer is None:
        raise UsageError(
            f"{place}: the reference {shown(reference)} has no number{' behind ' + MARK if MARK in reference else ''}, "
            f"and the reward compares numbers; give answers that end with one, or leave the sample out"
        )
    return answer


def exact_answer(response: str, answer: Decimal) -> float:
    """1 where the response ends with the right number, else 0."""
    return float(last_number(response) == answer)


def near_answer(response: str, answer: Decimal) -> float:
    """1 for the right number; for a wrong one 0.2, and up to 0.3 more the nearer it is, nothing more from 10 away on.

    For the embedded arithmetic, which a tiny random model learns: it hardly ever gives the right number by chance, and
    from rewards that are all 0 there is nothing to learn.
    """
    given = last_number(response)
    if given is None:
        return 0.0
    if given == answer:
        return 1.0
    return NUMBER_REWARD + NEARNESS_REWARD * (1 - min(float(abs(given - answer)), FAR) / FAR)


@dataclass(frozen=True)
class Prompt:
    """``tokens``: up to where the response begins. ``answer``: the number that a right one ends with."""

    tokens: tuple[int, ...]
    answer: Decimal


def load_prompts(data: DataConfig, tokenizer: Any, *, vocabulary: int, max_new_tokens: int) -> list[Prompt]:
    """The prompts of a data set: the user's turn of the chat template, and the number in the reference.

    Raises UsageError for what cannot be used: a file, a template, a reference without a number, and a prompt that
    leaves no room for ``max_new_tokens`` in ``data.max_len``.
    """
    prompts = []
    for number, (question, reference) in enumerate(_samples(data), start=1):
        place = f"sample {number} of {data.path}"
        try:
            with computing_at_most(SAMPLE_LIMIT_S):
                tokens = encode_prompt(question, tokenizer)
        except Exception as error:  # whatever somebody's template does
            raise UsageError(
                f"the tokenizer in {tokenizer.name_or_path} does not serve for {place}: {one_line(error)}"
            ) from None
        if max(tokens) >= vocabulary:
            raise UsageError(
                f"the tokenizer in {tokenizer.name_or_path} gives token {max(tokens)}, and the model's vocabulary has "
                f"{vocabulary}; give the folder the tokenizer of this model"
            )
        prompts.append(Prompt(tokens, reference_answer(reference, place)))
    longest = max(len(prompt.tokens) for prompt in prompts)
    if longest + max_new_tokens > data.max_len:
        raise UsageError(
            f"data.max_len={data.max_len} has no room for a prompt of {longest} tokens and max_new_tokens="
            f"{max_new_tokens}; use data.max_len={longest + max_new_tokens}, or shorter responses"
        )
    return prompts


def reward_of(data: DataConfig) -> Reward:
    """How responses to the prompts of a data set are rewarded."""
    return near_answer if data.path == ARITHMETIC else exact_answer


def _samples(data: DataConfig) -> Sequence[tuple[str, str]]:
    return arithmetic() if data.path == ARITHMETIC else read_samples(data)


def arithmetic() -> list[tuple[str, str]]:
    """All 55 sums and 55 differences of two digits whose result is a digit, as questions and answers."""
    sums = [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10 - a)]
    differences = [(f"{a}-{b}=", str(a - b)) for a in range(10) for b in range(a + 1)]
    return sums + differences


@dataclass(frozen=True, kw_only=True)
class Work:
    """``batches``: of the updates up to the next place where a training can be interrupted, one each. ``numbers``: what
    is known of them beforehand, for the log."""

    batches: Sequence[Batch]
    numbers: dict[str, float] = field(default_factory=dict)


class Source(Protocol):
    position: DataPosition  # after the work that was given last

    def next(self, step: int) -> Work:
        """The work that begins with optimizer step ``step`` (from 0); collective."""
        ...


@dataclass
class DocumentSource:
    """Rows of documents, an optimizer step at a time."""

    documents: Sequence[Document]
    data: DataConfig
    position: DataPosition

    def next(self, step: int) -> Work:
        rows = []
        for index in range(self.data.rows):
            documents, self.position = next_row(self.documents, self.position, self.data)
            rows.append(Row(index, documents))
        return Work(batches=[Batch(step, self.data.max_len, tuple(rows))])


def next_row(
    documents: Sequence[Document], position: DataPosition, data: DataConfig
) -> tuple[tuple[Document, ...], DataPosition]:
    """One document, or when packed the next ones in order for as long as they fit; and the position after them."""
    row: list[Document] = []
    while True:
        (number,), after = position.take(1)
        if row and not fits(row, documents[number], data):
            return tuple(row), position
        row.append(documents[number])
        position = after


def fits(row: Sequence[Document], document: Document, data: DataConfig) -> bool:
    """Whether a document goes into a row that has others."""
    return data.packed and sum(len(one.tokens) for one in (*row, document)) <= data.max_len
