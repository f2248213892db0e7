"""Prompts: questions with an answer that can be verified, of a user's file or the embedded arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from conformance.inputs.lazy import SAMPLE_LIMIT_S
from conformance.inputs.samples import read_samples
from conformance.inputs.tokenizer import computing_at_most, encode_prompt
from conformance.scenario import DataConfig
from conformance.validation import UsageError, one_line
from impl.train.config import ARITHMETIC
from impl.train.rewards import Reward, exact_answer, near_answer, reference_answer


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
