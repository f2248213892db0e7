"""Rewards that can be verified: the number that a response ends with, against the reference's.

The answer of a reference is what follows ``####``, as GSM8K writes it, or else its last number; that of a response is
its last number. A sign belongs to a number unless a digit stands in front of it ("7-2" ends with 2, "-2" and "= -2"
with -2), commas may part thousands, 3.0 is 3, and .5 is 0.5.
"""

import re
from collections.abc import Callable
from decimal import Decimal

from conformance.validation import UsageError, shown

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
