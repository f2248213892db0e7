"""Scores responses to prompts: REWARDS has each reward of ``parity train --reward`` by name.

A reward compares the last number of a response with the reference's answer: the text after ``####``, as GSM8K writes
it, or else its last number. A sign belongs to a number unless a digit stands in front of it ("7-2" ends with 2, "-2"
and "= -2" with -2), commas may separate thousands, 3.0 is 3, and .5 is 0.5.
"""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal

from conformance.core.errors import UsageError, shown

ARITHMETIC = "arithmetic"  # path of the embedded data set (impl/train/data.py)
Reward = Callable[[str, Decimal], float]  # (response, answer) -> reward

MARK = "####"
NUMBER_REWARD, NEARNESS_REWARD, FAR = 0.2, 0.3, 10
_WHOLE, _PART = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)", r"\.[0-9]+"
_NUMBER = re.compile(rf"(?:(?<![0-9])[-+\u2212])?(?:{_WHOLE}(?:{_PART})?|(?<![0-9.]){_PART})")


def last_number(text: str) -> Decimal | None:
    """Returns the last number in a text; None if there is none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def reference_answer(reference: str, place: str) -> Decimal:
    """Returns the number that a right response ends with. Raises UsageError that names ``place`` if there is none."""
    answer = last_number(reference.rpartition(MARK)[2])
    if answer is None:
        raise UsageError(
            f"{place}: the reference {shown(reference)} has no number{' after ' + MARK if MARK in reference else ''}, "
            f"but the reward compares numbers; give answers that end with a number, or leave the sample out"
        )
    return answer


def exact_answer(response: str, answer: Decimal) -> float:
    """Returns 1 if the response ends with the right number, else 0."""
    return float(last_number(response) == answer)


def near_answer(response: str, answer: Decimal) -> float:
    """Returns 1 for the right number; for a wrong number 0.2, plus up to 0.3 for its nearness within a distance of 10.

    It serves the embedded arithmetic, which a tiny random model learns: this model hardly ever gives the right number
    by chance, and it cannot learn from rewards that are all 0.
    """
    given = last_number(response)
    if given is None:
        return 0.0
    if given == answer:
        return 1.0
    return NUMBER_REWARD + NEARNESS_REWARD * (1 - min(float(abs(given - answer)), FAR) / FAR)


REWARDS: Mapping[str, Reward] = {"exact-answer": exact_answer, "near-answer": near_answer}


def reward_name(path: str, name: str | None) -> str:
    """Returns ``name``, or without a name the reward for the data set at ``path``."""
    return name or ("near-answer" if path == ARITHMETIC else "exact-answer")


def reward_of(path: str, name: str | None) -> Reward:
    return REWARDS[reward_name(path, name)]
